"""The kernel for Hopper: on such a GPU, and elsewhere as `gluon` has it; when it is taken, and why it is not."""

import importlib.util
import itertools
import sys
import types

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import triton
import triton.language as tl
from fusedattn.bench import cases as timed
from fusedattn.kernels.hopper import schedule
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedattn as fa
from fusedattn import backends
from fusedattn.cli import tune
from fusedattn.launch import hopper, run, tiles, tuned
from fusedattn.launch.tiles import Backward, Pipeline
from fusedattn.replay import cache
from fusedattn.testing.compare import with_gradients

from .. import cases, sample
from ..cases import Case
from ..close import assert_close, assert_like
from ..inside import by, draw, same

if hopper.missing is not None:
    pytest.skip(hopper.missing, allow_module_level=True)

from fusedattn.kernels.hopper import backward, forward as written, halves, ring, steps, stored, turns

from . import gluon

SMALL, WAY_BACK = Pipeline(2, 16, 2), Backward(16, 2)
PIPELINES = (
    Pipeline(2, 16, 2, persistent=False),
    Pipeline(2, 32, 3, ping_pong=True),
    Pipeline(3, 16, 2),
    Pipeline(3, 32, 4, persistent=False),
)


def emulate(monkeypatch, module=written, taken=SMALL, way_back=WAY_BACK, multiprocessors=3, **other):
    """Calls of backend="hopper" on CPU tensors run the kernels in tiny blocks.

    A backward that the kernel does not take is interpreted.

    Args:
        module: of the forward.
        way_back: of a backward; with heads of up to 64 it has twice the rows.
        other: {name: module} to take for one of those of the backwards.
    """
    way, steps_of, halves_of, stored_of = (
        other.get(x.__name__.split(".")[-1], x) for x in (backward, steps, halves, stored)
    )
    adds = way.backward, ring, steps_of, turns, halves_of, way
    stores = ring, steps_of, stored_of
    kernels = dict(
        hopper=(module.forward, ring, module),
        hopper_bwd=adds,
        hopper_ordered=adds,
        hopper_stored=(stored_of.stored_backward, *stores),
        hopper_dk=(stored_of.grad_product, *stores),
        hopper_dq=(stored_of.grad_product, *stores),
    )
    for name, (kernel, *modules) in kernels.items():
        monkeypatch.setitem(run.KERNELS, name, gluon.Emulator(kernel, *modules))
    monkeypatch.setattr(run, "multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(backends, "hopper_reasons", lambda device: ())
    monkeypatch.setattr(tiles, "WARPGROUP_ROWS", 16)
    ways = dict.fromkeys(tiles.BACKWARDS, way_back)
    of_small = {
        name: {width: ((ways | dict(hopper=taken))[name],) for width in rows} for name, rows in tiles.ON_HOPPER.items()
    }
    for name in ("hopper_bwd", "hopper_ordered"):
        of_small[name][64] = (ways[name]._replace(rows=2 * way_back.rows),)
    monkeypatch.setattr(tiles, "ON_HOPPER", of_small)
    monkeypatch.setattr(cache, "RECORD_AFTER", sys.maxsize)  # what is repeated is compiled


def launches(monkeypatch):
    """A list that gets the names of kernels as they are launched."""
    names, run_kernel = [], run.run_kernel
    monkeypatch.setattr(run, "run_kernel", lambda name, *x, **y: (names.append(name), run_kernel(name, *x, **y)))
    return names


@pytest.fixture
def on(device, monkeypatch):
    """A device on which the kernel runs."""
    if device == "cpu":
        emulate(monkeypatch)
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return device


def halved(case):
    return case if case.dtype in (torch.float16, torch.bfloat16) else case._replace(dtype=torch.bfloat16)


def takes(case):
    tensors, options = case.draw()
    given = [tensors[name] for name in ("query", "key", "value")]
    return not hopper.reasons(fa.call.rules.checked(fa.call.form.Arguments(*given, **options)))


MORE = [
    Case("many blocks", B=2, Hq=4, Hkv=2, Sq=70, Sk=90),
    Case("many blocks, causal", B=2, Hkv=1, Sq=130, Sk=150, causal=True, grads="out, lse and weights"),
    Case("more queries than keys", Sq=90, Sk=41, causal=True),
    Case("more queries than keys, from the top", Sq=90, Sk=41, causal=True, align="top_left"),
    Case("a window", Hkv=1, Sq=100, Sk=120, window=(20, 5)),
    Case("a window to the left", Sq=100, Sk=120, window=(3, None)),
    Case("one query", Sq=1, Sk=77),
    Case("one key", Sq=40, Sk=1),
    Case("wider values", Sq=40, Sk=50, D=24, Dv=48),
    Case("wider queries", Sq=40, Sk=50, D=64, Dv=8),
]
# Each once: a case that named cases have in several dtypes is one in bfloat16.
CASES = {case._replace(name=""): case for case in map(halved, cases.SINGLE + cases.SHAPES + MORE) if takes(case)}


def check(case, device):
    tensors, options = case.draw(device)
    got = with_gradients(fa.attention, tensors, options, case.grads, backend="hopper")
    assert_close(got, tensors, options, case.grads)


@pytest.mark.parametrize("case", sample.one_in(2, sample.named(CASES.values())))
def test_a_case_that_it_takes(case, on, poison):
    check(case, on)


@pytest.mark.parametrize("taken", PIPELINES, ids=str)
@pytest.mark.parametrize("window", [None, (None, 0), (20, 5)], ids=str)
def test_each_way_to_work(window, taken, device, monkeypatch, poison):
    if device == "cuda":
        pytest.skip("test_gpu has those that are compiled")
    query, key, value = draw("cpu", sq=130, sk=70, dtype=torch.float16)
    for multiprocessors in (1, 5):
        emulate(monkeypatch, taken=taken, multiprocessors=multiprocessors)
        attend = lambda name: by(name)(query, key, value, window=window, return_lse=True)  # noqa: E731
        assert_like(attend("hopper"), attend, "eager")


@pytest.mark.parametrize("kernel", tiles.ON_HOPPER)
def test_tune_takes_it_alone(kernel, monkeypatch):
    emulate(monkeypatch)
    monkeypatch.setattr(tune, "milliseconds", lambda *_: 1.0)
    monkeypatch.setattr(tune, "REPEATS", 2)
    width = max(tiles.ON_HOPPER[kernel])
    monkeypatch.setattr(tiles, "candidates", lambda name, *_: tiles.ON_HOPPER.get(name, {}).get(width, ()))
    row = tuned.Row(kernel, "bfloat16", width, "plain", *tiles.ON_HOPPER[kernel][width])
    case = timed.Case(1, 1, 1, 40, 40, width, width, False, "bfloat16")
    with tune.taking(row, (), None):
        assert tune.measured(row, case, "cpu") == row._replace(ms={case.name: 1.0})
        monkeypatch.setattr(torch, "equal", lambda *_: False)
        assert ("same bits" in tune.measured(row, case, "cpu").why) == (kernel in tiles.REPEATABLE)


def test_it_compiles_whole(on):
    """What lies where the copy engine cannot read it is then copied."""
    inputs = draw(on, dtype=torch.float16)
    odd = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in inputs]
    compiled = torch.compile(
        lambda *inputs: fa.attention(*inputs, causal=True, return_lse=True, backend="hopper"),
        fullgraph=True,
        backend="eager",
    )
    want = fa.attention(*inputs, causal=True, return_lse=True, backend="hopper")
    assert all(x.data_ptr() % 16 for x in odd)
    same(compiled(*inputs), want)
    same(compiled(*odd), want)


