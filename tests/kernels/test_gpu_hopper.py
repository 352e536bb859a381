"""Tests of Hopper's kernels on a GPU: each pipeline, races, TMA descriptors, graphs, streams.

gpu.sh runs them in a process of their own, because a kernel with wrong barriers never ends.
"""

import functools

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.bench import cases as timed

import fusedattn as fa
from fusedattn.launch.tile_table import BACKWARDS, HOPPER, IN_PARTS, REPEATABLE, width_on_hopper
from fusedattn.testing.compare import INPUTS

from .. import cases, sample
from ..cases import Case
from ..close import assert_case
from .test_gpu import HALF, LENGTHS, of_lengths, reaches_far, replays_on_new_values

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
DIMS = ((8, 8), (16, 16), (24, 48), (40, 32), (64, 64), (72, 64), (80, 80), (96, 128), (128, 64), (64, 128))
DIMS = (*DIMS, (128, 128), (136, 160), (192, 128), (64, 256), (256, 8), (200, 256), (256, 256))
DIMS = (*DIMS, (320, 320), (512, 512), (512, 64), (64, 512))
PIPELINES = [(width, taken) for width, some in HOPPER.items() for taken in some]
VALUES = {width: 128 if width == IN_PARTS else width for width in HOPPER}  # columns of values for those of keys


@pytest.fixture
def cuda(cuda):
    """Return the device "cuda"; skip the test unless it is a GPU of compute capability 9.0."""
    if (found := torch.cuda.get_device_capability()) != (9, 0):
        pytest.skip(f"needs compute capability 9.0, not {found[0]}.{found[1]}")
    return cuda


@pytest.fixture
def take(tiles):
    """Return a function that makes later calls use a given pipeline."""
    return lambda taken: tiles("ON_HOPPER", tiles.table.ON_HOPPER | {"hopper": dict.fromkeys(HOPPER, (taken,))})


