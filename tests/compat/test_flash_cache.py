"""Tests flash_attn_with_kvcache against a loop over the sequences: results, and writes to the caches."""

import math
from typing import NamedTuple

import pytest
import torch

import fusedattn as fa
from fusedattn.compat.flash_attn import flash_attn_with_kvcache

from ..caches import Cached, bits, in_float64, one_by_one, touched, turned
from ..close import assert_as_good
from ..inside import same
from ..mistakes import ints
from .test_errors import NOT_FLASH, assert_refused

HKV, D, DV, C = 2, 10, 6, 12
BASE = dict(Hq=4, Hkv=HKV, D=D, Dv=DV, C=C, lengths=(0, 5, 9))


class Case(NamedTuple):
    """A named call of attention_decode, and the same call for flash-attn."""

    name: str
    cached: Cached
    half: int = 0
    interleaved: bool = True
    chosen: bool = False  # pass cache_batch_idx instead of a block table
    leftpad: tuple | None = None
    said: str = "each"  # lengths: one for "each" cache, one for "all", or "nothing", then caches are full

    def draw(self, device="cpu"):
        """Return the arguments of attention_decode and those of flash_attn_with_kvcache; both share the caches."""
        a = self.cached.draw(device)
        lengths, length = a["cache_seqlens"], self.cached.lengths[0]
        window = tuple(-1 if side is None else side for side in a.get("window") or (None, None))
        given = {name: a[name].transpose(1, 2) for name in ("new_key", "new_value") if name in a}
        given = dict(zip("kv", given.values(), strict=False)) | dict(causal=a.get("causal", False), window_size=window)
        given |= dict(softmax_scale=a.get("scale"), softcap=a.get("softcap", 0.0), alibi_slopes=a.get("alibi_slopes"))
        given |= dict(cache_seqlens=dict(each=lengths, all=length, nothing=None)[self.said])
        for name, ours in dict(q="query", k_cache="key_cache", v_cache="value_cache").items():
            given[name] = a[ours].transpose(1, 2)
        if "block_table" in a:
            given |= dict(cache_batch_idx=a["block_table"][:, 0]) if self.chosen else dict(block_table=a["block_table"])
        if self.half:
            angles = torch.rand(2 * C, self.half, device=device) * 2 * math.pi
            given |= dict(rotary_cos=angles.cos().to(self.cached.dtype), rotary_sin=angles.sin().to(self.cached.dtype))
            given |= dict(rotary_interleaved=self.interleaved)
        if self.leftpad is not None:
            given["cache_leftpad"] = torch.tensor(self.leftpad, dtype=torch.int32, device=device)
            a["key_mask"] = torch.arange(C, device=device) >= given["cache_leftpad"][:, None]
        return a, given

    def turned(self, a, given):
        """Return the arguments with rotated queries and new keys.

        Queries begin at the positions of the new keys. Without causality or a window all use the first position.
        """
        if not self.half:
            return a
        rotary = [given[f"rotary_{name}"].to(a["query"].dtype) for name in ("cos", "sin")]
        local = given["causal"] or any(-1 < side < C for side in given["window_size"])

        def rotated(x, step):
            steps, lengths = step * torch.arange(x.shape[2], device=x.device), a["cache_seqlens"]
            each = zip(x, lengths, strict=True)
            return torch.stack([turned(one, length + steps, *rotary, self.interleaved) for one, length in each])

        return a | dict(query=rotated(a["query"], int(local)), new_key=rotated(a["new_key"], 1))


def case(name, half=0, interleaved=True, chosen=False, leftpad=None, said="each", **fields):
    fields = BASE | (dict(page=C) if chosen else {}) | fields
    return Case(name, Cached(name, **fields), half, interleaved, chosen, leftpad, said)