def test_it_is_transformed(on):
    """vmap, torch.func.grad and fake tensors ask for reasons where there are no addresses."""
    inputs = draw(on, dtype=torch.bfloat16)
    want = fa.attention(*inputs, backend="hopper")
    many = [torch.stack([x, 2 * x], dim) for x, dim in zip(inputs, (0, 1, 3), strict=True)]
    got = torch.vmap(lambda *x: fa.attention(*x, backend="hopper"), in_dims=(0, 1, 3))(*many)
    assert_like(list(got), lambda: [by("eager")(*inputs), by("eager")(*[2 * x for x in inputs])])

    def grads(name, *inputs):
        return torch.func.grad(lambda *x: by(name)(*x).float().sin().sum(), (0, 1, 2))(*inputs)

    assert_like(grads("hopper", *inputs), grads, "eager", *inputs)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        assert fa.explain(*fakes, backend="hopper").backend == "hopper"
        assert fa.attention(*fakes, backend="hopper").shape == want.shape


def test_what_the_copy_engine_cannot_read_is_copied(on):
    """Through the operator, which gets what the compiler and functorch pass on."""
    wide = torch.randn(2, 2, 40, 16, device=on, dtype=torch.bfloat16)
    odd = torch.randn(1 + 2 * 2 * 40 * 12, device=on, dtype=torch.bfloat16)[1:].view(2, 2, 40, 12)
    for query in (wide[..., :12], wide[..., ::2], odd, wide.mT.contiguous().mT, wide[:1].expand(2, -1, -1, -1)):
        dim = query.shape[3]
        key, value = (torch.randn(2, 2, 33, size, device=on, dtype=torch.bfloat16) for size in (dim, 24))
        call = fa.call.rules.checked(fa.call.form.Arguments(query, key, value))
        got = fa.operators.attention.run_on_hopper(call, False, False)[0]
        assert_like(got, fa.reference.eager, query, key, value)