def attend(*inputs, **options):
    return fa.attention(*inputs, backend="hopper", **options)


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(100, 0))], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_call_that_names_no_backend_takes_it(dim, options, cuda):
    inputs = [torch.randn(2, 4, 333, dim, device=cuda, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    found = fa.explain(*inputs, **options)
    assert found.backend == "hopper" and not found.backward
    assert found.tiles == fa.explain(*(x.cpu() for x in inputs), capability=(9, 0), **options).tiles
    plain, named = (fa.attention(*inputs, **options, backend=backend) for backend in (None, "hopper"))
    assert torch.equal(plain, named)
    grads = [torch.autograd.grad(out, inputs, torch.ones_like(out)) for out in (plain, named)]
    assert all(map(torch.equal, *grads))


check = functools.partial(assert_case, function=attend)


@pytest.mark.parametrize("case", sample.one_in(2, sample.named(cases.SINGLE[1::2] + cases.SHAPES)))
def test_a_named_case(case, cuda, poison):
    case = case if case.dtype in HALF else case._replace(dtype=torch.bfloat16)
    tensors, options = case.draw(cuda)
    if fa.explain(*(tensors[name] for name in INPUTS), **options, backend="hopper").backend is None:
        pytest.skip("its kernels do not take this call")
    check(case, cuda)


def inputs_of(device, batch=2, heads=4, kv_heads=2, rows=300, keys=421, dim=64):
    shapes = (heads, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, VALUES.get(dim, dim))
    return [torch.randn(batch, *shape, device=device, dtype=torch.bfloat16) for shape in shapes]


@pytest.mark.parametrize("width, taken", PIPELINES, ids=str)
@pytest.mark.parametrize("band", [{}, dict(causal=True), dict(window=(128, 33))], ids=["full", "causal", "window"])
def test_every_pipeline_at_a_ragged_shape(band, width, taken, take, cuda, tiles, poison):
    """Each pipeline is right with more blocks of rows than multiprocessors, and with one or seven programs."""
    take(taken)
    sizes = dict(B=30, Hq=4, Hkv=2, Sq=300, Sk=421, D=width, Dv=VALUES[width])
    check(Case("pipelines", **sizes, dtype=HALF[len(band)], **band), cuda)
    for count in (1, 7):
        tiles.multiprocessors(count)
        check(Case("pipelines", **sizes | dict(B=2), dtype=HALF[len(band)], **band), cuda)


@pytest.mark.parametrize("width, taken", PIPELINES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_every_pipeline_gives_the_same_bits(causal, width, taken, take, cuda):
    """Each pipeline gives equal bits in 200 runs; they would differ if p were overwritten while it is multiplied."""
    take(taken)
    heads = timed.WIDTH // width
    inputs = inputs_of(cuda, 8, heads, heads, 1000, 1111, width)
    first = attend(*inputs, causal=causal)
    wrong = torch.zeros((), dtype=torch.long, device=cuda)
    for _ in range(200):
        wrong += (attend(*inputs, causal=causal) != first).count_nonzero()
    assert wrong.item() == 0
    torch.testing.assert_close(first, fa.attention(*inputs, causal=causal, backend="triton"), rtol=2e-2, atol=1e-2)


def backward(inputs, given, backend="hopper", **options):
    """Return the gradients of query, key and value for the output gradient `given`."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(fa.attention(*leaves, backend=backend, **options), leaves, given)


@pytest.fixture
def names(launched, record_after):
    """Return a function that returns the names of the launched kernels, with replays switched off."""
    record_after(None)
    return lambda: {name for name, _ in launched}


@pytest.mark.parametrize("width", HOPPER)
@pytest.mark.parametrize("band", [{}, dict(causal=True), dict(window=(128, 33))], ids=["full", "causal", "window"])
def test_each_backward_at_a_ragged_shape(band, width, cuda, tiles, passes, poison, names):
    """The deterministic backward and the other backward are right, with more programs than run at once.

    Wide heads store the ds of a few heads at a time, and each of seven programs computes several blocks of a product.
    """
    tiles("SECTION_BYTES", 2 << 20)
    tiles("SCORES_BYTES", 8 << 20)  # enough memory for a few heads
    tiles.multiprocessors(7)
    case = Case("backward", B=30, Hq=4, Hkv=2, Sq=300, Sk=421, D=width, Dv=VALUES[width], **band)
    case = case._replace(dtype=HALF[len(band)], grads="out and lse")
    check(case, cuda)
    assert {name for name in REPEATABLE if width in BACKWARDS[name]} <= names()
    passes(1)
    check(case, cuda)
    assert {name for name in BACKWARDS if width in BACKWARDS[name]} - {"hopper_bwd_deterministic"} <= names()


@pytest.mark.parametrize("number", range(len(DIMS)), ids=lambda n: "D {} Dv {}".format(*DIMS[n]))
@pytest.mark.parametrize(
    "options", [dict(causal=True, align="top_left"), dict(window=(40, 9))], ids=["causal", "window"]
)
def test_backwards_of_head_dimensions(options, number, cuda, passes, poison, names):
    dims = dict(zip(("D", "Dv"), DIMS[number], strict=True))
    case = Case("dims", B=2, Hq=4, Hkv=2, Sq=190, Sk=331, dtype=HALF[number % 2], **options, **dims)
    passes(1)
    check(case, cuda)
    width = width_on_hopper(*DIMS[number])
    assert {name for name in BACKWARDS if width in BACKWARDS[name]} - {"hopper_bwd_deterministic"} <= names()


OPTIONS = {
    "dropout": dict(dropout=0.17, window=(128, 33)),
    "bias": dict(bias="heads", causal=True),
    "float32 bias, dropout": dict(bias="pairs", bias_dtype=torch.float32, dropout=0.17),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("width", [64, 128])
def test_backwards_with_dropout_and_bias(width, name, cuda, passes, poison, names):
    case = Case(name, B=30, Hq=4, Hkv=2, Sq=300, Sk=424, D=width, Dv=width, dtype=torch.bfloat16, **OPTIONS[name])
    for number, kernel in ((2, "hopper_bwd_deterministic"), (1, "hopper_bwd")):
        passes(number)
        check(case, cuda)
        assert kernel in names()


@pytest.mark.parametrize("width", HOPPER)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_backward_gives_the_same_bits(causal, width, cuda, tiles, names):
    """Repeated backwards give equal bits; wide heads need several rounds, because SCORES_BYTES is small."""
    tiles("SCORES_BYTES", 12 << 20)
    heads = timed.WIDTH // width
    inputs = inputs_of(cuda, 4, heads, heads, 1000, 1111, width)
    given = torch.randn_like(inputs[0][..., : VALUES[width]])
    first, wrong = backward(inputs, given, causal=causal), torch.zeros((), dtype=torch.long, device=cuda)
    for _ in range(100):
        for again, before in zip(backward(inputs, given, causal=causal), first, strict=True):
            wrong += (again != before).count_nonzero()
    assert wrong.item() == 0 and {*REPEATABLE} & names()
    for one, other in zip(first, backward(inputs, given, "triton", causal=causal), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=2e-2)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths, cuda, poison):
    for case in of_lengths(lengths, (64, 128)[sum(lengths) % 2]):
        check(case, cuda)


@pytest.mark.parametrize("dim", [56, 64, 128])
def test_strided_inputs(dim, cuda):
    """Inputs in any memory order that TMA can read give right results; NaN around the heads is never used."""
    want = [x.contiguous() for x in inputs_of(cuda, dim=dim)]

    def spread(tensor, order, more):
        places = [tensor.shape[axis] for axis in order]
        lines = torch.full((*places[:-1], places[-1] + more), float("nan"), device=cuda, dtype=tensor.dtype)
        wide = torch.cat([lines, torch.full_like(lines[:, :, :5], float("nan"))], 2)[:, :, : places[2], : places[3]]
        return wide.permute([order.index(axis) for axis in range(4)]).copy_(tensor)

    for orders in (((0, 2, 1, 3),) * 3, ((2, 0, 1, 3), (0, 1, 2, 3), (1, 0, 2, 3))):
        inputs = [spread(x, order, 8) for x, order in zip(want, orders, strict=True)]
        for options in ({}, dict(causal=True)):
            assert torch.equal(attend(*inputs, **options), attend(*want, **options))


def test_columns_that_are_no_multiple_of_eight(cuda):
    """Head dimensions that are no multiple of 8 are right if the strides of rows are multiples of 8, as TMA needs."""
    query, key, value = inputs_of(cuda)
    got = attend(query[..., :59], key[..., :59], value)
    for x in (query, key):
        x[..., 59:] = 0
    assert torch.equal(got, attend(query, key, value, scale=59**-0.5))


@pytest.mark.parametrize("causal", [False, True])
def test_planes_in_several_sections(causal, cuda, tiles, poison):
    """Heads are right if they are computed in several groups (sections), as with a small L2; the last is not full."""
    tiles("L2_BYTES", 3 * 2 * 421 * (128 + 128))
    check(Case("sections", B=4, Hq=22, Hkv=11, Sq=300, Sk=421, D=128, Dv=128, dtype=HALF[0], causal=causal), cuda)


def test_tensors_beyond_two_to_the_31(cuda):
    reaches_far(cuda, "hopper")


def test_a_repeated_call_finds_its_tensors_wherever_they_lie(cuda, record_after):
    """Repeated calls are right with more tensor addresses than the cache of TMA descriptors has entries."""
    batches = [inputs_of(cuda, batch=1) for _ in range(300)]
    record_after(None)
    want = [attend(*inputs, causal=True) for inputs in batches]
    record_after(1)
    for _ in range(2):
        assert all(torch.equal(attend(*x, causal=True), out) for x, out in zip(batches, want, strict=True))
    for x, other in zip(batches[0], batches[1], strict=True):
        x.copy_(other)  # new values at an address with a cached descriptor
    assert torch.equal(attend(*batches[0], causal=True), want[1])
    again = [[x.cpu() for x in inputs] for inputs in batches[2:6]]
    batches.clear()
    torch.cuda.empty_cache()
    for host, out in zip(again, want[2:6], strict=True):
        assert torch.equal(attend(*[x.to(cuda) for x in host], causal=True), out)  # at addresses of deleted tensors


def test_a_graph_replays_on_new_values(cuda):
    replays_on_new_values(cuda, "hopper")
