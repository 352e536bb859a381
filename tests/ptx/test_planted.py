"""Mistakes that are planted in the sources of kernels: their compiled code shows them.

No kernel has a barrier of its own: Triton places them, and the fence between the output's tile and the copy of it as
well, so that ours can be left out there. `test_mutants` leaves out what Triton has placed.
"""

import contextlib
import importlib
import pathlib
import pkgutil

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.kernels.vocabulary import copies
from triton.runtime.jit import JITFunction

from fusedattn import kernels
from fusedattn.launch import failures

from .. import sample
from . import calls
from .cases import ENTRIES
from .report import Fault

SPAN, TILES, SCORES = (f"vocabulary/{name}.py" for name in ("span", "tiles", "scores"))
RING, HOPPER, WAY_BACK = "hopper/ring.py", "hopper/forward.py", "hopper/backward.py"
PLAIN, LONG, ONE_ROW, MANY = "plain D64", "hopper long", "hopper one row", "hopper many blocks a program"
ADD = 'tl.atomic_add(pointers(of_rows(sums, plane), r, c), tile, mask=exists, sem="relaxed")'
LOAD_AND_STORE = """where = pointers(of_rows(sums, plane), r, c)
        tl.store(where, tl.load(where, mask=exists, other=0.0) + tile, mask=exists)"""
ADD_BOX = "sums.atomic_add(place, tile.reshape(sums.block_shape))"
LOAD_AND_STORE_BOX = "sums.store(place, sums.load(place) + tile.reshape(sums.block_shape))"
PLACE = "plane.head, first + plane.packed.row, 0]"
WIDE, NARROW = "tl.cast(plane.batch, tl.int64), tl.cast(plane.head, tl.int64)", "plane.batch, plane.head"
MULTIPLIED = """        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))
"""
K_RELEASED = """        ring.release(shared.k, step)
"""
STORED = """            store_wait(0)
"""
Q_RELEASED = """        if SHARE:
            ring.release(shared.q, n * GROUPS + g)
"""
Q_RELEASED_INSIDE = Q_RELEASED.replace("        ", "            ")
FENCED = """    fence_async_shared()
    shared, results"""

# Name, file, what stands there, what it becomes, call, capability. The same calls pass in the interpreter, and, of the
# kernel for Hopper, in `tests/kernels/gluon.py`: there programs run one after the other, tiles have 16 rows and rings
# two stages, dq is added by threads, and an mbarrier needs no fence.
UNSEEN = (
    ("additions that are no atomics", TILES, ADD, LOAD_AND_STORE, PLAIN, 80),
    ("additions of boxes that are no atomics", TILES, ADD_BOX, LOAD_AND_STORE_BOX, PLAIN, 90),
    (
        "dq in other rows",
        "dkdv.py",
        "rows, first, band.rows, dq",
        "rows, block * 16, band.rows, dq",
        PLAIN,
        90,
    ),
    ("dq in another sequence", TILES, f"[plane.batch * 0, {PLACE}", f"[plane.batch, {PLACE}", "packed causal", 90),
    ("other rows of q", HOPPER, "Q, plane, first + g * ROWS)", "Q, plane, first + g * 16)", "hopper D64", 90),
    ("a phase of two stages", RING, "step // TILES & 1 ^ 1", "step // 2 & 1 ^ 1", LONG, 90),
    ("the other half of dq", WAY_BACK, "slice(g * PART, PART", "slice((1 - g) * PART, PART", "hopper causal D128", 90),
    ("four tiles of ds for one", WAY_BACK, "step % 2 * GROUPS", "step % 1 * GROUPS", "hopper causal D128", 90),
    ("mbarriers that nobody fenced", HOPPER, FENCED, FENCED.split("\n")[1], ONE_ROW, 90),
)
if copies.LATER_UNFENCED.value:  # by a later Triton this is no mistake
    LATER = "vocabulary/attend.py", "copies.fence_later(BY_THREADS)", "pass"
    UNSEEN += (("values that nobody fenced", *LATER, "keys by threads", 90),)