@triton.jit
def _deal(taken, lengths, blocks, planes, section, paired, before):
    order = schedule.Schedule(blocks, planes, section, paired)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for n in range(schedule.share(order, program, programs)):
        first, plane = schedule.take(order, n, program, programs, 2, BLOCK=10, first_plane=before)
        tl.atomic_add(taken + plane.index * blocks + first // 10, 1)
        tl.atomic_add(lengths + program * planes * blocks + (n >> paired), first // 10 + 1)


@pytest.mark.parametrize("paired", [0, 1])
def test_each_block_of_rows_is_taken_once(paired, device):
    for blocks, planes, section, programs in itertools.product((1, 4, 5), (1, 2, 6, 7), (1, 3, 7), (1, 4, 35, 50)):
        if paired and planes % 2:
            continue
        taken, before = torch.zeros(9 + planes, blocks, dtype=torch.int32, device=device), programs % 3
        lengths = torch.zeros(programs, planes * blocks, dtype=torch.int32, device=device)
        _deal[(programs,)](taken, lengths, blocks, planes, min(section, planes), paired, before)
        assert taken[before : before + planes].eq(1).all(), (blocks, planes, section, programs)
        assert taken.sum() == planes * blocks
        if paired:
            assert lengths[lengths > 0].eq(blocks + 1).all(), "pairs are equally long"
        else:
            assert lengths.count_nonzero(1).diff().abs().le(1).all(), "programs have nearly as many blocks each"


# What a slip in the kernel would do to a GPU: each is a line that becomes another.
SLIPS = {
    "k is given back while it is read": (
        "        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))\n        ring.release(shared.k, step)\n",
        "        ring.release(shared.k, step)\n        s = warpgroup_mma_wait(num_outstanding=0, deps=(s,))\n",
        "changed while it was read",
    ),
    "v is never given back": ("            ring.release(shared.v, step - 1)\n", "", "wait for each other"),
    "v is given back while it is read": (
        "            out, p = warpgroup_mma_wait(num_outstanding=0, deps=(next_out, p))  # which reads p where it is\n"
        "            ring.release(shared.v, step - 1)\n",
        "            ring.release(shared.v, step - 1)\n"
        "            out, p = warpgroup_mma_wait(num_outstanding=0, deps=(next_out, p))\n",
        "changed while it was read",
    ),
    "p is given up while it is read": ("deps=(next_out, p))", "deps=(next_out, s))", "registers given up too soon"),
    "the output is not fenced": (
        "            fence_async_shared()\n            async_store",
        "            async_store",
        "before a fence",
    ),
    "q is given back before the output left": (
        "        store_wait(0)  # of the output of the block before, under the product\n",
        "",
        "changed while it was stored|wait for each other",
    ),
    "the other warpgroup is never let in": ("ping_pong.index(1 - g)", "ping_pong.index(g)", "wait for each other"),
    "the diagonal takes no mask": ("(block >= full_end)", "(block > full_end)", None),
    "a tile is used before it is there": (
        "        ring.wait(shared.q, n * GROUPS + g)\n",
        "",
        "changed while it was read",
    ),
}


def slipped(written, before, after, folder):
    """A module of the kernel's package, of the same name, in which a line has become another."""
    text = open(written.__file__).read()
    assert text.count(before) == 1
    path = folder / "slip.py"
    path.write_text(text.replace(before, after))
    specification = importlib.util.spec_from_file_location(written.__name__, path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def slipped_in(modules, before, after, folder):
    """{name: module}: the one of these modules that has a line, in which it has become another."""
    (module,) = (x for x in modules if before in open(x.__file__).read())
    return {module.__name__.split(".")[-1]: slipped(module, before, after, folder)}


@pytest.mark.parametrize("slip", sample.planted(map(pytest.param, SLIPS)))
def test_a_slip_is_found(slip, tmp_path, monkeypatch):
    """By what stands in for a GPU here; where it does not say so, by a result that is wrong."""
    before, after, said = SLIPS[slip]
    emulate(monkeypatch, slipped(written, before, after, tmp_path), taken=SMALL._replace(ping_pong=True))
    with pytest.raises(Exception, match=said or "'out':|wait for each other"):
        for window in ((60, 0), None):  # a program has four blocks of rows
            check(Case("slip", Hq=4, Sq=90, Sk=100, dtype=torch.bfloat16, window=window), "cpu")


NEW, OLD = ("async_load", "async_store"), ("async_copy_global_to_shared", "async_copy_shared_to_global")


@pytest.mark.parametrize("there, taken", [(NEW, NEW), (OLD, OLD), (NEW + OLD, NEW), (NEW[:1] + OLD, None), ((), None)])
def test_copies_have_the_names_of_each_version_of_triton(there, taken, monkeypatch):
    """3.9 keeps the older ones, which raise. Where one is missing there is no kernel, and that is said."""
    copies = importlib.import_module("fusedattn.kernels.hopper.copies")
    language = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    monkeypatch.setattr(language, "tma", types.SimpleNamespace(**{name: name for name in there}))
    spec = importlib.util.spec_from_file_location("copies_of_another_version", copies.__file__)
    module = importlib.util.module_from_spec(spec)
    if taken is None:
        with pytest.raises(AttributeError):
            spec.loader.exec_module(module)
    else:
        spec.loader.exec_module(module)
        assert (module.async_load, module.async_store) == taken
