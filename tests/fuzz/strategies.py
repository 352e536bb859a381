"""Hypothesis strategies for random calls of each route. The first element of a list is the simplest."""

import torch
from hypothesis import strategies as st

from .dense import Dense, Pairs, Tokens
from .layouts import PLAIN, Layout
from .routes import ROUTES

BLOCKS = 6  # maximum number of blocks of 32 rows by 16 keys in a call: more take too long
LENGTHS = (1, 2, 3, 4, 5, 7, 9, 15, 16, 17, 18, 31, 32, 33, 40, 48, 49, 64, 65, 70, 0)
WIDTHS = (1, 2, 3, 4, 5, 8, 8, 8, 12, 15, 16, 16, 16, 16, 17, 20, 24, 31, 32, 33, 40)
WIDE = (63, 64, 65, 80, 127, 128, 129, 192, 255, 256, 257, 320, 511, 512)
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)
SEEDS = st.one_of(st.integers(0, 9), st.integers(-(2**63), 2**63 - 1))


def rarely(draw, strategy, otherwise=None, one_in=4):
    """Draw from a strategy one time in `one_in`, otherwise return `otherwise`."""
    return draw(strategy) if draw(st.integers(0, one_in - 1)) == one_in - 1 else otherwise


@st.composite
def layouts(draw, expands=True):
    if draw(st.booleans()):
        return PLAIN
    layout = Layout(draw(st.integers(0, 23)), *draw(st.sampled_from([(1, 0, 0), (1, 5, 3), (2, 0, 1), (3, 1, 7)])))
    if not expands:
        return layout
    expanded = rarely(draw, st.sampled_from([(0,), (1,), (2,), (3,), (0, 1), (0, 1, 2, 3)]), ())
    if not expanded and rarely(draw, st.just(True), False, 12):
        return Layout(0, 1, 0, draw(st.integers(0, 3)), (), True)
    return layout._replace(expanded=expanded)


@st.composite
def pairs(draw, bias, rank):
    axes = draw(st.sampled_from(["ij", "bhij", "bij", "hij", "i", "j", "bi", "hj", "h", "b", "bh", ""]))
    keep = draw(st.sampled_from([0.7, 1.0, 0.5, 0.95, 0.1, 0.0]))
    made = Pairs(axes, keep, hides=draw(st.sampled_from(["", "", "rows", "keys", "block", "rows and keys"])))
    if rank == 2 or not set(axes) & set("bh"):
        made = made._replace(rank2=draw(st.booleans()), axes=axes)
        if made.rank2:
            made = made._replace(axes="".join(x for x in axes if x in "ij"))
    if bias:
        dtype = rarely(draw, st.sampled_from(DTYPES[1:]))
        made = made._replace(dtype=dtype, lowest=rarely(draw, st.just(True), False, 8))
        made = made._replace(size=draw(st.sampled_from([1.0, 1.0, 1.0, 0.0, 20.0, 1000.0])))
    return made._replace(layout=rarely(draw, layouts(expands=not bias), PLAIN))


@st.composite
def tokens(draw):
    kind, keep = draw(st.sampled_from(["own", "shared", "rank 1"])), draw(st.sampled_from([0.7, 1.0, 0.3, 0.0]))
    return Tokens(kind, keep, rarely(draw, layouts(), PLAIN))