# These are wrong there as well, in such a call: `//` of tensors truncates, and 32 bits wrap.
SEEN = (
    (
        *("a negative number divided", SPAN, "tl.maximum(first + b.low, 0) // BLOCK"),
        *("tl.maximum(first // BLOCK + b.low // BLOCK, 0)", "window", 80),
    ),
    ("a head times 32 bits", TILES, WIDE, NARROW, "heads far apart", 80),
    ("rows times 32 bits", TILES, "r.to(tl.int64) * m.strides[0]", "r * m.strides[0]", "rows far apart", 80),
    ("k given back before its product", HOPPER, MULTIPLIED + K_RELEASED, K_RELEASED + MULTIPLIED, LONG, 90),
    ("q given back before what lies there", HOPPER, STORED + Q_RELEASED, Q_RELEASED_INSIDE + STORED, MANY, 90),
    ("a wait for the first q", HOPPER, "wait(shared.q, n * GROUPS + g)", "wait(shared.q, g)", MANY, 90),
    (
        "a product too few waited for",
        HOPPER,
        "num_outstanding=1, deps=(s,)",
        "num_outstanding=2, deps=(s,)",
        ONE_ROW,
        90,
    ),
    ("another's reader forgotten", RING, "count=READERS", "count=1", LONG, 90),
    ("half of a block expected", RING, "desc.block_type.nbytes)", "desc.block_type.nbytes // 2)", ONE_ROW, 90),
)
# What a tangent may lack.
LACKING = (
    ("the mean", "tangent.py", "t_lse[:, None] * out.to(wide)", "0.0 * out.to(wide)"),
    ("the derivative of the cap", SCORES, "apply_dcap(score, dcap, grad(score, t_x))", "grad(score, t_x)"),
    ("the tangent of the bias", SCORES, " + tiles.cast(t_bias, t_x.dtype)", ""),
    ("that of lse", "tangent.py", "rows, q_len, 0, t_lse)", "rows, q_len, 0, t_lse * 0.0)"),
)


def functions():
    """What is compiled: each function of the package of kernels that Triton knows, once."""
    found = {}
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, JITFunction):
                found[value.__module__, value.__name__] = value
    return list(found.values())


@contextlib.contextmanager
def planted(file, text, becomes):
    """A file of the kernels has another text where it has this one. `calls` keeps no compiled kernel from before."""
    module = ".".join((kernels.__name__, *pathlib.PurePath(file).with_suffix("").parts))
    (owner,) = (each for each in functions() if each.__module__ == module and text in each.src)
    original, hashes = owner.src, {each.fn: each.hash for each in functions()}  # which know what each calls
    owner._unsafe_update_src(original.replace(text, becomes))
    for each in functions():
        each.hash = None
    try:
        yield
    finally:
        owner._unsafe_update_src(original)
        for each in functions():
            each.hash = hashes[each.fn]
        failures.forget()


def pytest_generate_tests(metafunc):
    """What the interpreter sees as well is planted with --everything, but for tangents."""
    if "becomes" in metafunc.fixturenames:
        some = UNSEEN + tuple((f"a tangent without {name}", *row, "tangent everything", 80) for name, *row in LACKING)
        some += SEEN if metafunc.config.getoption("--everything", False) else ()
        first, *rest = (pytest.param(*row[1:], id=row[0].replace(" ", "_")) for row in some)
        metafunc.parametrize("file, text, becomes, name, capability", sample.planted([first, *sample.matrix(*rest)]))


def test_a_planted_mistake_is_seen(file, text, becomes, name, capability):
    assert (pathlib.Path(kernels.__path__[0]) / file).read_text(encoding="utf-8").count(text) == 1
    with planted(file, text, becomes):
        try:
            assert calls.execute(ENTRIES[name], capability).wrong()
        except Fault:
            pass


def test_what_was_planted_is_gone():
    before = {each.fn: each.cache_key for each in functions()}
    with planted(TILES, ADD, LOAD_AND_STORE):
        changed = [each.fn for each in functions() if each.cache_key != before[each.fn]]
    assert {"add", "_walk_rows", "dkdv"} <= {each.__name__ for each in changed}
    assert all(each.cache_key == before[each.fn] for each in functions())