EVERY = dict(causal=True, scale=0.6, softcap=2.0, alibi=True)
TWO = dict(causal=True, Sq=2, new=2)
CASES = [
    case("one query"),
    case("float64", dtype=torch.float64, **TWO),
    case("bfloat16", dtype=torch.bfloat16, half=3, **TWO),
    case("more queries than keys", causal=True, Sq=4, lengths=(0, 2, 12)),
    case("the same length for all", lengths=(7, 7, 7), said="all", **TWO),
    case("nothing in the cache", causal=True, Sq=3, new=3, lengths=(0, 0, 0), said="all"),
    case("the whole cache", causal=True, Sq=2, lengths=(C, C, C), said="nothing"),
    case("the whole of pages", Sq=2, lengths=(C, C, C), page=3, said="nothing"),
    case("new to the end", causal=True, Sq=3, new=3),
    case("fewer new than queries", causal=True, Sq=3, new=1),
    case("more new than queries", causal=True, new=3),
    case("window", window=(3, 1), Sq=3, new=2),
    case("causal window", window=(2, 2), **TWO),
    case("everything", window=(6, 0), Sq=3, new=3, half=4, interleaved=False, page=5, **EVERY),
    case("views of pages", page=4, strided=True, **TWO),
    case("chosen caches", chosen=True, lengths=(1, 5, 9), **TWO),
    case("chosen views", chosen=True, lengths=(1, 5, 9), strided=True, half=5, **TWO),
    case("left padding of the whole", leftpad=(0, 2, 7), lengths=(C, C, C), said="nothing"),
    case("left padding of chosen caches", new=1, leftpad=(0, 3, 1), chosen=True, lengths=(1, 5, 9)),
    case("left padding, turned", leftpad=(0, 2, 4), half=2, Sq=2, new=2, **EVERY),
    *(
        case(f"turned {name}, {rows} of {new}", Sq=rows, new=new, half=3, interleaved=rows == 1, **options)
        for name, options in {
            "causal": dict(causal=True),
            "in a window": dict(window=(4, 2)),
            "all alike": {},
            "all alike in a wide window": dict(window=(C, 2 * C)),
        }.items()
        for rows, new in ((1, 1), (3, 3), (1, 3), (3, 1))
    ),
]
ON_KERNELS = ("bfloat16", "everything", "chosen views", "left padding, turned", "turned all alike, 3 of 1")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_caches(case):
    check(case, "cpu", "naive")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ON_KERNELS], ids=lambda case: case.name)
def test_caches_on_kernels(case, device, poison):
    check(case, device, "triton")


def check(case, device, backend):
    a, given = case.draw(device)
    eager, _ = one_by_one(fa.reference.eager, case.turned(a, given))
    oracle, filled = one_by_one(fa.reference.attention, case.turned(in_float64(a), given))
    caches = a["key_cache"], a["value_cache"]
    before, lengths = [bits(x).clone() for x in caches], a["cache_seqlens"].clone()
    with fa.use_backend(backend):
        out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
    assert out.is_contiguous() and out.dtype == case.cached.dtype
    assert lse.dtype == torch.promote_types(out.dtype, torch.float32) and torch.equal(a["cache_seqlens"], lengths)
    for name, got in dict(out=out.transpose(1, 2), lse=lse).items():
        assert_as_good(got, eager[name], oracle[name], name)
    for cache, want, was in zip(caches, filled, before, strict=True):
        rtol = torch.finfo(cache.dtype).eps if case.half and cache is caches[0] else 0.0
        torch.testing.assert_close(cache.double(), want, rtol=rtol, atol=rtol, equal_nan=True)
        unchanged = ~touched(cache, a)
        assert torch.equal(bits(cache)[unchanged], was[unchanged])
    if not case.cached.new:
        with fa.use_backend(backend):
            assert torch.equal(flash_attn_with_kvcache(**given), out)


def test_what_changes_no_result():
    q, k, v = torch.randn(3, 1, 4, 8), torch.randn(4, 7, 2, 8), torch.randn(4, 7, 2, 8)
    k[2], v[2] = k[1], v[1]
    want = flash_attn_with_kvcache(q, k, v, cache_seqlens=5)
    for more in (dict(num_splits=3), dict(k=k[:3, :0], v=v[:3, :0]), dict(cache_batch_idx=ints(0, 1, 1))):
        same(flash_attn_with_kvcache(q, k, v, cache_seqlens=5, **more), want)

    class Decode(torch.nn.Module):
        forward = staticmethod(lambda q: flash_attn_with_kvcache(q, k, v, cache_seqlens=5))

    dims = {0: torch.export.Dim("batch", max=3)}
    same(torch.export.export(Decode(), (q[:2],), dynamic_shapes=dict(q=dims)).module()(q), want)


def test_in_one_graph():
    _, a = case("", Sq=3, new=1, half=2, chosen=True, leftpad=(0, 2, 4), lengths=(1, 5, 9)).draw()
    twin = a | {cache: a[cache].clone() for cache in ("k_cache", "v_cache")}
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="eager")
    assert torch.equal(compiled(**a), flash_attn_with_kvcache(**twin))
    for cache in ("k_cache", "v_cache"):
        torch.testing.assert_close(a[cache], twin[cache], rtol=0, atol=0, equal_nan=True)