@st.composite
def sizes(draw, route):
    length = st.sampled_from(LENGTHS)
    Hkv, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 4]))
    if route.heads is not None:
        Hkv = group = 1
    if route.packed:
        rows = draw(st.lists(length, min_size=1, max_size=3))
        keys = draw(st.lists(length, min_size=len(rows), max_size=len(rows)))
        while len(rows) > 1 and sum((-(-n // 32)) * (-(-m // 16)) for n, m in zip(rows, keys, strict=True)) > BLOCKS:
            rows.pop(), keys.pop()
        lengths, B, Sq, Sk = (tuple(rows), tuple(keys)), len(rows), max(rows), max(keys)
    else:
        lengths, B, Sq, Sk = None, route.batches or draw(st.sampled_from([1, 1, 2, 3, 0])), draw(length), draw(length)
    blocks = max(-(-Sq // 32) * -(-Sk // 16), 1)
    if lengths is None and blocks * B * Hkv * group > BLOCKS:
        B = 1
    if blocks * B * Hkv * group > BLOCKS:
        Hkv, group = draw(st.sampled_from([(1, 1), (1, 2), (2, 1)])) if route.heads is None else (1, 1)
    D = draw(st.sampled_from(WIDTHS if draw(st.integers(0, 19)) < 19 else WIDE))
    Dv = draw(st.sampled_from([D, D, *WIDTHS]))
    return dict(B=B, Hkv=Hkv, group=group, Sq=Sq, Sk=Sk, D=D, Dv=Dv, lengths=lengths)


@st.composite
def options(draw, takes, route):
    made = {}
    if "causal" in takes:
        made["causal"] = draw(st.booleans())
    if "window" in takes:
        side = st.one_of(st.none(), st.sampled_from([0, 1, 3, 9, 16, 31, 40, 100]))
        made["window"] = rarely(draw, st.tuples(side, side))
    if "align" in takes:
        made["align"] = draw(st.sampled_from(["bottom_right", "bottom_right", "top_left"]))
    if route is ROUTES["sdpa"]:
        made["align"] = "top_left"
    if "scale" in takes:
        scales = st.sampled_from([1.0, 0.3, -0.4, 0.0, 1e-4, 5.0, -30.0, 1000.0, 1e-30, 1e20])
        made["scale"] = rarely(draw, scales, None, 3)
    if "softcap" in takes:
        made["softcap"] = rarely(draw, st.sampled_from([2.0, 20.0, 0.3, 1e-3, 1e-30]))
    if "slopes" in takes:
        made["slopes"] = rarely(draw, st.sampled_from([0.2, 1.0, 0.0, 30.0]))
        if made["slopes"] is not None:
            made["own_slopes"] = draw(st.booleans())
            made["slopes_dtype"] = draw(st.sampled_from(DTYPES))
    if "sinks" in takes:
        made["sinks"] = rarely(draw, st.sampled_from(["normal", "some", "none", "large"]))
        made["sinks_dtype"] = rarely(draw, st.sampled_from(DTYPES)) if made["sinks"] else None
    rank = route.batches and 2 or 4
    for name in ("mask", "bias"):
        if name in takes:
            made[name] = rarely(draw, pairs(name == "bias", rank))
    for name in ("key_mask", "query_mask"):
        if name in takes:
            made[name] = rarely(draw, tokens())
    if "planned" in takes:
        made["planned"] = rarely(draw, st.just(True), False)
    if "dropout" in takes:
        made["dropout"] = rarely(draw, st.sampled_from([0.3, 0.17, 0.9, 1.0, 1e-9]), 0.0)
        if made["dropout"]:
            made |= dict(seed=draw(SEEDS), seed_is_tensor=draw(st.booleans()))
    return made


def some(draw, names, one_in=2):
    return tuple(name for name in names if draw(st.integers(0, one_in - 1)) == 0)


@st.composite
def calls(draw, name):
    route = ROUTES[name]
    made = dict(route=name, dtype=draw(st.sampled_from(DTYPES)), values=draw(st.integers(0, 99)))
    made |= draw(sizes(route)) | draw(options(route.options, route))
    made["spread"] = draw(st.sampled_from([1.0, 1.0, 1.0, 3.0, 0.01, 10.0, 0.0, 100.0]))
    # In half precision, larger values may exceed the tolerance in the gradients of query and key.
    made["alike"] = draw(st.sampled_from([0.0, 0.0, 0.0, 1.0, 4.0, 30.0 if made["dtype"].itemsize > 2 else 2.0]))
    if made["dtype"].itemsize == 2 and made["spread"] < 1.0:
        made["alike"] = 0.0  # gradients would be smaller than their rounding
    for each in ("query", "key", "value", "out"):
        made[each] = draw(layouts())
    if name == "sdpa":
        for pairs_name in ("mask", "bias"):
            if made.get(pairs_name):
                made |= dict(causal=False, mask=None, bias=None) | {pairs_name: made[pairs_name]}
        if made.get("bias"):
            made["bias"] = made["bias"]._replace(dtype=draw(st.sampled_from([None, torch.float32])))
    made["lse"] = "lse" in route.results and draw(st.booleans())
    made["weights"] = "weights" in route.results and rarely(draw, st.just(True), False)
    made["lse"] = made["lse"] or made["weights"] and route.packed  # tests/sequences.py returns both or none
    there, learned = ["query", "key", "value"], dict(bias="bias", alibi_slopes="slopes", sinks="sinks")
    there += [name for name, of in learned.items() if made.get(of) is not None]
    made["wanted"] = tuple(there) if draw(st.booleans()) else some(draw, there)
    results = ["out"] + [x for x in ("lse", "weights") if made[x]]
    made["loss"] = tuple(results) if draw(st.booleans()) else some(draw, results)
    made["backend"] = rarely(draw, st.sampled_from(["cpu", "naive"]), None, 8)
    made["by_keyword"], made["again"] = draw(st.booleans()), rarely(draw, st.just(True), False, 5)
    return Dense(**made)
