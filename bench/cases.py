"""Cases that benchmarks measure: sizes and options, by tables, the most important first."""

from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
SEED = 0  # of inputs, and of our dropout


class Tensors(NamedTuple):
    """The inputs of one case, and the gradient of its output; masks are keyword arguments of `fusedattn.attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    bias: Tensor | None = None
    masks: dict = {}

    @property
    def inputs(self) -> tuple:
        """Query, key, value, and the bias if there is one: the tensors that have a gradient."""
        return self[:3] if self.bias is None else (*self[:3], self.bias)


class Case(NamedTuple):
    """Sizes as in the columns of the CSV; dtype is the name of a torch dtype.

    options are words with a space between them: bias (1, Hq, Sq, Sk); documents=N, a mask of as many in a row with
    random ends; padding=SHARE of tokens that are real, random lengths; keys=SHARE, the same of keys alone; filled=SHARE
    of a cache, of each sequence; lengths=KIND, one of LENGTHS, of sequences of up to Sq tokens; window=LEFT,RIGHT;
    softcap=CAP; dropout=P; weights, which are returned too. Documents, padding and lengths are of as many queries as
    keys. module, or model=NAME: attention is timed inside of it. threads=N of a CPU; memory: what it adds to a process.
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
        """Sizes as `fusedattn bench --shape` takes them, and what else it is."""
        sizes = ",".join(map(str, self[:6]))
        words = [f"Dv {self.Dv}"] * (self.D != self.Dv) + ["causal"] * self.causal
        return " ".join([sizes, *words, DTYPES.get(self.dtype, self.dtype), *self.options.split()])

    @property
    def words(self) -> dict:
        """{name: value, "" if it has none} of the options."""
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
        """Tensors of normal numbers, the same for each call: on zeros a GPU would be faster than on real inputs."""
        generator = torch.Generator(device).manual_seed(SEED)
        shapes = (
            (self.B, self.Hq, self.Sq, self.D),
            (self.B, self.Hkv, self.Sk, self.D),
            (self.B, self.Hkv, self.Sk, self.Dv),
            (self.B, self.Hq, self.Sq, self.Dv),
            *([(1, self.Hq, self.Sq, self.Sk)] if "bias" in self.words else []),
        )
        dtype = getattr(torch, self.dtype)
        tensors = (torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes)
        return Tensors(*tensors)._replace(masks=self.masks(device))

    def documents(self, device) -> Tensor:
        """(S,): the number of the document that a token belongs to."""
        generator = torch.Generator().manual_seed(SEED)
        ends = torch.randperm(self.Sk - 1, generator=generator)[: int(self.words["documents"]) - 1] + 1
        return torch.searchsorted(ends.sort().values, torch.arange(self.Sk), right=True).to(device)

    def lengths(self, device) -> Tensor:
        """(B,): how many of the first tokens of a sequence are real; the mean is the SHARE of padding or keys."""
        generator = torch.Generator().manual_seed(SEED)
        if share := self.words.get("padding", self.words.get("keys")):
            half = torch.rand(self.B // 2, generator=generator)
            lengths = torch.cat([1 + half, 1 - half, torch.ones(self.B % 2)]) * float(share) * self.Sk
        elif "filled" in self.words:
            lengths = torch.full((self.B,), float(self.words["filled"]) * self.Sk)
        else:
            lengths = LENGTHS[self.words.get("lengths", "equal")](self.B, self.Sk)
            lengths = lengths[torch.randperm(self.B, generator=generator)]
        return lengths.round().long().clamp(1, self.Sk).to(device)

    def masks(self, device) -> dict:
        """The masks among the options, as keyword arguments of `fusedattn.attention`."""
        masks = {}
        if "documents" in self.words:
            owner = self.documents(device)
            masks["mask"] = (owner[:, None] == owner[None, :])[None, None]
        if self.padded or {"keys", "filled"} & set(self.words):
            real = torch.arange(self.Sk, device=device)[None, :] < self.lengths(device)[:, None]
            masks |= dict(key_mask=real) | (dict(query_mask=real) if self.padded else {})
        return masks

    def arguments(self, masks) -> dict:
        """Keyword arguments of `fusedattn.attention`, all but the bias and what is returned."""
        options, words = dict(causal=self.causal) | masks, self.words
        if "window" in words:
            options["window"] = self.sides
        if "softcap" in words:
            options["softcap"] = float(words["softcap"])
        if "dropout" in words:
            options |= dict(dropout_p=float(words["dropout"]), seed=SEED)
        return options


def _uniform(count, longest):
    """Uniform random lengths up to the longest, whose mean is half of it; one is the longest."""
    half = torch.rand(count // 2, generator=torch.Generator().manual_seed(SEED))
    lengths = torch.cat([half, 1 - half, torch.full((count % 2,), 0.5)]).mul(longest)
    lengths[lengths.argmax()] = longest
    return lengths


# {kind: function(count, longest) -> (count,) lengths, in an order that `Case.lengths` changes}
LENGTHS = {
    "equal": lambda count, longest: torch.full((count,), longest),
    "uniform": _uniform,
    "one-long": lambda count, longest: torch.tensor([longest] + [longest // 16] * (count - 1)),
    "zipf": lambda count, longest: longest / torch.arange(1, count + 1),  # the nth has an nth of the longest
}

TOKENS, WIDTH = 16384, 2048  # B * S and Hq * D: the convention of the FlashAttention papers
_BOTH = (True, False)


def _paper(length, dim, causal, dtype="bfloat16", options=""):
    heads = WIDTH // dim
    return Case(TOKENS // length, heads, heads, length, length, dim, dim, causal, dtype, options)


# Prompts of training and prefill. The goals are of S >= 2048, so those come first.
LONG = [
    _paper(length, dim, causal, dtype)
    for lengths in ((2048, 4096, 8192, 16384), (512, 1024))
    for dtype in ("bfloat16", "float16")
    for length in lengths
    for dim in (128, 64)
    for causal in _BOTH
]

# Each differs from LONG in one thing.
MORE = [
    *(_paper(length, 256, causal) for length in (2048, 8192) for causal in _BOTH),
    Case(4, 32, 8, 4096, 4096, 128, 128, True, "bfloat16"),  # grouped heads
    Case(4, 32, 4, 4096, 4096, 64, 64, True, "bfloat16"),
    Case(4, 16, 16, 4096, 4096, 192, 128, True, "bfloat16"),  # Dv is not D
    Case(16, 16, 16, 128, 8192, 128, 128, False, "bfloat16"),  # few queries, many keys
    Case(4, 16, 16, 4095, 4095, 128, 128, True, "bfloat16"),  # an odd length
    *(_paper(4096, dim, False, "float32") for dim in (64, 128)),
]

# For the forward on Hopper, the most telling first; for the backward the long ones.
HOPPER = [
    _paper(length, dim, causal)
    for lengths in ((4096, 16384), (2048, 8192, 1024, 512))
    for dim in (128, 64, 256)
    for length in lengths
    for causal in (False, True)
]
BACKWARD = [case for case in HOPPER if case.Sq >= 2048]

# The cost of an option, and which peer has it.
_WIDE = Case(4, 16, 16, 4096, 4096, 128, 128, False, "bfloat16")
OPTIONS = [
    *(_WIDE._replace(options=options) for options in ("bias", "documents=8")),
    _WIDE._replace(causal=True, options="dropout=0.1"),
    *(_WIDE._replace(D=64, Dv=64, options=options) for options in ("bias", "documents=8", "dropout=0.1")),
    _WIDE._replace(causal=True, options="softcap=30"),
    *(_WIDE._replace(options=options) for options in ("window=1024,0", "weights")),
]

# So little work that the host's part shows; the last is a decoding step.
_little = Case(1, 8, 8, 128, 128, 64, 64, False, "bfloat16")
_CHANGES = (dict(B=4), dict(D=128, Dv=128), dict(Hkv=2), dict(Sq=1, Sk=512))
SMALL = [
    *(_little._replace(Sq=length, Sk=length, causal=c) for length, c in ((128, False), (128, True), (64, False))),
    *(_little._replace(Sq=length, Sk=length) for length in (256, 512)),
    *(_little._replace(**change) for change in _CHANGES),
]

# One query of each sequence to a cache: from one that stays in a GPU's cache to what fills an eighth of its memory.
DECODE = [
    Case(batch, 32, 32 // group, 1, keys, 128, 128, False, "bfloat16")
    for batches, lengths in (
        ((1, 16, 64), (1024, 8192, 32768)),
        ((4, 256), (1024, 8192, 32768)),
        ((1, 4, 16), (131072,)),
    )
    for group in (4, 8, 1)
    for keys in lengths
    for batch in batches
    if batch * (32 // group) * keys * 128 * 2 * 2 <= 8 << 30
]

# Attention inside a module: with projections of its width, 2048.
MODULE = [
    *(_paper(length, 128, causal, options="module") for length in (2048, 512, 8192) for causal in _BOTH),
    _paper(2048, 64, True, options="module"),
    *(Case(8, 16, 16, 2048, 2048, 64, 64, causal, "bfloat16", "module") for causal in (False, True)),  # of width 1024
    _paper(512, 128, False, options="module weights"),
]

# Attention inside a model of Hugging Face.
TINY_MINILM = [Case(4, 12, 12, 64, 64, 32, 32, False, "float32", "model=all-MiniLM-L6-v2")]
MINILM = [
    TINY_MINILM[0]._replace(B=batch, Sq=length, Sk=length, dtype=dtype)
    for batch, length, dtype in ((256, 128, "float16"), (32, 512, "float16"), (32, 512, "float32"))
]

# Forward mode, which is beside the forward.
TANGENT = [_paper(length, dim, causal) for dim in (64, 128) for length in (2048, 8192) for causal in _BOTH]
TINY_TANGENT = [Case(1, 2, 1, 24, 24, 16, 16, causal, "float32") for causal in _BOTH]

# Mostly hidden: half of the tokens, the other documents, all but the last 1024 keys.
SKIPPING = [
    Case(batch, 16, 16, 16384, 16384, 128, 128, False, "bfloat16", options)
    for batch, options in ((4, "padding=0.5"), (1, "documents=8"), (1, "window=1024,0"))
]

# About 32k tokens in sequences of unequal lengths, and of equal ones, which need no option.
_MIXTURES = ((8, 4096, ""), (31, 8192, "lengths=zipf"), (16, 4096, "lengths=uniform"), (113, 4096, "lengths=one-long"))
VARLEN = [
    Case(count, WIDTH // dim, WIDTH // dim, longest, longest, dim, dim, causal, "bfloat16", options)
    for dim in (128, 64)
    for count, longest, options in _MIXTURES
    for causal in _BOTH
]

# On a CPU: over the lengths; what hides nothing or little; keys, a window and packed sequences that hide much; a token
# after a cache; modules and models; a call of next to nothing; and what is too long to hold all weights.
_cpu = Case(4, 8, 8, 512, 512, 64, 64, False, "float32")
CPU_LENGTHS = [
    Case(4 if length == 512 else 1, 8, 8, length, length, 64, 64, causal, dtype)
    for dtype, lengths in (("float32", (128, 256, 512, 1024, 2048, 4096)), ("bfloat16", (128, 512, 2048, 4096)))
    for causal in (False, True)
    for length in lengths
]
CPU_OPTIONS = [_cpu._replace(options="documents=4"), _cpu._replace(options="bias"), _cpu._replace(Hkv=2)]
CPU_KEYS = [_cpu._replace(options="keys=0.5")]
CPU_WINDOW = [_cpu._replace(options="window=64,0")]
CPU_PACKED = [_cpu._replace(B=8, causal=causal, options="lengths=uniform") for causal in (False, True)]
CPU_DECODE = [
    Case(1, 8, 8, 1, 1024, 64, 64, False, "float32", "filled=1"),
    Case(8, 8, 2, 1, 2048, 64, 64, False, "float32", "filled=0.5"),
]
CPU_LLAMA = [Case(1, 8, 2, 1024, 1024, 64, 64, True, "float32", "model=llama")]
CPU_MODULE = [_cpu._replace(Sq=length, Sk=length, options="module") for length in (128, 512)]
CPU_ENCODER = [_cpu._replace(Sq=length, Sk=length, options="model=encoder") for length in (128, 512)]
CPU_CALL = [Case(1, 1, 1, 1, 1, 8, 8, False, "float32")]
CPU_MEMORY = [Case(1, 4, 4, 8192, 8192, 64, 64, False, "float32", "memory")]

# For a CPU, and to see that the benchmark itself works.
_TINY = Case(2, 2, 2, 64, 64, 16, 16, False, "float32")
TINY = [
    _TINY._replace(B=1),
    _TINY._replace(causal=True),
    Case(1, 4, 2, 48, 80, 16, 16, False, "float32"),
    Case(1, 2, 2, 64, 64, 16, 8, True, "bfloat16"),
]
TINY_OPTIONS = [
    _TINY._replace(options="bias"),
    _TINY._replace(causal=True, dtype="bfloat16", options="bias documents=3"),
    Case(2, 4, 2, 48, 80, 16, 8, True, "float32", "dropout=0.1"),
    _TINY._replace(causal=True, options="softcap=2"),
    *(_TINY._replace(options=options) for options in ("window=9,3", "padding=0.5")),
    _TINY._replace(causal=True, options="weights"),
]
TINY_BACKWARD = [Case(1, 2, 1, 40, 40, dim, dim, dim == 64, "bfloat16") for dim in (64, 128, 256)]
_MASKS = ("padding=0.5", "documents=3", "window=64,0")
TINY_SKIPPING = [_TINY._replace(Sq=512, Sk=512, options=options) for options in _MASKS]
TINY_VARLEN = [
    _TINY._replace(B=3, Sq=48, Sk=48),
    Case(4, 4, 2, 64, 64, 16, 16, True, "float32", "lengths=uniform"),
    _TINY._replace(B=5, options="lengths=one-long"),
    _TINY._replace(B=6, Sq=48, Sk=48, dtype="bfloat16", options="lengths=zipf"),
]
TINY_SMALL = [Case(1, 8, 8, length, length, 64, 64, False, "float32") for length in (8, 16)]
TINY_DECODE = [Case(2, 4, heads, 1, 256, 16, 16, False, "float32") for heads in (4, 1)]
_MODULES = ((True, "float32", "module"), (False, "bfloat16", "module"), (False, "float32", "module weights"))
TINY_MODULE = [Case(2, 4, 4, 24, 24, 8, 8, *each) for each in _MODULES]

# By name: "all", and those above, as "tiny-options".
TABLES = {name.lower().replace("_", "-"): table for name, table in list(vars().items()) if isinstance(table, list)}
TABLES["all"] = LONG + MORE