def rotary(positions=2 * C, half=3, **more):
    return dict(rotary_cos=torch.zeros(positions, half), rotary_sin=torch.zeros(positions, half)) | more


CACHE = torch.zeros(3, C, HKV, D)
LONGER = torch.zeros(3, 3, 4, D)  # more queries than new keys: rotated before attention_decode

WRONG = [
    (ValueError, "q", dict(q=torch.zeros(3, 2, D))),
    (ValueError, "q", dict(q=torch.zeros(3, 2, 4, D).requires_grad_())),
    (TypeError, "k_cache", dict(k_cache=CACHE.half())),
    (ValueError, "k_cache", dict(k_cache=CACHE[:2], v_cache=torch.zeros(2, C, HKV, DV))),
    (ValueError, "k_cache", dict(k_cache=CACHE[:, :1].expand(3, C, HKV, D))),
    (ValueError, "v_cache", dict(v_cache=torch.zeros(3, C + 1, HKV, DV))),
    (ValueError, "k", dict(k=None)),
    (ValueError, "k", dict(k=torch.zeros(3, 4, HKV, D), v=torch.zeros(3, 4, HKV, DV))),
    (ValueError, "k", dict(cache_seqlens=C - 1)),
    (ValueError, "v", dict(v=None)),
    (ValueError, "v", dict(v=torch.zeros(3, 1, HKV, DV))),
    (ValueError, "cache_seqlens", dict(cache_seqlens=None)),
    (TypeError, "cache_seqlens", dict(cache_seqlens=1.0)),
    (ValueError, "cache_seqlens", dict(cache_seqlens=-1)),
    (ValueError, "cache_seqlens", dict(cache_seqlens=C + 1)),
    (ValueError, "cache_seqlens", dict(cache_seqlens=ints(1, 2, C + 1))),
    (TypeError, "cache_batch_idx", dict(cache_batch_idx=torch.tensor([0, 1, 2]))),
    (ValueError, "cache_batch_idx", dict(cache_batch_idx=ints(0, 1))),
    (ValueError, "cache_batch_idx", dict(cache_batch_idx=ints(0, 1, 5))),
    (ValueError, "cache_batch_idx", dict(cache_batch_idx=ints(0, 1, 1), cache_seqlens=4)),
    (TypeError, "cache_leftpad", dict(cache_leftpad=1)),
    (ValueError, "cache_leftpad", dict(cache_leftpad=ints(0, 1, -1))),
    (ValueError, "cache_leftpad", dict(cache_leftpad=ints(0, 1, C + 1))),
    (ValueError, "rotary_cos", rotary(k=None, v=None)),
    (ValueError, "rotary_cos", rotary(rotary_cos=None)),
    (ValueError, "rotary_cos", rotary(positions=11, q=LONGER)),
    (ValueError, "rotary_sin", rotary(rotary_sin=torch.zeros(2 * C, 4), q=LONGER)),
    (ValueError, "k", rotary(q=LONGER, cache_seqlens=ints(1, 2, C - 1))),
    (ValueError, "softcap", rotary(q=LONGER, softcap=-1.0)),
]
TABLE = ints([0, 1, 2], [3, 4, 5], [6, 7, 8])
WRONG_PAGES = [
    (TypeError, "block_table", dict(block_table=TABLE.long())),
    (ValueError, "block_table", dict(block_table=TABLE[:2])),
    (ValueError, "block_table", dict(block_table=TABLE + 9)),
    (ValueError, "block_table", dict(block_table=TABLE[:1].expand(3, 3), cache_seqlens=4)),
    (ValueError, "cache_batch_idx", dict(cache_batch_idx=ints(0, 1, 2))),
    (ValueError, "cache_leftpad", dict(cache_leftpad=ints(0, 1, 2))),
]

ROWS = [(*row, None) for row in WRONG] + [(*row, 4) for row in WRONG_PAGES]


@pytest.mark.parametrize(("error", "name", "changed", "page"), ROWS)
def test_what_is_refused_is_refused_before_anything_is_written(error, name, changed, page):
    _, a = case("", page=page, **TWO).draw()
    held = [bits(a[each]).clone() for each in ("k_cache", "v_cache")]
    text = assert_refused(error, name, lambda: flash_attn_with_kvcache(**a | changed))
    assert not NOT_FLASH.search(text)
    for each, was in zip(("k_cache", "v_cache"), held, strict=True):
        assert torch.equal(bits(a[each]), was)
    flash_attn_with_kvcache(**a)
