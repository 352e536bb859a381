"""Named calls of `attention_decode`, and a reference that computes them sequence by sequence with `attention`."""

import itertools
from typing import NamedTuple

import torch

from fusedattn import attention_decode, reference

from .cases import WIDTHS, among_nan

OPTIONS = ("causal", "window", "align", "scale", "softcap")  # fields of Cached that are options of the call


class Cached(NamedTuple):
    """A named call of `attention_decode`; `lengths` count the keys of each sequence before the new keys."""

    name: str
    Hq: int = 4
    Hkv: int = 2
    Sq: int = 1
    C: int = 48
    D: int = 16
    Dv: int = 16
    lengths: tuple = (17, 44)
    new: int = 0
    page: int | None = None  # keys per page; pages are shuffled, and page numbers past a length are invalid
    dtype: torch.dtype = torch.float32
    shared: bool = False  # the values are the first columns of the keys, in the same memory
    strided: bool = False  # caches, query, new keys, lengths and table are views of larger buffers
    half: int = 0  # number of column pairs that are rotated
    interleaved: bool = False
    mask: bool = False
    bias: bool = False  # some elements are -inf
    key_mask: str | None = None  # "own" or "shared"
    query_mask: bool = False
    alibi: bool = False
    sinks: bool = False
    causal: bool = False
    window: tuple | None = None
    align: str = "bottom_right"
    scale: float | None = None
    softcap: float | None = None

    def draw(self, device="cpu", seed=0):
        """Return the call's arguments; memory that must not be read is NaN."""
        generator = torch.Generator(device).manual_seed(seed)
        batch = len(self.lengths)

        def normal(*shape):
            return torch.randn(shape, generator=generator, device=device).to(self.dtype)

        def visible(*shape):
            return torch.rand(shape, generator=generator, device=device) < 0.7

        query = normal(batch, self.Hq, self.Sq, self.D)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        page = self.page or self.C
        each = -(-self.C // page)
        pages = batch * each + 2 if self.page else batch
        caches = [torch.full((pages, self.Hkv, page, d), float("nan"), device=device) for d in (self.D, self.Dv)]
        caches = [cache.to(self.dtype) for cache in caches]
        table = None
        if self.page:
            numbers = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))[: batch * each]
            table = numbers.view(batch, each).to(device, torch.int32)
            for row, length in zip(table, self.lengths, strict=True):
                reached = -(-(length + self.new) // page)
                row[reached:] = torch.tensor([-1, 10**9] * each, device=device)[: each - reached]
        if self.strided:
            caches = [among_nan(cache, order) for cache, order in zip(caches, ("bshd", "sbhd"), strict=True)]
            query = among_nan(query, "bhds")
            lengths = torch.stack([lengths, lengths * 0 - 7], 1)[:, 0]
            table = None if table is None else torch.stack([table.mT, table.mT * 0 - 7], 1)[:, 0].mT
        names = numbered(table, batch, device)
        for cache in caches[: 1 if self.shared else 2]:
            for b, length in enumerate(self.lengths):
                for position in range(length):
                    cache[names[b][position // page], :, position % page] = normal(self.Hkv, cache.shape[3])
        if self.shared:
            caches[1] = caches[0][..., : self.Dv]
        arguments = dict(query=query, key_cache=caches[0], value_cache=caches[1], cache_seqlens=lengths)
        if table is not None:
            arguments["block_table"] = table
        if self.new:
            arguments["new_key"] = normal(batch, self.Hkv, self.new, self.D)
            values = normal(batch, self.Hkv, self.new, self.Dv)
            arguments["new_value"] = arguments["new_key"][..., : self.Dv] if self.shared else values
            if self.strided:
                for name, order in (("new_key", "bhds"), ("new_value", "sbhd")):
                    arguments[name] = among_nan(arguments[name], order)
        if self.half:
            places = max(self.lengths) + self.new + (self.Sq if self.align == "top_left" else 0)
            speeds = 0.7 ** torch.arange(1, self.half + 1, device=device)
            angles = torch.outer(torch.arange(places, device=device).float(), speeds)
            wide = torch.promote_types(self.dtype, torch.float32)
            arguments |= dict(rotary_cos=angles.cos().to(wide), rotary_sin=angles.sin().to(wide))
            arguments["rotary_interleaved"] = self.interleaved
            if self.strided:
                arguments["rotary_sin"] = arguments["rotary_sin"].mT.contiguous().mT
        capacity = page * each
        if self.mask:
            arguments["mask"] = visible(batch, 1, self.Sq, capacity)
        if self.bias:
            arguments["bias"] = normal(1, self.Hq, self.Sq, capacity).masked_fill(~visible(capacity), float("-inf"))
        if self.key_mask:
            arguments["key_mask"] = visible(batch if self.key_mask == "own" else 1, capacity)
            for b, length in enumerate(self.lengths):
                for position in range(length):
                    if not arguments["key_mask"].expand(batch, -1)[b, position]:
                        for cache in caches:
                            cache[names[b][position // page], :, position % page] = float("nan")
        if self.query_mask:
            arguments["query_mask"] = torch.arange(self.Sq, device=device) < torch.arange(batch, device=device)[:, None]
            hidden = ~arguments["query_mask"][:, None, :, None]
            query.copy_(torch.where(hidden, float("nan"), query))
        if self.alibi:
            arguments["alibi_slopes"] = torch.rand(batch, self.Hq, generator=generator, device=device).double()
        if self.sinks:
            arguments["sinks"] = normal(self.Hq)
        given = {name: getattr(self, name) for name in OPTIONS}
        return arguments | {name: x for name, x in given.items() if x != self._field_defaults[name]}


def numbered(table, batch, device):
    """Return the page numbers of each sequence, as lists; without a table sequence b has page b alone."""
    return torch.arange(batch, device=device)[:, None].tolist() if table is None else table.tolist()


def turned(x, positions, cos, sin, interleaved):
    """Apply the rotary embedding to x (H, S, D) by complex products, in float32 or wider."""
    half = cos.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    turning = x[..., : 2 * half]
    first, second = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    angle = torch.complex(cos[positions].to(wide), sin[positions].to(wide))
    product = torch.complex(first.to(wide), second.to(wide)) * angle
    parts = product.real, product.imag
    pairs = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([pairs.to(x.dtype), x[..., 2 * half :]], -1)


def widest(device):
    """Return the widest dtype that the kernels support on a device."""
    return torch.float64 if device == "cpu" else torch.float32


def in_float64(arguments):
    return {k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in arguments.items()}


def one_by_one(attend, arguments):
    """Compute a call one sequence at a time; return ({"out", "lse", "weights"}, the caches afterwards)."""
    a = dict(arguments)
    query, caches = a.pop("query"), [a.pop("key_cache").clone(), a.pop("value_cache").clone()]
    lengths, table = a.pop("cache_seqlens").tolist(), a.pop("block_table", None)
    new = a.pop("new_key", None), a.pop("new_value", None)
    cos, sin, interleaved = (a.pop(f"rotary_{name}", None) for name in ("cos", "sin", "interleaved"))
    batch, heads, rows, _ = query.shape
    page = caches[0].shape[2]
    names = numbered(table, batch, query.device)
    capacity = page * len(names[0])
    results = []
    for b, length in enumerate(lengths):
        after = length + (0 if new[0] is None else new[0].shape[2])
        level = 0 if a.get("align") == "top_left" else after - rows
        q = query[b]
        if cos is not None:
            q = turned(q, (torch.arange(rows, device=q.device) + level).clamp(min=0), cos, sin, interleaved)
        for cache, added in zip(caches, new, strict=True):
            for i, position in enumerate(range(length, after)):
                row = added[b, :, i : i + 1]
                if cos is not None and cache is caches[0]:
                    row = turned(row, torch.tensor([position], device=q.device), cos, sin, interleaved)
                cache[names[b][position // page], :, position % page] = row[:, 0]
        reached = names[b][: -(-after // page)]
        keys = [cache[reached].transpose(0, 1).flatten(1, 2)[:, :after] for cache in caches]
        shapes = dict(mask=(batch, 1, rows, capacity), bias=(batch, heads, rows, capacity), key_mask=(batch, capacity))
        shapes |= dict(query_mask=(batch, rows), alibi_slopes=(batch, heads))
        own = {name: x.expand(shapes[name])[b : b + 1] if name in shapes else x for name, x in a.items()}
        own |= {name: own[name][..., :after] for name in ("mask", "bias", "key_mask") if name in a}
        out, lse, weights = attend(q[None], *(x[None] for x in keys), **own, return_lse=True, return_weights=True)
        results.append((out, lse, torch.nn.functional.pad(weights, (0, capacity - after))))
    return dict(zip(("out", "lse", "weights"), map(torch.cat, zip(*results, strict=True)), strict=True)), caches


def bits(tensor):
    """Return all memory of a tensor as integers, so that NaN can be compared."""
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return flat.view(kind)


def touched(cache, arguments):
    """Return a mask of a cache's memory: True where the call may write, after wrong lengths and pages are clamped."""
    mark = torch.zeros_like(bits(cache), dtype=torch.bool)
    view = mark.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    pages, _, page, _ = cache.shape
    new = arguments.get("new_key")
    names = numbered(arguments.get("block_table"), arguments["query"].shape[0], cache.device)
    for own, length in zip(names, arguments["cache_seqlens"].tolist(), strict=True):
        room = page * len(own)
        first = min(max(length, 0), room)
        for position in range(first, min(first + (0 if new is None else new.shape[2]), room)):
            if 0 <= (number := own[position // page]) < pages:
                view[number, :, position % page] = True
    return mark


def truths(arguments):
    """Return results of eager PyTorch, results in float64, and the float64 caches with the new rows."""
    eager, _ = one_by_one(reference.eager, arguments)
    return eager, *one_by_one(reference.attention, in_float64(arguments))


def assert_written(arguments, before, expected):
    """Assert that the caches hold the new rows, and that all other memory is unchanged; before: {name: `bits`}."""
    for name, want in zip(("key_cache", "value_cache"), expected, strict=True):
        cache = arguments[name]
        same = cache.data_ptr() == arguments["key_cache"].data_ptr()  # of shared memory, the keys write more
        old = ~touched(arguments["key_cache"] if same else cache, arguments)
        assert torch.equal(bits(cache)[old], before[name][old]), f"{name} changed outside the new rows"
        rounding = dict(rtol=2 * torch.finfo(cache.dtype).eps, atol=1e-6, equal_nan=True)
        assert torch.allclose(cache.double(), want, **rounding), f"{name} does not hold the new rows"


def computed(arguments, backend, need_weights=True):
    """Return ({result: tensor}, eager PyTorch's, float64's) of a call; assert dtypes, and that no input changed.

    The caches must hold the new rows.
    """
    eager, oracle, expected = truths(arguments)
    given = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    before = {name: bits(x).clone() for name, x in given.items()}
    results = attention_decode(**arguments, return_lse=True, return_weights=need_weights, backend=backend)
    assert_written(arguments, before, expected)
    changed = [name for name, x in given.items() if not torch.equal(bits(x), before[name])]
    assert {*changed} <= {"key_cache", "value_cache"}, changed
    found, dtype = dict(zip(("out", "lse", "weights"), results, strict=False)), arguments["query"].dtype
    assert found["out"].dtype == dtype and found["lse"].dtype == torch.promote_types(dtype, torch.float32)
    return found, eager, oracle


BOTH = dict(new=3, Sq=3, causal=True, lengths=(0, 44))  # the new keys belong to the queries
# Options and layouts of a call, used alone and in pairs.
FEATURES = {
    "pages": dict(page=16), "small pages": dict(page=4), "odd pages": dict(page=7, C=49),
    "new": BOTH, "fewer queries than new": dict(new=4, Sq=2), "more queries than new": dict(new=1, Sq=5, causal=True),
    "turned": dict(half=5, Sq=1, lengths=(1, 44)),
    "turned in neighbours": dict(half=8, interleaved=True, new=2, causal=True, Sq=2),
    "many rows": dict(Sq=18, causal=True, Hq=2, Hkv=1, lengths=(17, 44)),
    "one head": dict(Hq=3, Hkv=1), "heads of their own": dict(Hq=2, Hkv=2), "groups": dict(Hq=8, Hkv=1),
    "odd head dims": dict(D=10, Dv=24), "strided": dict(strided=True),
    "mask": dict(mask=True, Sq=2), "bias": dict(bias=True, Sq=2),
    "key mask": dict(key_mask="own"), "shared key mask": dict(key_mask="shared"),
    "query mask": dict(query_mask=True, Sq=2),
    "window": dict(window=(9, 0), Sq=2), "two-sided window": dict(window=(20, 4), Sq=6),
    "top left": dict(align="top_left", window=(None, 2), Sq=6),
    "scale": dict(scale=-0.4), "softcap": dict(softcap=1.5),
    "slopes": dict(alibi=True, Sq=2), "sinks": dict(sinks=True),
}  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SINGLE = [
    Cached(name, dtype=DTYPES[number % 3])._replace(**options)
    for number, (name, options) in enumerate({"plain": {}, **FEATURES}.items())
]
# Each option with wide heads. The first 512 of 576 columns of keys are the values, unless the call rotates keys.
WIDE = [
    case._replace(
        name=f"{case.name}, D {D} Dv {Dv}", D=D, Dv=Dv, dtype=DTYPES[number % 3], shared=D == 576 and not case.half
    )
    for number, ((D, Dv), case) in enumerate(itertools.product([*WIDTHS, (576, 512)], [x for x in SINGLE if x.D == 16]))
]
# Every eleventh pair: each option is in about four of them. If both set a field, the first one wins.
PAIRS = [
    Cached(f"{a}, {b}", dtype=DTYPES[number % 4])._replace(
        **FEATURES[a], **{k: v for k, v in FEATURES[b].items() if k not in FEATURES[a]}
    )
    for number, (a, b) in enumerate(itertools.combinations(FEATURES, 2))
    if number % 11 == 3
]
EVERYTHING = Cached(
    "everything", page=16, strided=True, half=5, mask=True, bias=True, key_mask="own", query_mask=True, alibi=True
)
EVERYTHING = EVERYTHING._replace(sinks=True, window=(30, 4), scale=0.3, softcap=2.0, new=3, Sq=3, D=10, Dv=24)
EDGES = [
    Cached("edges of pages", page=16, lengths=(15, 16, 17, 32, 48), Hq=2),
    Cached("edges of blocks", lengths=(0, 1, 15, 16, 17, 48), Hq=2),
    Cached("new at the edges of pages", page=16, lengths=(14, 15, 16, 46), new=2, Sq=2, causal=True, Hq=2),
    Cached("D 1", D=1, Dv=1),
    Cached("large scores", Hq=16, Hkv=8, scale=30000.0),  # with few rows and heads, the mean error would be random
    Cached("large scores and a bias", scale=-30000.0, bias=True, page=16),
    Cached("D 256", Hq=2, Hkv=1, D=256, Dv=256, lengths=(3, 20), C=20, dtype=torch.float16),
    Cached("D 576", Hq=2, Hkv=1, D=576, Dv=512, lengths=(3, 20), C=24, new=3, half=32, dtype=torch.bfloat16),
    Cached("D 513, fp32", Hq=2, Hkv=1, D=513, Dv=320, page=4, lengths=(3, 20), C=24),
    Cached("D 70, shared", Hq=2, Hkv=1, D=70, Dv=66, page=4, lengths=(3, 20), C=24, shared=True, key_mask="own"),
    Cached("D 70, shared but loaded", Hq=2, Hkv=1, D=70, Dv=16, page=4, lengths=(3, 20), C=24, shared=True),
    Cached("empty", lengths=(0, 0)),
    Cached("turned from the top left", half=4, align="top_left", Sq=2, lengths=(3, 17), Hq=2),
    # A tile of 32 rows holds rows of 11 queries; only the last query sees another block of keys.
    Cached("odd groups", Hq=3, Hkv=1, Sq=12, causal=True, lengths=(18, 34)),
]
