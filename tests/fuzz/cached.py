"""Calls to caches, held to a loop over the sequences."""

import torch
from hypothesis import strategies as st

import fusedattn as fa
from fusedattn import reference
from fusedattn.testing.tolerance import verdict

from ..caches import Cached, bits, in_float64, one_by_one, touched
from .held import LARGEST, LARGEST_IN_FLOAT64, OTHERS, Wrong
from .layouts import memory, shown
from .strategies import DTYPES, rarely


class Cache(Cached):
    """A Cached call, shown as code."""

    __slots__ = ()
    __repr__ = shown


@st.composite
def calls(draw, name):
    """(a Cached, its seed)."""
    Hkv, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 5]))
    C = draw(st.sampled_from([8, 1, 5, 15, 16, 17, 33, 48, 49]))
    page = rarely(draw, st.sampled_from([1, 3, 4, 7, 16, 20]), None, 2)
    page = page if page is None or page <= C else None
    new = rarely(draw, st.sampled_from([1, 2, 3, 5, 0]), 0, 2)
    new = min(new, C)
    lengths = tuple(draw(st.lists(st.integers(0, C - new), min_size=1, max_size=3)))
    D = draw(st.sampled_from([2, 8, 16, 17, 3, 1, 32, 40, 64]))
    half = rarely(draw, st.integers(1, D // 2), 0) if D > 1 else 0
    Sq = draw(st.sampled_from([1, 2, 3, 5, 9, 17, 33, 0]))
    if Hkv * group * Sq > 60:
        Sq = 2
    half = half if max(lengths) + new else 0
    if half:
        Sq = min(Sq, min(lengths) + new)  # none stands before position 0
    made = dict(Hq=Hkv * group, Hkv=Hkv, Sq=Sq, C=C, D=D, Dv=draw(st.sampled_from([D, D, 1, 8, 24])), lengths=lengths)
    made |= dict(new=new, page=page, dtype=draw(st.sampled_from(DTYPES)), strided=draw(st.booleans()), half=half)
    made |= dict(causal=draw(st.booleans()), scale=rarely(draw, st.sampled_from([1.0, -0.4, 0.0, 100.0, 1e10])))
    side = st.one_of(st.none(), st.sampled_from([0, 1, 3, 9, 20, 100]))
    made |= dict(
        window=rarely(draw, st.tuples(side, side)), softcap=rarely(draw, st.sampled_from([1.5, 50.0, 1e-3, 1e30]))
    )
    made |= dict(alibi=rarely(draw, st.just(True), False))
    made |= {each: rarely(draw, st.just(True), False) for each in ("mask", "bias", "query_mask", "sinks")}
    made |= dict(key_mask=rarely(draw, st.sampled_from(["own", "shared"])), interleaved=draw(st.booleans()))
    made |= dict(align=draw(st.sampled_from(["bottom_right", "top_left"])))
    return Cache(name, **made), draw(st.integers(0, 99))


def _run(case, seed, backend, weights):
    """({result: tensor}, caches, arguments) of a call; what may not change, and did, is Wrong."""
    arguments = case.draw(seed=seed)
    caches = arguments["key_cache"], arguments["value_cache"]
    before = [bits(x) for x in caches]
    others = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and name[-5:] != "cache"}
    kept = {name: memory(x) for name, x in others.items()}
    results = fa.attention_decode(**arguments, return_lse=True, return_weights=weights, backend=backend)
    for x, was in zip(caches, before, strict=True):
        mark = touched(x, arguments)
        if not torch.equal(bits(x)[~mark], was[~mark]):
            raise Wrong(f"{backend}: a cache changed where nothing is new")
    if changed := [name for name, x in others.items() if not torch.equal(memory(x), kept[name])]:
        raise Wrong(f"{backend}: {changed} changed")
    return dict(zip(("out", "lse", "weights"), results, strict=False)), caches, arguments


def _truth(case, seed):
    """(eager, oracle, caches as they are to be, the largest score)."""
    arguments = case.draw(seed=seed)
    eager, caches = one_by_one(reference.eager, arguments)
    oracle, _ = one_by_one(reference.attention, in_float64(arguments))
    with torch.no_grad():
        query, key = (x.double().nan_to_num(0, 0, 0) for x in (arguments["query"], caches[0]))
    scale = abs(case.D**-0.5 if case.scale is None else case.scale)
    products = query.norm(dim=3).max().item() * key.norm(dim=3).max().item() if query.numel() and key.numel() else 0.0
    return eager, oracle, caches, products * scale


def _judged(found, truths):
    def stacked(name, of):
        return torch.stack([x[name] for x in of])

    eager, oracle = [x[0] for x in truths], [x[1] for x in truths]
    wrong = {}
    for name in found[0]:
        result = verdict(stacked(name, found), stacked(name, eager), stacked(name, oracle))
        if not result.ok:
            wrong[name] = result.why
    return wrong


def hold(call):
    case, seed = call
    truth = _truth(case, seed)
    weights = seed % 4 == 0
    for backend in ("triton", None):
        found, caches, arguments = _run(case, seed, backend, weights)
        wide = torch.promote_types(case.dtype, torch.float32)
        if found["out"].dtype != case.dtype or found["lse"].dtype != wide:
            raise Wrong(f"{backend}: out or lse is of another dtype")
        rounding = dict(atol=4 * torch.finfo(case.dtype).eps, rtol=4 * torch.finfo(case.dtype).eps, equal_nan=True)
        if any(not torch.allclose(x, y, **rounding) for x, y in zip(caches, truth[2], strict=True)):
            raise Wrong(f"{backend}: a cache does not hold what is new")
        if truth[3] > LARGEST or case.dtype == torch.float64 and truth[3] > LARGEST_IN_FLOAT64:
            if any(x.isnan().any() for x in found.values()) or not found["out"].isfinite().all():
                raise Wrong(f"{backend}: results are not finite")
            continue
        wrong = _judged([found], [truth])
        if wrong and all("error" in why for why in wrong.values()):
            seeds = [seed + 1000 * n for n in range(OTHERS + 1)]
            every = [_run(case, each, backend, weights)[0] for each in seeds]
            wrong = _judged(every, [_truth(case, each) for each in seeds])
        if wrong:
            raise Wrong(f"{backend}: {wrong}")
        if seed % 5 == 0 and not all(
            torch.equal(x, found[name]) for name, x in _run(case, seed, backend, weights)[0].items()
        ):
            raise Wrong(f"{backend}: other bits the second time")
