"""Benchmark cases in six groups (questions), such as forward, backward and decode; the important cases come first."""

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SEED = 0  # for the inputs, and for fusedattn's dropout
TOKENS, WIDTH = 16384, 2048  # B * S and Hq * D of a case, as in the FlashAttention papers
# Matrix products of each mode, relative to those of a forward.
PASSES = {"forward": 1.0, "graph": 1.0, "backward": 2.5, "forward_backward": 3.5}


class Tensors(NamedTuple):
    """Tensors of a case: inputs, the gradient of its output, and masks, slopes and sinks by argument name.

    A module has only query and grad_out, both (B, S, Hq * D).
    """

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    grad_out: Tensor
    bias: Tensor | None = None
    masks: dict = {}

    @property
    def inputs(self) -> tuple:
        return tuple(x for x in (self.query, self.key, self.value, self.bias) if x is not None)


class Case(NamedTuple):
    """One benchmark case: the sizes of a call, as in the columns of the CSV; dtype is the name of a torch dtype.

    Words of `options`: bias (1, Hq, Sq, Sk); documents=N, a mask for N documents in a sequence; random, a mask that
    hides half of the pairs; keys=SHARE, the share of keys that are not padding; lengths=KIND, packed sequences with
    lengths from LENGTHS; filled=SHARE, the filled share of a cache; latent: values are the first columns of the keys;
    window=LEFT,RIGHT; softcap=CAP; alibi; sinks; dropout=P; weights: also returned; module: with its projections.
    """

    B: int
    Hq: int
    Hkv: int
    Sq: int
    Sk: int
    D: int
    Dv: int
    causal: bool
    dtype: str
    options: str = ""

    @property
    def name(self) -> str:
        """Return the case as text: sizes in the order of `fusedattn bench --shape`, then the other fields."""
        words = [f"Dv {self.Dv}"] * (self.D != self.Dv) + ["causal"] * self.causal
        return " ".join([",".join(map(str, self[:6])), *words, DTYPES.get(self.dtype, self.dtype), *self.words])

    @property
    def words(self) -> list[str]:
        return self.options.split()

    def option(self, name: str) -> str | None:
        """Return the value of an option: "" if the option takes no value, None if the case lacks it."""
        return dict(word.partition("=")[::2] for word in self.words).get(name)

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """Return the attention window as (left, right), where None is unbounded; causal makes right 0."""
        left, right = map(int, (self.option("window") or "-1,-1").split(","))
        return None if left < 0 else left, 0 if self.causal else None if right < 0 else right

    def draw(self, device) -> Tensors:
        """Return normal random tensors, the same each time. Tensors of zeros would run faster on a GPU."""
        generator, dtype = torch.Generator(device).manual_seed(SEED), getattr(torch, self.dtype)

        def normal(*shape):
            return torch.randn(shape, device=device, generator=generator).to(dtype)

        if "module" in self.words:
            shape = self.B, self.Sq, self.Hq * self.D
            return Tensors(normal(*shape), None, None, normal(*shape))
        queries, keys = (self.B, self.Hq, self.Sq), (self.B, self.Hkv, self.Sk)
        query, key, value = normal(*queries, self.D), normal(*keys, self.D), normal(*keys, self.Dv)
        value = key[..., : self.Dv] if "latent" in self.words else value
        grad_out = normal(*queries, self.Dv)
        bias = normal(1, self.Hq, self.Sq, self.Sk) if "bias" in self.words else None
        return Tensors(query, key, value, grad_out, bias, self.masks(device))

    def documents(self, device) -> Tensor:
        """Return (S,), the index of the document that each token belongs to."""
        generator = torch.Generator().manual_seed(SEED)
        ends = torch.randperm(self.Sk - 1, generator=generator)[: int(self.option("documents")) - 1] + 1
        return torch.searchsorted(ends.sort().values, torch.arange(self.Sk), right=True).to(device)

    def random(self, device) -> Tensor:
        """Return bool (Sq, Sk), True for half of the pairs."""
        generator = torch.Generator(device).manual_seed(SEED)
        return torch.rand(self.Sq, self.Sk, device=device, generator=generator) < 0.5

    def lengths(self, device) -> Tensor:
        """Return (B,), the number of real tokens of each sequence, or of filled slots of each cache."""
        generator = torch.Generator().manual_seed(SEED)
        if share := self.option("keys"):
            half = torch.rand(self.B // 2, generator=generator)
            lengths = torch.cat([1 + half, 1 - half, torch.ones(self.B % 2)]) * float(share) * self.Sk
        elif share := self.option("filled"):
            lengths = torch.full((self.B,), float(share) * self.Sk)
        else:
            kind = self.option("lengths")
            lengths = LENGTHS[kind](self.B, self.Sk) if kind else torch.full((self.B,), self.Sk)
            lengths = lengths[torch.randperm(self.B, generator=generator)]
        return lengths.round().long().clamp(1, self.Sk).to(device)

    def masks(self, device) -> dict:
        masks = {}
        if "documents" in self.options:
            owner = self.documents(device)
            masks["mask"] = (owner[:, None] == owner[None, :])[None, None]
        if "random" in self.words:
            masks["mask"] = self.random(device)[None, None]
        if any(word in self.options for word in ("keys", "lengths", "filled")):
            masks["key_mask"] = torch.arange(self.Sk, device=device)[None, :] < self.lengths(device)[:, None]
        if "lengths" in self.options:
            masks["query_mask"] = masks["key_mask"]
        if "alibi" in self.words:  # slopes of arXiv:2108.12409
            masks["alibi_slopes"] = 2.0 ** (torch.arange(1, self.Hq + 1, device=device) * -8 / self.Hq)
        if "sinks" in self.words:
            masks["sinks"] = torch.zeros(self.Hq, device=device)
        return masks

    def arguments(self, masks) -> dict:
        options = dict(causal=self.causal) | masks
        if "weights" in self.words:
            options["return_weights"] = True
        if "window" in self.options:
            options["window"] = self.sides
        if cap := self.option("softcap"):
            options["softcap"] = float(cap)
        if rate := self.option("dropout"):
            options |= dict(dropout_p=float(rate), seed=SEED)
        return options

    def flops(self, mode: str) -> float:
        """Return the FLOPs of a call's matrix products. Pairs hidden by causal, `lengths` or `filled` do not count."""
        lengths = self.lengths("cpu").tolist() if "lengths" in self.options else []
        sizes = [(x, x) for x in lengths] or [(self.Sq, self._keys)] * self.B
        if self.causal:  # the last n = min(rows, keys) rows see keys, on average all but n / 2
            sizes = [(min(rows, keys), keys - min(rows, keys) / 2) for rows, keys in sizes]
        pairs = sum(rows * keys for rows, keys in sizes)
        operations = 2 * self.Hq * pairs * (self.D + self.Dv)
        if "module" in self.words:  # four projections; their backward is twice their forward
            passes = 1 if mode == "forward" else 3
            operations += passes * 8 * self.B * self.Sq * (self.Hq * self.D) ** 2 / PASSES[mode]
        return operations * PASSES[mode]

    def moved(self) -> int:
        """Return the bytes of query, key, value and output, with padding but without the free slots of caches."""
        element, both = getattr(torch, self.dtype).itemsize, self.D + self.Dv
        cached = self.D if "latent" in self.words else both
        return element * self.B * (self.Hq * self.Sq * both + self.Hkv * self._keys * cached)

    @property
    def _keys(self) -> int:
        return round(self.Sk * float(self.option("filled") or 1))


def _uniform(count, longest):
    """Return `count` random lengths with a mean of about half the longest."""
    half = torch.rand(count // 2, generator=torch.Generator().manual_seed(SEED))
    lengths = torch.cat([half, 1 - half, torch.full((count % 2,), 0.5)]).mul(longest)
    lengths[lengths.argmax()] = longest
    return lengths


# {kind: function(count, longest) -> (count,) lengths}
LENGTHS = {
    "uniform": _uniform,
    "one-long": lambda count, longest: torch.tensor([longest] + [longest // 16] * (count - 1)),
    "zipf": lambda count, longest: longest / torch.arange(1, count + 1),
}


def _paper(length, dim, causal, dtype="bfloat16", options=""):
    heads = WIDTH // dim
    return Case(TOKENS // length, heads, heads, length, length, dim, dim, causal, dtype, options)


_BOTH = False, True
LENGTHS_OF_PAPERS = 4096, 16384, 2048, 8192, 1024, 512
PAPER = [_paper(x, dim, causal) for x in LENGTHS_OF_PAPERS for dim in (128, 64, 256) for causal in _BOTH]
MORE = [  # each case differs from PAPER in one property
    Case(4, 32, 8, 4096, 4096, 128, 128, True, "bfloat16"),  # grouped heads
    *(Case(4, 16, 16, 4096, 4096, 192, 128, causal, "bfloat16") for causal in _BOTH),
    *(_paper(4096, 512, causal) for causal in _BOTH),
    Case(16, 16, 16, 128, 8192, 128, 128, False, "bfloat16"),  # few queries, many keys
    Case(1, 32, 8, 128, 8192, 128, 128, False, "bfloat16"),  # fewer row blocks than multiprocessors, as in the next
    Case(1, 2, 2, 4096, 4096, 128, 128, False, "bfloat16"),
    Case(4, 16, 16, 4095, 4095, 128, 128, True, "bfloat16"),
    *(Case(4, 16, 16, 4096, 4096, dim, dim, False, "bfloat16") for dim in (100, 65)),  # TMA reads copies of these
    _paper(4096, 128, True, "float16"),
    _paper(4096, 64, False, "float32"),
]
_WIDE = _paper(4096, 128, False)
OPTIONS = [_WIDE._replace(options=x) for x in ("bias", "documents=8", "keys=0.5", "window=1024,0", "weights")]
OPTIONS += [_WIDE._replace(causal=True, options=x) for x in ("dropout=0.1", "softcap=30")]
OPTIONS += [_paper(4096, 64, False, options=x) for x in ("bias", "documents=8", "dropout=0.1")]
OPTIONS += [_paper(16384, 128, False, options=x) for x in ("documents=8", "window=1024,0")]
OPTIONS += [_paper(4096, dim, False, options=x) for dim in (128, 64) for x in ("random", "documents=4")]
OPTIONS += [_paper(4096, 256, False, options=x) for x in ("documents=4", "keys=0.5", "softcap=30")]
OPTIONS += [_paper(4096, dim, True, options=x) for dim in (128, 64) for x in ("alibi", "sinks")]
_PACKS = (8, 4096, ""), (31, 8192, "lengths=zipf"), (16, 4096, "lengths=uniform"), (113, 4096, "lengths=one-long")
PACKED = [  # about 32k tokens; without an option all lengths are equal
    _paper(longest, dim, causal, options=kind)._replace(B=count)
    for dim in (128, 64, 256)
    for count, longest, kind in _PACKS[: 1 if dim == 256 else None]
    for causal in _BOTH
]
DECODE = [
    Case(batch, 32, 32 // group, 1, keys, 128, 128, False, "bfloat16")
    for batches, lengths in (((1, 16, 64), (1024, 8192, 32768)), ((1, 4, 16), (131072,)))
    for group in (4, 8, 1)
    for keys in lengths
    for batch in batches
    if batch * (32 // group) * keys * 128 * 2 * 2 <= 8 << 30
]
DECODE += [Case(1, 32, 8, rows, 8192, 128, 128, True, "bfloat16") for rows in (512, 2048)]  # prefill in chunks
DECODE += [Case(64, heads, 1, 1, 8192, 576, 512, False, "bfloat16", "latent") for heads in (16, 128)]
MODULE = [_paper(length, 128, causal, options="module") for length in (2048, 512, 8192) for causal in _BOTH]
MODULE += [Case(8, 16, 16, 2048, 2048, 64, 64, causal, "bfloat16", "module") for causal in _BOTH]

# Smaller cases of the same groups, for a CPU.
_CPU = Case(4, 8, 8, 512, 512, 64, 64, False, "float32")
CPU_PAPER = [
    Case(4 if length == 512 else 1, 8, 8, length, length, 64, 64, causal, dtype)
    for dtype, lengths in (("float32", (128, 512, 1024, 2048, 4096)), ("bfloat16", (128, 512, 2048)))
    for causal in _BOTH
    for length in lengths
] + [Case(1, 1, 1, 1, 1, 8, 8, False, "float32")]  # measures only the host overhead of a call
CPU_OPTIONS = [_CPU._replace(options=x) for x in ("bias", "documents=4", "keys=0.5", "window=64,0")]
CPU_OPTIONS += [_CPU._replace(Hkv=2)]
CPU_PACKED = [_CPU._replace(B=8, causal=causal, options="lengths=uniform") for causal in _BOTH]
CPU_DECODE = [Case(1, 8, 8, 1, 1024, 64, 64, False, "float32", "filled=1")]
CPU_DECODE += [Case(8, 8, 2, 1, 2048, 64, 64, False, "float32", "filled=0.5")]
CPU_MODULE = [_CPU._replace(Sq=length, Sk=length, options="module") for length in (128, 512)]

_PEERS = "fusedattn", "sdpa:cudnn", "sdpa:flash", "sdpa:efficient", "flash-attn", "flex", "naive"
_PACKED = "fusedattn+packed", "fusedattn", "torch:varlen", "flash-attn+packed", "flex+packed"
_DECODE = "fusedattn:cache", "sdpa:flash", "sdpa:cudnn", "flash-attn", "fusedattn:pages=256", "fusedattn:pages=16"
_MODULE = "fusedattn", "fusedattn.compat", "torch.nn"
_ON_CPU, _WITH_GRADIENTS = ("fusedattn", "sdpa"), ("forward", "forward_backward")
QUESTIONS = {  # {device: {question: (cases, providers, modes)}}
    "cuda": {
        "forward": (PAPER + MORE, _PEERS, ("forward",)),
        "backward": (PAPER + MORE, _PEERS, ("backward",)),
        "options": (OPTIONS, _PEERS, ("forward", "backward")),
        "packed": (PACKED, _PACKED, ("forward", "backward")),
        "decode": (DECODE, _DECODE, ("forward", "graph")),
        "module": (MODULE, _MODULE, _WITH_GRADIENTS),
    },
    "cpu": {
        "forward": (CPU_PAPER, (*_ON_CPU, "naive"), ("forward",)),
        "backward": (CPU_PAPER, _ON_CPU, ("forward_backward",)),
        "options": (CPU_OPTIONS, _ON_CPU, _WITH_GRADIENTS),
        "packed": (CPU_PACKED, ("fusedattn+packed", "sdpa"), _WITH_GRADIENTS),
        "decode": (CPU_DECODE, ("fusedattn:cache", "sdpa+slice"), ("forward",)),
        "module": (CPU_MODULE, _MODULE, _WITH_GRADIENTS),
    },
}
