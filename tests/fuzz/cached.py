"""Random calls with caches, compared with a loop over the sequences."""

import torch
from hypothesis import strategies as st

from fusedattn.testing.tolerance import verdict

from .. import caches
from ..caches import Cached
from .held import hold_draws
from .strategies import DTYPES, rarely


@st.composite
def calls(draw, name):
    """Draw a random call with caches: (Cached, seed of its values)."""
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
        Sq = min(Sq, min(lengths) + new)  # no row before position 0
    made = dict(Hq=Hkv * group, Hkv=Hkv, Sq=Sq, C=C, D=D, Dv=draw(st.sampled_from([D, D, 1, 8, 24])), lengths=lengths)
    made |= dict(new=new, page=page, dtype=draw(st.sampled_from(DTYPES)), strided=draw(st.booleans()), half=half)
    made |= dict(causal=draw(st.booleans()), scale=rarely(draw, st.sampled_from([1.0, -0.4, 0.0])))
    side = st.one_of(st.none(), st.sampled_from([0, 1, 3, 9, 20, 100]))
    caps = st.sampled_from([1.5, 50.0, 1e-3, 1e30])
    made |= dict(window=rarely(draw, st.tuples(side, side)), softcap=rarely(draw, caps))
    made |= dict(alibi=rarely(draw, st.just(True), False))
    made |= {each: rarely(draw, st.just(True), False) for each in ("mask", "bias", "query_mask", "sinks")}
    made |= dict(key_mask=rarely(draw, st.sampled_from(["own", "shared"])), interleaved=draw(st.booleans()))
    made |= dict(align=draw(st.sampled_from(["bottom_right", "top_left"])))
    return Cached(name, **made), draw(st.integers(0, 99))


def hold(call):
    """Raise AssertionError if results or caches differ from those of a loop over the sequences."""
    case, seed = call
    hold_draws(lambda backend, n: caches.computed(case.draw(seed=seed + 1000 * n), backend, n % 4 == 0), _judged)


def _judged(draws):
    found, *truths = zip(*draws, strict=True)
    results = {name: [torch.stack([x[name] for x in each]) for each in (found, *truths)] for name in found[0]}
    return {name: result.why for name, each in results.items() if not (result := verdict(*each)).ok}
