"""What is measured: named cases, the most important first."""

from typing import NamedTuple

import torch
from torch import Tensor

SEED = 0  # of everything that is drawn, and of dropout where it is ours


class Tensors(NamedTuple):
    """The input of one case, and the gradient of its output; masks as keyword arguments of `fusedattn.attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    bias: Tensor | None = None
    masks: dict = {}

    @property
    def inputs(self) -> tuple:
        """What has a gradient."""
        return self[:3] if self.bias is None else (*self[:3], self.bias)


class Case(NamedTuple):
    """Sizes as in the columns of the CSV; dtype is the name of a torch dtype.

    options are words with a space between them: bias (1, Hq, Sq, Sk); documents=N, a mask of as many in a row with
    random ends; padding=SHARE of tokens that are real, random lengths; lengths=KIND, one of LENGTHS, of sequences of up
    to Sq tokens; window=LEFT,RIGHT; softcap=CAP; dropout=P; weights, which are returned too. Documents, padding and
    lengths are of as many queries as keys.
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
        dims = f"d{self.D}" if self.D == self.Dv else f"d{self.D}-{self.Dv}"
        heads = "" if self.Hq == self.Hkv else f"-h{self.Hq}over{self.Hkv}"
        if self.Hq == self.Hkv and self.B * self.Sq == TOKENS and self.Hq * self.D != WIDTH:
            heads = f"-h{self.Hq}"
        length = f"s{self.Sq}" if self.Sq == self.Sk else f"s{self.Sq}x{self.Sk}"
        options = "".join(f"-{word}" for word in self.options.split())
        return f"b{self.B}-{dims}-{length}{heads}-{'causal' if self.causal else 'full'}-{self.dtype}{options}"

    @property
    def words(self) -> dict:
        """{name: what stands behind its =} of the options."""
        return dict(word.partition("=")[::2] for word in self.options.split())

    @property
    def padded(self) -> bool:
        """Whether some of its tokens are not real."""
        return "padding" in self.words or "lengths" in self.words

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """How many keys a row sees before and after its own, causal included."""
        left, right = map(int, self.words["window"].split(",")) if "window" in self.words else (None, None)
        return left, 0 if self.causal else right

    def draw(self, device) -> Tensors:
        """Normal numbers, the same ones every time; never zeros, on which a GPU is faster than on anything real."""
        generator = torch.Generator(device).manual_seed(SEED)
        shapes = (
            (self.B, self.Hq, self.Sq, self.D),
            (self.B, self.Hkv, self.Sk, self.D),
            (self.B, self.Hkv, self.Sk, self.Dv),
            (self.B, self.Hq, self.Sq, self.Dv),
            *([(1, self.Hq, self.Sq, self.Sk)] if "bias" in self.words else []),
        )
        dtype = getattr(torch, self.dtype)
        drawn = Tensors(*(torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes))
        return drawn._replace(masks=self.masks(device))

    def documents(self, device) -> Tensor:
        """(S,): which document each token belongs to."""
        generator = torch.Generator().manual_seed(SEED)
        ends = torch.randperm(self.Sk - 1, generator=generator)[: int(self.words["documents"]) - 1] + 1
        return torch.searchsorted(ends.sort().values, torch.arange(self.Sk), right=True).to(device)

    def lengths(self, device) -> Tensor:
        """(B,): how many tokens of each sequence are real, the first ones: of padding the share is right on average."""
        if "padding" not in self.words:
            return LENGTHS[self.words.get("lengths", "equal")](self.B, self.Sk).to(device)
        half = torch.rand(self.B // 2, generator=torch.Generator().manual_seed(SEED))
        relative = torch.cat([1 + half, 1 - half, torch.ones(self.B % 2)])
        return (relative * float(self.words["padding"]) * self.Sk).round().long().clamp(max=self.Sk).to(device)

    def masks(self, device) -> dict:
        """The masks among the options, as keyword arguments of `fusedattn.attention`."""
        found = {}
        if "documents" in self.words:
            owner = self.documents(device)
            found["mask"] = (owner[:, None] == owner[None, :])[None, None]
        if self.padded:
            real = torch.arange(self.Sk, device=device)[None, :] < self.lengths(device)[:, None]
            found |= dict(key_mask=real, query_mask=real)
        return found

    def arguments(self, masks) -> dict:
        """Keyword arguments of `fusedattn.attention`, all but the bias and what is returned."""
        found, words = dict(causal=self.causal) | masks, self.words
        if "window" in words:
            found["window"] = self.sides
        if "softcap" in words:
            found["softcap"] = float(words["softcap"])
        if "dropout" in words:
            found |= dict(dropout_p=float(words["dropout"]), seed=SEED)
        return found


def _shuffled(lengths):
    return lengths[torch.randperm(len(lengths), generator=torch.Generator().manual_seed(SEED))]


def _uniform(count, longest):
    """Anything up to the longest, which is one of them, and half of it on average."""
    half = torch.rand(count // 2, generator=torch.Generator().manual_seed(SEED))
    found = torch.cat([half, 1 - half, torch.full((count % 2,), 0.5)]).mul(longest).round().long().clamp(min=1)
    found[found.argmax()] = longest
    return _shuffled(found)


def _one_long(count, longest):
    """One, and all others a sixteenth of it."""
    return _shuffled(torch.tensor([longest] + [max(1, longest // 16)] * (count - 1)))


def _zipf(count, longest):
    """The nth an nth of the longest."""
    return _shuffled((longest / torch.arange(1, count + 1)).round().long().clamp(min=1))


# {kind: lengths (count,) of so many sequences, the longest of so many tokens}, in no order.
LENGTHS = {
    "equal": lambda count, longest: torch.full((count,), longest),
    "uniform": _uniform,
    "one-long": _one_long,
    "zipf": _zipf,
}

TOKENS, WIDTH = 16384, 2048  # B * S and Hq * D: the convention of the FlashAttention papers


def _long(length, dim, causal, dtype):
    heads = WIDTH // dim
    return Case(TOKENS // length, heads, heads, length, length, dim, dim, causal, dtype)


# Prompts that training and prefill see. Those that the goals speak of (S >= 2048) come first.
LONG = [
    _long(length, dim, causal, dtype)
    for lengths in ((2048, 4096, 8192, 16384), (512, 1024))
    for dtype in ("bfloat16", "float16")
    for length in lengths
    for dim in (128, 64)
    for causal in (True, False)
]

# One step off the main road each.
MORE = [
    *(_long(length, 256, causal, "bfloat16") for length in (2048, 8192) for causal in (True, False)),
    Case(4, 32, 8, 4096, 4096, 128, 128, True, "bfloat16"),  # grouped heads
    Case(4, 32, 4, 4096, 4096, 64, 64, True, "bfloat16"),
    Case(4, 16, 16, 4096, 4096, 192, 128, True, "bfloat16"),  # Dv is not D
    Case(16, 16, 16, 128, 8192, 128, 128, False, "bfloat16"),  # few queries, many keys
    Case(4, 16, 16, 4095, 4095, 128, 128, True, "bfloat16"),  # an odd length
    *(_long(4096, dim, False, "float32") for dim in (64, 128)),
]

# What the goals of the forward for Hopper speak of, the most telling first.
HOPPER = [
    _long(length, dim, causal, "bfloat16")
    for lengths in ((4096, 16384), (2048, 8192, 1024, 512))
    for dim in (128, 64, 256)
    for length in lengths
    for causal in (False, True)
]

# What those of the backward speak of.
BACKWARD = [
    _long(length, dim, causal, "bfloat16")
    for lengths in ((4096, 16384), (2048, 8192))
    for dim in (128, 64, 256)
    for length in lengths
    for causal in (False, True)
]

# For a CPU, and to see that the benchmark itself works.
TINY = [
    Case(1, 2, 2, 64, 64, 16, 16, False, "float32"),
    Case(2, 2, 2, 64, 64, 16, 16, True, "float32"),
    Case(1, 4, 2, 48, 80, 16, 16, False, "float32"),
    Case(1, 2, 2, 64, 64, 16, 8, True, "bfloat16"),
]

# What an option costs, and who else has it.
OPTIONS = [
    Case(4, 16, 16, 4096, 4096, dim, dim, causal, "bfloat16", options)
    for options, dim, causal in (
        ("bias", 128, False),
        ("documents=8", 128, False),
        ("dropout=0.1", 128, True),
        ("bias", 64, False),
        ("documents=8", 64, False),
        ("dropout=0.1", 64, False),
        ("softcap=30", 128, True),
        ("window=1024,0", 128, False),
        ("weights", 128, False),
    )
]

# So little work that what is measured is how it is asked for.
_little = Case(1, 8, 8, 128, 128, 64, 64, False, "bfloat16")
SMALL = [
    _little,
    _little._replace(causal=True),
    *(_little._replace(Sq=length, Sk=length) for length in (64, 256, 512)),
    _little._replace(B=4),
    _little._replace(D=128, Dv=128),
    _little._replace(Hkv=2),
    _little._replace(Sq=1, Sk=512),  # a decoding step
]

# One query of each sequence to a cache: from one that stays in a GPU's own cache to what fills an eighth of its memory.
_HEADS, _MOST = 32, 8 << 30
DECODE = [
    Case(batch, _HEADS, _HEADS // group, 1, keys, 128, 128, False, "bfloat16")
    for batches, lengths in (
        ((1, 16, 64), (1024, 8192, 32768)),
        ((4, 256), (1024, 8192, 32768)),
        ((1, 4, 16), (131072,)),
    )
    for group in (4, 8, 1)
    for keys in lengths
    for batch in batches
    if batch * (_HEADS // group) * keys * 128 * 2 * 2 <= _MOST
]

# Of these, for `pytest bench`.
FEW_DECODE = [
    case for case in DECODE if case.Hq == 4 * case.Hkv and (case.B, case.Sk) in ((1, 1024), (16, 8192), (1, 131072))
]

# Attention inside a module: with projections of its width, 2048.
MODULE = [
    *(_long(length, 128, causal, "bfloat16") for length in (2048, 512, 8192) for causal in (True, False)),
    _long(2048, 64, True, "bfloat16"),
    *(Case(8, 16, 16, 2048, 2048, 64, 64, causal, "bfloat16") for causal in (False, True)),  # of width 1024
    _long(512, 128, False, "bfloat16")._replace(options="weights"),
]

# For `pytest bench` on a GPU: what a change to a kernel shows in.
FEW = [
    *(_long(4096, dim, causal, "bfloat16") for dim in (128, 64) for causal in (True, False)),
    _long(16384, 128, True, "bfloat16"),
    _long(512, 128, True, "bfloat16"),
]

# Mostly hidden: half of the tokens, the other documents, all but the last 1024 keys.
SKIPPING = [
    Case(4, 16, 16, 16384, 16384, 128, 128, False, "bfloat16", "padding=0.5"),
    Case(1, 16, 16, 16384, 16384, 128, 128, False, "bfloat16", "documents=8"),
    Case(1, 16, 16, 16384, 16384, 128, 128, False, "bfloat16", "window=1024,0"),
]

# About 32k tokens in sequences of unequal lengths, and of equal ones, which need no option.
_MIXTURES = ((8, 4096, ""), (31, 8192, "lengths=zipf"), (16, 4096, "lengths=uniform"), (113, 4096, "lengths=one-long"))
VARLEN = [
    Case(count, WIDTH // dim, WIDTH // dim, longest, longest, dim, dim, causal, "bfloat16", options)
    for dim in (128, 64)
    for count, longest, options in _MIXTURES
    for causal in (True, False)
]

_SHAPE = (2, 2, 2, 64, 64, 16, 16)
TINY_OPTIONS = [
    Case(*_SHAPE, False, "float32", "bias"),
    Case(*_SHAPE, True, "bfloat16", "bias documents=3"),
    Case(2, 4, 2, 48, 80, 16, 8, True, "float32", "dropout=0.1"),
    Case(*_SHAPE, True, "float32", "softcap=2"),
    Case(*_SHAPE, False, "float32", "window=9,3"),
    Case(*_SHAPE, False, "float32", "padding=0.5"),
    Case(*_SHAPE, True, "float32", "weights"),
]
TINY_HOPPER = [
    Case(1, 1, 1, 16, 16, dim, dim, causal, "bfloat16") for dim in (128, 64, 256) for causal in (False, True)
]
TINY_BACKWARD = [Case(1, 2, 1, 40, 40, dim, dim, dim == 64, "bfloat16") for dim in (64, 128, 256)]
TINY_SKIPPING = [
    Case(2, 2, 2, 512, 512, 16, 16, False, "float32", options)
    for options in ("padding=0.5", "documents=3", "window=64,0")
]
TINY_VARLEN = [
    Case(3, 2, 2, 48, 48, 16, 16, False, "float32"),
    Case(4, 4, 2, 64, 64, 16, 16, True, "float32", "lengths=uniform"),
    Case(5, 2, 2, 64, 64, 16, 16, False, "float32", "lengths=one-long"),
    Case(6, 2, 2, 48, 48, 16, 16, False, "bfloat16", "lengths=zipf"),
]
TINY_SMALL = [Case(1, 8, 8, length, length, 64, 64, False, "float32") for length in (8, 16)]
TINY_DECODE = [Case(2, 4, heads, 1, 256, 16, 16, False, "float32") for heads in (4, 1)]
TINY_MODULE = [
    Case(2, 4, 4, 24, 24, 8, 8, True, "float32"),
    Case(2, 4, 4, 24, 24, 8, 8, False, "bfloat16"),
    Case(2, 4, 4, 24, 24, 8, 8, False, "float32", "weights"),
]

TABLES = {
    "long": LONG,
    "more": MORE,
    "all": LONG + MORE,
    "options": OPTIONS,
    "hopper": HOPPER,
    "backward": BACKWARD,
    "skipping": SKIPPING,
    "varlen": VARLEN,
    "small": SMALL,
    "module": MODULE,
    "decode": DECODE,
    "few-decode": FEW_DECODE,
    "few": FEW,
    "tiny": TINY,
    "tiny-options": TINY_OPTIONS,
    "tiny-hopper": TINY_HOPPER,
    "tiny-backward": TINY_BACKWARD,
    "tiny-skipping": TINY_SKIPPING,
    "tiny-varlen": TINY_VARLEN,
    "tiny-small": TINY_SMALL,
    "tiny-module": TINY_MODULE,
    "tiny-decode": TINY_DECODE,
}
