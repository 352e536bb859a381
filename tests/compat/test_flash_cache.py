"""flash_attn_with_kvcache: a loop over the sequences says what it returns, and what it writes, which is all it does."""

import math
from typing import NamedTuple

import pytest
import torch

import fusedattn as fa
from fusedattn.compat.flash_attn import flash_attn_with_kvcache
from fusedattn.testing.tolerance import verdict

from ..caches import bits
from .flash import assert_names, described, formula, turned

HKV, D, DV, C = 2, 10, 6, 12


class Case(NamedTuple):
    name: str
    options: dict = {}
    Sq: int = 1
    new: int | None = None
    lengths: tuple | int | None = (0, 5, 9)
    page: int | None = None
    batch_idx: tuple | None = None
    leftpad: tuple | None = None
    half: int = 0
    H: int = 4
    dtype: torch.dtype = torch.float32
    views: bool = False

    def draw(self, device="cpu"):
        """Arguments by name; whatever nobody may read is NaN."""

        def normal(*shape):
            return torch.randn(shape, device=device).to(self.dtype)

        batch = len(self.lengths) if isinstance(self.lengths, tuple) else 3
        page, each = self.page or C, -(-C // self.page) if self.page else 1
        caches = 2 + batch * each
        shape = (caches, 3, page, 2, HKV) if self.views else (caches, page, HKV)
        k_cache, v_cache = (torch.full((*shape, d), math.nan, device=device).to(self.dtype) for d in (D, DV))
        if self.views:
            k_cache, v_cache = k_cache[:, 1, :, 1], v_cache[:, 2, :, 0]
        a = dict(q=normal(batch, self.Sq, self.H, D), k_cache=k_cache, v_cache=v_cache, **self.options)
        a["cache_seqlens"] = self.lengths
        if isinstance(self.lengths, tuple):
            a["cache_seqlens"] = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        if "alibi_slopes" in a:
            a["alibi_slopes"] = torch.rand(a["alibi_slopes"], device=device)
        for name, numbers in (("cache_batch_idx", self.batch_idx), ("cache_leftpad", self.leftpad)):
            if numbers is not None:
                a[name] = torch.tensor(numbers, dtype=torch.int32, device=device)
        if self.page:
            table = torch.randperm(caches, device=device)[: batch * each].view(batch, each).int()
            for b, length in enumerate(lengths_of(a)):
                table[b, -(-(length + (self.new or 0)) // page) :] = -1
            a["block_table"] = table
        if self.new is not None:
            a |= dict(k=normal(batch, self.new, HKV, D), v=normal(batch, self.new, HKV, DV))
        if self.half:
            angles = torch.rand(2 * C, self.half, device=device) * 2 * math.pi
            a |= dict(rotary_cos=angles.cos().to(self.dtype), rotary_sin=angles.sin().to(self.dtype))
        for b, length in enumerate(lengths_of(a)):
            for position in range(self.leftpad[b] if self.leftpad else 0, length):
                where = place(a, b, position)
                k_cache[where], v_cache[where] = normal(HKV, D), normal(HKV, DV)
        return a


def lengths_of(a):
    given = a["cache_seqlens"]
    if isinstance(given, torch.Tensor):
        return given.tolist()
    return [C if given is None else given] * len(a["q"])


def place(a, b, position):
    """Where in a cache the position of a sequence is."""
    if a.get("block_table") is not None:
        page = a["k_cache"].shape[1]
        return int(a["block_table"][b, position // page]), position % page
    return int(a["cache_batch_idx"][b]) if a.get("cache_batch_idx") is not None else b, position


def one_by_one(a):
    """(output, log-sum-exp, {(cache, slot): (key, value)} of what is new)."""
    scores = ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")
    options = {name: a[name] for name in scores if name in a}
    local = options.get("causal", False) or any(-1 < side < C for side in options.get("window_size", ()))
    outs, lses, written = [], [], {}
    for b, length in enumerate(lengths_of(a)):
        slopes = options.get("alibi_slopes")
        own = options | ({} if slopes is None else dict(alibi_slopes=slopes[b] if slopes.dim() == 2 else slopes))
        places = [place(a, b, position) for position in range(length)]
        q = a["q"][b]
        keys, values = ([a[name][x] for x in places] for name in ("k_cache", "v_cache"))
        if a.get("k") is not None:
            new = a["k"][b]
            if a.get("rotary_cos") is not None:
                turn = a["rotary_cos"], a["rotary_sin"], a.get("rotary_interleaved", True)
                steps = torch.arange(len(q)) if local else torch.zeros(len(q))
                q = turned(q, length + steps, *turn)
                new = turned(new, length + torch.arange(len(new)), *turn)
            written |= {place(a, b, length + j): pair for j, pair in enumerate(zip(new, a["v"][b], strict=True))}
            keys, values = keys + list(new), values + list(a["v"][b])
        first = int(a["cache_leftpad"][b]) if "cache_leftpad" in a else 0
        keys, values = (
            torch.stack(x[first:]) if x[first:] else q.new_zeros(0, HKV, d) for x, d in ((keys, D), (values, DV))
        )
        out, lse = formula(q[None], keys[None], values[None], **own)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.stack(outs), torch.stack(lses), written


def in_float64(a):
    return {name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in a.items()}


EVERY = dict(causal=True, softmax_scale=0.6, softcap=2.0, alibi_slopes=(3, 4))
CASES = [
    Case("one query"),
    Case("float64", dict(causal=True), Sq=2, new=2, dtype=torch.float64),
    Case("bfloat16", dict(causal=True), Sq=2, new=2, dtype=torch.bfloat16, half=3),
    Case("more queries than keys", dict(causal=True), Sq=4, lengths=(0, 2, 12)),
    Case("the same length for all", dict(causal=True), Sq=2, lengths=7),
    Case("the same length, and new keys", dict(causal=True), Sq=2, new=2, lengths=7),
    Case("nothing in the cache", dict(causal=True), Sq=3, new=3, lengths=0),
    Case("the whole cache", dict(causal=True), Sq=2, lengths=None),
    Case("the whole of pages", Sq=2, lengths=None, page=4),
    Case("new", new=1),
    Case("new to the end", dict(causal=True), Sq=3, new=3),
    Case("fewer new than queries", dict(causal=True), Sq=3, new=1),
    Case("more new than queries", dict(causal=True), Sq=1, new=3),
    Case("none new", new=0),
    Case("window", dict(window_size=(3, 1)), Sq=3, new=2),
    Case("causal window", dict(causal=True, window_size=(2, 2)), Sq=2, new=2),
    Case("num_splits", dict(num_splits=3), new=1),
    Case("everything", EVERY | dict(window_size=(6, 0), rotary_interleaved=False), Sq=3, new=3, half=4, page=5),
    Case("odd pages", dict(causal=True), Sq=2, new=3, page=5),
    Case("views of pages", dict(causal=True), Sq=2, new=2, page=4, views=True),
    Case("chosen caches", dict(causal=True), Sq=2, new=2, batch_idx=(3, 0, 4)),
    Case("chosen views", dict(causal=True), Sq=2, new=2, batch_idx=(3, 0, 4), views=True, half=5),
    Case("one cache for all", batch_idx=(1, 1, 1), lengths=(5, 5, 5)),
    Case("left padding of the whole", leftpad=(0, 2, 7), lengths=None),
    Case("left padding of chosen caches", new=1, leftpad=(0, 3, 1), batch_idx=(4, 2, 0)),
    Case("left padding, turned", EVERY, Sq=2, new=2, leftpad=(0, 2, 4), half=2),
    *(
        Case(f"turned {name}, {rows} of {new}, {pairs}", options | pairs, Sq=rows, new=new, half=3)
        for name, options in {
            "causal": dict(causal=True),
            "in a window": dict(window_size=(4, 2)),
            "all alike": {},
            "all alike in a wide window": dict(window_size=(C, 2 * C)),
        }.items()
        for rows, new in ((1, 1), (3, 3), (1, 3), (3, 1))
        for pairs in ({}, dict(rotary_interleaved=False))
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_caches(case):
    check(case, "cpu", "naive")


ON_KERNELS = ("bfloat16", "everything", "chosen views", "left padding, turned", "turned all alike, 3 of 1, {}")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ON_KERNELS], ids=lambda case: case.name)
def test_caches_on_kernels(case, device, poison):
    check(case, device, "triton")


def check(case, device, backend):
    a = case.draw(device)
    eager = one_by_one(a)
    oracle = one_by_one(in_float64(a))
    caches = a["k_cache"], a["v_cache"]
    before, lengths = [bits(x).clone() for x in caches], a["cache_seqlens"]
    was = lengths.clone() if isinstance(lengths, torch.Tensor) else lengths
    with fa.use_backend(backend):
        results = flash_attn_with_kvcache(**a, return_softmax_lse=True)
    wrong = [held.why for x in zip(results, eager[:2], oracle[:2], strict=True) if not (held := verdict(*x)).ok]
    assert not wrong
    out, lse = results
    assert out.is_contiguous() and out.dtype == case.dtype
    assert lse.dtype == torch.promote_types(case.dtype, torch.float32)
    if isinstance(was, torch.Tensor):
        assert torch.equal(lengths, was)
    for number, (cache, held) in enumerate(zip(caches, before, strict=True)):
        new = torch.zeros_like(held, dtype=torch.bool)
        view = new.as_strided(cache.shape, cache.stride(), cache.storage_offset())
        for where, pair in oracle[2].items():
            view[where] = True
            rtol = 0.0 if number or not case.half else torch.finfo(case.dtype).eps
            torch.testing.assert_close(cache[where].double(), pair[number], rtol=rtol, atol=rtol)
        assert torch.equal(bits(cache)[~new], held[~new])
    if case.new is None:
        with fa.use_backend(backend):
            assert torch.equal(flash_attn_with_kvcache(**a), out)


def test_in_one_graph():
    a = Case("", Sq=3, new=1, half=2, batch_idx=(3, 0, 4), leftpad=(0, 2, 4)).draw()
    twin = a | {cache: a[cache].clone() for cache in ("k_cache", "v_cache")}
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="eager")
    assert torch.equal(compiled(**a), flash_attn_with_kvcache(**twin))
    for cache in ("k_cache", "v_cache"):
        assert torch.equal(bits(a[cache].contiguous()), bits(twin[cache].contiguous()))


PLAIN = Case("", dict(causal=True), Sq=2, new=2)
INT32 = torch.int32


def rotary(positions=2 * C, half=3, **more):
    return dict(rotary_cos=torch.zeros(positions, half), rotary_sin=torch.zeros(positions, half)) | more


CACHE = torch.zeros(5, C, HKV, D)
LONGER = torch.zeros(3, 3, 4, D)  # more queries than new keys, which are rotated before the call of attention_decode


def numbers(*values):
    return torch.tensor(values, dtype=INT32)


WRONG = [
    (ValueError, "q", dict(q=torch.zeros(3, 2, D))),
    (ValueError, "q", dict(q=torch.zeros(3, 2, 4, D).requires_grad_())),
    (TypeError, "k_cache", dict(k_cache=CACHE.half())),
    (ValueError, "k_cache", dict(k_cache=CACHE[:2], v_cache=torch.zeros(2, C, HKV, DV))),
    (ValueError, "k_cache", dict(k_cache=CACHE[:, :1].expand(5, C, HKV, D))),
    (ValueError, "v_cache", dict(v_cache=torch.zeros(5, C + 1, HKV, DV))),
    (ValueError, "k", dict(k=None)),
    (ValueError, "k", dict(k=torch.zeros(3, 4, HKV, D), v=torch.zeros(3, 4, HKV, DV))),
    (ValueError, "k", dict(cache_seqlens=C - 1)),
    (ValueError, "v", dict(v=None)),
    (ValueError, "v", dict(v=torch.zeros(3, 1, HKV, DV))),
    (ValueError, "cache_seqlens", dict(cache_seqlens=None)),
    (TypeError, "cache_seqlens", dict(cache_seqlens=1.0)),
    (ValueError, "cache_seqlens", dict(cache_seqlens=-1)),
    (ValueError, "cache_seqlens", dict(cache_seqlens=C + 1)),
    (ValueError, "cache_seqlens", dict(cache_seqlens=numbers(1, 2, C + 1))),
    (TypeError, "cache_batch_idx", dict(cache_batch_idx=torch.tensor([0, 1, 2]))),
    (ValueError, "cache_batch_idx", dict(cache_batch_idx=numbers(0, 1))),
    (ValueError, "cache_batch_idx", dict(cache_batch_idx=numbers(0, 1, 5))),
    (ValueError, "cache_batch_idx", dict(cache_batch_idx=numbers(0, 1, 1), cache_seqlens=4)),
    (TypeError, "cache_leftpad", dict(cache_leftpad=1)),
    (ValueError, "cache_leftpad", dict(cache_leftpad=numbers(0, 1, -1))),
    (ValueError, "cache_leftpad", dict(cache_leftpad=numbers(0, 1, C + 1))),
    (ValueError, "softmax_scale", dict(softmax_scale=math.nan)),
    (ValueError, "rotary_cos", rotary(k=None, v=None)),
    (ValueError, "rotary_cos", rotary(rotary_cos=None)),
    (TypeError, "rotary_interleaved", rotary(rotary_interleaved=1)),
    (ValueError, "rotary_cos", rotary(positions=11, q=LONGER)),
    (ValueError, "rotary_sin", rotary(rotary_sin=torch.zeros(2 * C, 4), q=LONGER)),
    (ValueError, "k", rotary(q=LONGER, cache_seqlens=numbers(1, 2, C - 1))),
    (ValueError, "softcap", rotary(q=LONGER, softcap=-1.0)),
]
TABLE = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]], dtype=INT32)
WRONG_PAGES = [
    (TypeError, "block_table", dict(block_table=TABLE.long())),
    (ValueError, "block_table", dict(block_table=TABLE[:2])),
    (ValueError, "block_table", dict(block_table=TABLE + 9)),
    (ValueError, "block_table", dict(block_table=TABLE[:1].expand(3, 3), cache_seqlens=4)),
    (ValueError, "cache_batch_idx", dict(cache_batch_idx=torch.arange(3, dtype=INT32))),
    (ValueError, "cache_leftpad", dict(cache_leftpad=torch.arange(3, dtype=INT32))),
]


@pytest.mark.parametrize(
    ("error", "name", "changed", "page"),
    [(*row, None) for row in WRONG] + [(*row, 4) for row in WRONG_PAGES],
    ids=described,
)
def test_what_is_refused_is_refused_before_anything_is_written(error, name, changed, page):
    a = PLAIN._replace(page=page).draw()
    held = [bits(a[each]).clone() for each in ("k_cache", "v_cache")]
    wrong = a | changed
    with pytest.raises(error) as raised:
        flash_attn_with_kvcache(**wrong)
    assert issubclass(raised.type, RuntimeError)  # which flash-attn raises
    assert_names(raised.value, name)
    for each, was in zip(("k_cache", "v_cache"), held, strict=True):
        assert torch.equal(bits(a[each]), was)
    flash_attn_with_kvcache(**a)
