"""Named cases: tensors and options of calls, small enough for Triton's interpreter."""

import functools
import itertools
import zlib
from typing import NamedTuple

import torch

from .fuzz.layouts import Layout, lay

ORDERS = ("bhsd", "bshd", "bhds", "sbhd")
WRONG = (float("nan"), float("inf"), float("-inf"))


class Case(NamedTuple):
    """A named call of `attention`: shapes, dtype, layout and options."""

    name: str
    B: int = 1
    Hq: int = 2
    Hkv: int = 2
    Sq: int = 37
    Sk: int = 45
    D: int = 16
    Dv: int = 16
    dtype: torch.dtype = torch.float32
    strided: bool = False  # query, key, value and incoming gradient have different memory orders, with NaN between
    expanded: bool = False  # key and value expand one batch to B, the incoming gradient expands one element
    spread: float = 1.0  # standard deviation of query and key
    alike: float = 0.0  # standard deviation of a vector added to all keys of a head, and of one added to all values
    mask: str | None = None  # the shape that broadcasts: "pairs", "batch", "heads", "rank 2", "rows", "keys"
    key_mask: str | None = None  # "own" for each batch, "shared" by all batches, "rank 1"
    query_mask: str | None = None
    causal: bool = False
    window: tuple | None = None
    align: str = "bottom_right"
    scale: float | None = None
    bias: str | None = None  # shape as for mask, or "one a head"; some elements are -inf
    bias_dtype: torch.dtype | None = None  # None: the query's
    softcap: float | None = None
    alibi: str | None = None  # "own" for each batch, "shared" by all batches
    sinks: bool = False
    dropout: float = 0.0
    grads: str = "out and lse"  # results that the loss depends on

    def draw(self, device="cpu", seed=0):
        """Return ({"query", "key", "value", "out", "lse", "weights": tensor}, options).

        "out", "lse" and "weights" are incoming gradients. Tokens that key_mask or query_mask hides are NaN or infinite.
        """
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape, spread=1.0):
            return (torch.randn(shape, generator=generator, device=device) * spread).to(self.dtype)

        def visible(*shape):
            return torch.rand(shape, generator=generator, device=device) < 0.7

        kv_batch = 1 if self.expanded else self.B
        tensors = dict(
            query=normal(self.B, self.Hq, self.Sq, self.D, spread=self.spread),
            key=normal(kv_batch, self.Hkv, self.Sk, self.D, spread=self.spread).expand(self.B, -1, -1, -1),
            value=normal(kv_batch, self.Hkv, self.Sk, self.Dv).expand(self.B, -1, -1, -1),
            out=normal(self.B, self.Hq, self.Sq, self.Dv),
        )
        if self.alike:
            for name in ("key", "value"):
                tensors[name] = tensors[name] + normal(*tensors[name].shape[:2], 1, tensors[name].shape[3]) * self.alike
        if self.expanded:
            tensors["out"] = normal(1).expand(tensors["out"].shape)
        if self.strided:
            tensors = {
                name: among_nan(x, order)
                for (name, x), order in zip(tensors.items(), ORDERS[1:] + ORDERS, strict=False)
            }
        wide = torch.promote_types(self.dtype, torch.float32)
        tensors["lse"] = normal(self.B, self.Hq, self.Sq).to(wide)
        if self.expanded:
            tensors["lse"] = tensors["lse"][:1, :1, :1].expand(tensors["lse"].shape)
        tensors["weights"] = normal(self.B, self.Hq, self.Sq, self.Sk)
        options = dict(causal=self.causal, window=self.window, align=self.align, scale=self.scale)
        B, H, Q, K = self.B, self.Hq, self.Sq, self.Sk
        shapes = {"pairs": (B, H, Q, K), "batch": (B, 1, Q, K), "heads": (1, H, Q, K), "rank 2": (Q, K)}
        shapes |= {"rows": (B, 1, Q, 1), "keys": (1, H, 1, K), "one a head": (1, H, 1, 1)}
        if self.mask is not None:
            options["mask"] = visible(*shapes[self.mask])
            if self.mask in ("pairs", "rank 2"):
                options["mask"][..., 3:5, :] = False  # rows that see no key
        if self.bias is not None:
            options["bias"] = normal(*shapes[self.bias]).to(self.bias_dtype or self.dtype)
            if self.bias not in ("rows", "one a head"):
                options["bias"].masked_fill_(~visible(*shapes[self.bias]), float("-inf"))
                options["bias"][..., self.Sk // 2 :] = float("-inf")  # hides whole blocks
            if self.bias in ("pairs", "rank 2", "rows"):
                options["bias"][..., 3:5, :] = float("-inf")  # rows that see no key
            if self.bias == "rows":
                options["bias"][..., 6:8, :] = torch.finfo(options["bias"].dtype).min  # all keys weigh the same
            if self.bias == "pairs" and self.strided:
                options["bias"] = among_nan(options["bias"], "bhds")
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.alibi is not None:
            shape = {"own": (self.B, self.Hq), "shared": (self.Hq,)}[self.alibi]
            options["alibi_slopes"] = torch.randn(shape, generator=generator, device=device).mul(0.2).to(wide)
        if self.sinks:
            options["sinks"] = normal(self.Hq)
        if self.dropout:
            options |= dict(dropout_p=self.dropout, seed=2**62 + 12345)
        for name, kind, length in (("key_mask", self.key_mask, self.Sk), ("query_mask", self.query_mask, self.Sq)):
            if kind is not None:
                shape = {"own": (self.B, length), "shared": (1, length), "rank 1": (length,)}[kind]
                options[name] = visible(*shape)
                if name == "key_mask":
                    seen = options[name].expand(self.B, length)[:, None, :, None]
                    tensors["weights"] = torch.where(seen.mT, tensors["weights"], float("nan"))
                for hidden in ("key", "value") if name == "key_mask" else ("query", "out", "lse", "weights"):
                    tensors[hidden] = spoil(tensors[hidden], options[name].expand(self.B, length))
        return tensors, options


def replayed(case):
    """Return True for the half of the cases, chosen by name, whose calls are recorded and replayed."""
    return zlib.crc32(case.name.encode()) % 2 == 0


def among_nan(tensor, order):
    """Return a copy with another order of dimensions, at an odd offset, with NaN after each innermost line."""
    return lay(tensor, Layout([*itertools.permutations("bhsd")].index((*order,)), gap=5, offset=3))


def spoil(tensor, seen):
    """Overwrite the tokens that the mask `seen` (B, S) hides: 3 of 6 entirely, 3 only in their first column."""
    # A score of a token that is infinite in one column is infinite. In two or more columns it may be NaN.
    token = torch.arange(seen.shape[1], device=tensor.device)
    noise = torch.tensor(WRONG, device=tensor.device, dtype=tensor.dtype)[token % 3]
    hidden = ~seen[:, None, :]
    if tensor.dim() == 4:
        first = torch.arange(tensor.shape[-1], device=tensor.device) == 0
        noise = torch.where(first | (token % 6 < 3)[:, None], noise[:, None], 1.0)
        hidden = hidden[..., None]
    noise = torch.where(hidden, noise, tensor)
    return noise if 0 in tensor.stride() else tensor.copy_(noise)


# Options and layouts of a call, used alone and in pairs.
FEATURES = {
    "batch": dict(B=3), "grouped heads": dict(Hq=4, Hkv=2), "one kv head": dict(Hq=3, Hkv=1),
    "odd head dims": dict(D=5, Dv=24), "wide value": dict(D=8, Dv=40),
    "more rows": dict(Sq=70, Sk=19), "more keys": dict(Sq=19, Sk=70), "one row": dict(Sq=1, Sk=33),
    "one key": dict(Sq=33, Sk=1), "strided": dict(strided=True), "expanded": dict(B=2, expanded=True),
    "awkward": dict(strided=True, D=5, Dv=24, Sq=70, Sk=19),
    "causal": dict(causal=True), "window": dict(window=(9, 4)), "window of itself": dict(window=(0, 0)),
    "left window": dict(window=(20, None)), "right window": dict(window=(None, 3)),
    "top left": dict(align="top_left", window=(30, 1)),
    "mask of pairs": dict(mask="pairs"), "mask over heads": dict(B=2, mask="batch"),
    "mask over batch": dict(mask="heads"), "mask of rank 2": dict(mask="rank 2"),
    "mask of rows": dict(B=2, mask="rows"), "mask of keys": dict(mask="keys"),
    "key mask": dict(B=2, key_mask="own"), "shared key mask": dict(B=2, key_mask="shared"),
    "query mask": dict(B=2, query_mask="own"), "rank 1 query mask": dict(query_mask="rank 1"),
    "scale": dict(scale=1.0), "negative scale": dict(scale=-0.4), "scale 0": dict(scale=0.0),
    "peaked": dict(spread=4.0),
    "bias of pairs": dict(B=2, bias="pairs"), "bias over heads": dict(B=2, bias="batch"),
    "bias over batch": dict(B=2, bias="heads"), "bias of rank 2": dict(B=2, bias="rank 2"),
    "bias of rows": dict(B=2, bias="rows"), "bias of keys": dict(B=2, bias="keys"),
    "bias of each head": dict(B=2, bias="one a head"), "float64 bias": dict(bias="rank 2", bias_dtype=torch.float64),
    "softcap": dict(softcap=1.5), "large softcap": dict(softcap=50.0),
    "slopes": dict(alibi="shared"), "slopes of each batch": dict(B=2, alibi="own", align="top_left"),
    "sinks": dict(sinks=True), "dropout": dict(dropout=0.3),
    "weights": dict(grads="out, lse and weights"), "weights alone": dict(grads="weights"),
    "out alone": dict(grads="out"), "lse alone": dict(grads="lse"),
}  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SHAPES = [
    Case("1 x 1", Sq=1, Sk=1),
    Case("tile edges", Sq=32, Sk=16),
    Case("past tile edges", Sq=33, Sk=17),
    Case("several tiles", B=1, Sq=130, Sk=127),
    Case("several tiles, causal", B=1, Sq=130, Sk=127, causal=True),
    Case("several tiles, window", B=1, Sq=127, Sk=130, window=(40, 20)),
    Case("D 64", B=1, Hq=1, Hkv=1, D=64, Dv=64),
    Case("D 80", B=1, Hq=1, Hkv=1, D=80, Dv=80),
    Case("D 256", B=1, Hq=1, Hkv=1, Sq=20, Sk=20, D=256, Dv=256),
    Case("D 512", B=1, Hq=1, Hkv=1, Sq=20, Sk=20, D=512, Dv=512),
    Case("D 257, Dv 320", B=1, Hq=1, Hkv=1, Sq=20, Sk=20, D=257, Dv=320),
    Case("D 1", B=1, D=1, Dv=1),
    Case("keys and values alike, float16", dtype=torch.float16, alike=4.0, D=20, Dv=21),
    Case("keys and values alike, bfloat16", dtype=torch.bfloat16, alike=4.0, D=24, Dv=24),
    Case("bfloat16 bias of float64", Sq=130, Sk=127, dtype=torch.float64, bias="pairs", bias_dtype=torch.bfloat16),
    Case("rows before every key", Sq=40, Sk=10, causal=True),
    Case("window past every key", Sq=10, Sk=60, window=(3, 0), align="top_left"),
]
SINGLE = [
    Case("")._replace(name=f"{name}, {str(dtype).removeprefix('torch.')}", dtype=dtype, **options)
    for number, (name, options) in enumerate({"plain": {}, **FEATURES}.items())
    for dtype in (torch.float32, DTYPES[1 + number % 3])
]
# In pairs, one option of each kind is enough.
DISTINCT = (
    *("grouped heads", "awkward", "more keys", "expanded", "causal", "window"),
    *("top left", "mask of pairs", "mask over heads", "key mask", "query mask", "negative scale"),
    *("bias of pairs", "bias over batch", "bias of rows", "bias of keys", "softcap", "slopes", "sinks", "dropout"),
    *("weights", "lse alone"),
)


def _merged(names, features=FEATURES):
    """Return the fields that several `features` set, or None if two of them set a field differently."""
    fields = {name: value for each in names for name, value in features[each].items()}
    agree = all(fields[name] == value for each in names for name, value in features[each].items())
    return fields if agree else None


def _all_together(combinations):
    """Return a case for each combination of options of FEATURES, unless two of them set a field differently."""
    made = [(names, fields) for names in combinations if (fields := _merged(names)) is not None]
    return [Case(" + ".join(names), dtype=DTYPES[n % 4])._replace(**fields) for n, (names, fields) in enumerate(made)]


PAIRS = _all_together(itertools.combinations(DISTINCT, 2))
# the names in FEATURES that are options of a call, not properties of its tensors
OPTIONS = tuple(name for name in DISTINCT if name not in ("awkward", "more keys", "expanded"))
OPTION_PAIRS = _all_together(itertools.combinations(OPTIONS, 2))
# (D, Dv) of wide heads, whose tiles have several parts of columns. WIDE has each option at each of them.
WIDTHS = (257, 257), (320, 320), (512, 512), (512, 64), (64, 512), (192, 128)
WIDE = [
    Case(f"{name}, D {D} Dv {Dv}")._replace(D=D, Dv=Dv, dtype=DTYPES[number % 3], **FEATURES.get(name, {}))
    for number, ((D, Dv), name) in enumerate(itertools.product(WIDTHS, ["plain", "strided", *OPTIONS, "scale 0"]))
]


def cover(size, features, rank=lambda fields: 1):
    """Return a few lists, with up to `size` names of `features` each, that together have each possible pair.

    rank(fields): a number, 0 for impossible fields. Only lists of at least the rank of a pair alone cover it.
    """

    @functools.cache
    def ranked(names):
        return 0 if (fields := _merged(names, features)) is None else rank(fields)

    every = {pair: ranked(pair) for pair in map(frozenset, itertools.combinations(features, 2))}
    left = dict.fromkeys(sorted(filter(every.get, every), key=lambda pair: (-every[pair], sorted(pair))))
    chosen = []
    while left:
        pair = next(iter(left))
        case, least = [name for name in features if name in pair], every[pair]
        while len(case) < size:
            gain = {name: sum(frozenset((name, other)) in left for other in case) for name in features}
            best = sorted((name for name in features if name not in case and gain[name]), key=lambda x: -gain[x])
            more = next((name for name in best if ranked(frozenset((*case, name))) >= least), None)
            if more is None:
                break
            case.append(more)
        chosen.append(case)
        for pair in map(frozenset, itertools.combinations(case, 2)):
            if every[pair] <= ranked(frozenset(case)):
                left.pop(pair, None)
    return chosen


def covering(size, names=DISTINCT):
    """Return a few cases, with up to `size` options each, that together have each possible pair of `names`."""
    return _all_together(cover(size, {name: FEATURES[name] for name in names}))


COVERING = covering(4)
_BIASES = "bias of pairs", "bias over batch", "bias of rows", "bias of keys"
_MASKS = "mask of pairs", "mask over heads", "key mask", "query mask"
TRIPLES = _all_together(itertools.product(["dropout"], _BIASES, _MASKS))
