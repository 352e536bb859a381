"""Tests that need a GPU: real sizes, every tile of the table, races, graphs, memory."""

import functools

import pytest
import torch

import fusedattn as fa
from fusedattn.testing.compare import INPUTS, with_gradients

from .. import sample
from ..cases import Case
from ..close import assert_case, assert_close

pytestmark = pytest.mark.gpu
HALF = (torch.bfloat16, torch.float16)
DIMS = (8, 16, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256, 320, 512)
LENGTHS = (
    *((1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (108, 256), (256, 512), (1023, 1024)),
    *((1, 1), (3, 3), (64, 1), (255, 256), (239, 1), (799, 3), (129, 127), (65, 63), (191, 193), (257, 33)),
)
check = functools.partial(assert_case, backend="triton")


def captured(step, warm=True):
    """Return a CUDA graph of a step, and its results; warm: run the step once before, outside of the graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step() if warm else None
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def drawn(cuda):
    *inputs, grad = (torch.randn(2, 4, 100, 64, device=cuda, dtype=torch.float16) for _ in range(4))
    return [x.requires_grad_() for x in inputs], grad


def replays_on_new_values(cuda, backend, passes=2):
    """Check that a CUDA graph of forward and backward is right on new values. In one pass dq's rounding may vary."""
    inputs, grad = drawn(cuda)

    def step():
        out = fa.attention(*inputs, causal=True, backend=backend)
        return (out, *torch.autograd.grad(out, inputs, grad))

    step()
    graph, results = captured(step)
    for _ in range(3):  # each replay must zero the memory that kernels add to
        with torch.no_grad():
            for x in inputs:
                x.normal_()
        graph.replay()
        out, dq, *others = zip(results, step(), strict=True)
        assert all(torch.equal(*both) for both in (out, *others, *([dq] if passes == 2 else [])))
        torch.testing.assert_close(*dq)


def reaches_far(cuda, backend):
    """Check tensors whose batches or rows lie more than 2**31 elements after the start."""
    query, key, value = (torch.randn(2, 1, 17000, 64, device=cuda).half() for _ in range(3))
    buffer = torch.zeros(2**31 + 2**22, dtype=torch.float16, device=cuda)
    far = buffer.as_strided(key.shape, (2**31, 2**21, 64, 1))
    want = fa.attention(query, key, value, causal=True, backend=backend)
    for number, near in enumerate((query, key)):
        moved = [query, key, value]
        moved[number] = far.copy_(near)
        assert torch.equal(fa.attention(*moved, causal=True, backend=backend), want)
    rows = torch.randn(1, 34, 2**20, 64, device=cuda, dtype=torch.float16)  # 2.3e9 elements
    out = fa.attention(rows, key[:1, :, :64], value[:1, :, :64], backend=backend)
    want = fa.attention(rows[:, -1:, -64:], key[:1, :, :64], value[:1, :, :64], backend=backend)
    torch.testing.assert_close(out[:, -1:, -64:], want)


def of_lengths(lengths, dim):
    """Yield a case for each order of two lengths: the first as queries, the second as keys, and the reverse."""
    rows, keys = lengths
    for number, (sq, sk) in enumerate({(rows, keys), (keys, rows)}):
        options = ({}, dict(causal=True), dict(window=(128, 33)))[(rows + number) % 3]
        yield Case("lengths", B=2, Hq=4, Hkv=2, Sq=sq, Sk=sk, D=dim, Dv=dim, dtype=HALF[number % 2], **options)


@pytest.mark.parametrize("dim", [64, 128])
def test_first_contact(dim, cuda, poison):
    """A forward and a backward in one pass are right; on compute capability 9.0 and newer TMA adds dq."""
    case = Case("first", B=2, Hq=4, Hkv=2, Sq=500, Sk=700, D=dim, Dv=dim, dtype=torch.bfloat16, causal=True)
    check(case, cuda)
    query, key, value = (case.draw(cuda)[0][name].requires_grad_() for name in INPUTS)
    tile = fa.explain(query, key, value, causal=True, backend="triton").tiles["one_pass"]
    assert tile.bulk == (torch.cuda.get_device_capability() >= (9, 0))


@pytest.mark.parametrize("dim, causal", sample.checkered(DIMS, [False, True]))
def test_head_dimensions(dim, causal, cuda, poison):
    number = DIMS.index(dim)
    dtype = (*HALF, torch.float32)[number % 3]
    dims = dict(D=dim, Dv=DIMS[number - 1 if causal else number])
    check(Case("dims", B=2, Hq=6, Hkv=3, Sq=257, Sk=331, dtype=dtype, causal=causal, **dims), cuda)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_lengths(lengths, dim, cuda, poison):
    for case in of_lengths(lengths, dim):
        check(case, cuda)


# The tiles for this GPU, and for a GPU with little shared memory. A place is an index in a row of the tile table.
CAPABILITIES = [pytest.param(None, id="its own"), *sample.matrix(pytest.param(80, id="8.0"))]
PLACES = range(4)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("passed", [1, 2])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_tile_of_the_table(dtype, dim, capability, passed, place, cuda, passes, tiles):
    """Each tile in the table is right on this GPU, also a tile that only smaller GPUs use."""
    if passed == 1 and dim > 128:
        pytest.skip("there is no backward in one pass")
    most = []

    def one(found):
        most.append(len(found))
        return found[min(place, len(found) - 1) :]

    tiles.choose(one, capability)
    passes(passed)
    case = Case("tiles", B=1, Hq=4, Hkv=2, Sq=300, Sk=421, D=dim, Dv=dim, dtype=dtype, causal=True)
    check(case, cuda)
    if place and place >= max(most):
        pytest.skip("no kernel has that many")
    check(case._replace(B=2, mask="batch", bias="heads", softcap=5.0, dropout=0.2, grads="out, lse and weights"), cuda)


# each way to sum the gradient of a bias, and masks that show blocks in full, in part or not at all
LARGE = {
    "masks": dict(mask="batch", key_mask="own", query_mask="own"),
    "mask of each head": dict(mask="pairs", window=(200, 100)),
    "bias of pairs": dict(bias="pairs", dropout=0.17),
    "bias over batch": dict(bias="heads", sinks=True),
    "bias of keys": dict(bias="keys", causal=True),
    "bias of rows": dict(bias="rows", softcap=50.0),
    "slopes": dict(alibi="own", dropout=0.17, grads="out, lse and weights"),
}


@pytest.mark.parametrize("name, dim", sample.checkered(LARGE, [64, 128]))
def test_options_in_many_tiles(name, dim, cuda, poison):
    sizes = dict(B=2, Hq=4, Hkv=2, Sq=457, Sk=571, D=dim, Dv=dim, dtype=HALF[len(name) % 2])
    check(Case(name)._replace(**sizes, **LARGE[name]), cuda)


def test_a_document_mask_with_a_plan(cuda, two_passes):
    case = Case("documents", B=2, Hq=4, Hkv=2, Sq=1024, Sk=1024, D=64, Dv=64, dtype=torch.bfloat16)
    tensors, options = case.draw(cuda)
    document = torch.arange(1024, device=cuda) // 300
    mask = (document[:, None] == document[None, :])[None, None]
    got = with_gradients(fa.attention, tensors, options | dict(mask=fa.plan(mask)), backend="triton")
    assert_close(got, tensors, options | dict(mask=mask))


@pytest.mark.parametrize("options", [{}, dict(mask="batch", bias="heads", dropout=0.2)], ids=["plain", "rich"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("passed", [1, 2])
def test_many_runs_give_the_same_bits(passed, dim, options, cuda, passes, launched):
    """Repeated calls give equal bits if the backward takes two passes; in one pass dq differs by rounding."""
    passes(passed)
    sizes = dict(B=30, Hq=4, Hkv=2, Sq=455, Sk=523, D=dim, Dv=dim, dtype=torch.bfloat16, causal=True)
    tensors, options = Case("races")._replace(**sizes, **options).draw(cuda)
    first = with_gradients(fa.attention, tensors, options, backend="triton")
    names = {name for name, _ in launched}
    assert ("one_pass" in names) == (passed == 1) != ("dq" in names)
    largest, rounding = dict(first), 2**-6 * first["query"].abs().max()
    for _ in range(200):
        again = with_gradients(fa.attention, tensors, options, backend="triton")
        differ = {name for name in first if not torch.equal(first[name], again[name])}
        assert differ <= ({"query"} if passed == 1 else set())
        assert (again["query"] - first["query"]).abs().max() <= rounding
        if differ and (again["query"] - first["query"]).abs().max() > (largest["query"] - first["query"]).abs().max():
            largest = again
    one = slice(0, 1)  # compare one batch with float64
    if "bias" not in options:  # the bias's gradient sums over all batches
        options = {name: x[one] if name == "mask" else x for name, x in options.items()}
        tensors = {name: x[one] for name, x in tensors.items()}
        assert_close({name: x[one] for name, x in largest.items()}, tensors, options)


def test_tensors_beyond_two_to_the_31(cuda):
    reaches_far(cuda, "triton")


@pytest.mark.parametrize("passed", [1, 2])
def test_a_graph_replays_on_new_values(passed, cuda, passes):
    passes(passed)
    replays_on_new_values(cuda, "triton", passed)


def test_the_backward_of_a_graph_drops_what_its_forward_dropped(cuda):
    """Each replay of a CUDA graph drops new weights, and its backward drops the same ones as its forward."""
    inputs, grad = drawn(cuda)

    def step():
        out, weights = fa.attention(*inputs, dropout_p=0.5, return_weights=True, backend="triton")
        return weights.detach(), torch.autograd.grad(out, inputs[2], grad)[0]

    graph, (weights, of_value) = captured(step)
    dropped = []
    for _ in range(2):
        graph.replay()
        dropped.append(weights == 0)
        torch.testing.assert_close(of_value, weights.mT @ grad, rtol=0, atol=2e-2)
    assert not torch.equal(*dropped)


def test_every_gpu_of_the_machine(cuda):
    for index in range(torch.cuda.device_count()):
        with torch.cuda.device(0):
            check(Case("device", Sq=100, Sk=100, D=64, Dv=64, dtype=torch.float16), torch.device(cuda, index))


def test_float32_products_follow_torchs_setting(cuda):
    """With torch's setting "ieee" errors are those of float32, with "tf32" those of TF32."""
    case = Case("precision", Sq=200, Sk=200, D=64, Dv=64)
    tensors, options = case.draw(cuda)
    before = torch.backends.cuda.matmul.fp32_precision
    oracle = with_gradients(fa.reference.attention, {name: x.double() for name, x in tensors.items()}, options)
    errors = {}
    try:
        for setting in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = setting
            got = with_gradients(fa.attention, tensors, options, backend="triton")
            errors[setting] = max((got[name].double() - oracle[name]).abs().max().item() for name in ("out", *INPUTS))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert errors["ieee"] < 2e-5 < errors["tf32"] < 2e-2


@pytest.mark.parametrize("passed, width", [(1, 64), (2, 64), (2, 512)])
def test_memory_is_linear_in_the_sequence(passed, width, cuda, passes):
    """The memory of forward and backward is linear in the sequence; one pass also needs float32 sums of dq."""
    passes(passed)
    peaks = []
    for length in (4096, 8192):
        shape = 1, 8, length, width
        inputs = [torch.randn(shape, device=cuda, dtype=torch.float16, requires_grad=True) for _ in range(3)]
        grad = torch.randn_like(inputs[0])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, lse = fa.attention(*inputs, return_lse=True, backend="triton")
        torch.autograd.grad(out, inputs, grad)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        ideal = 4 * out.nbytes + lse.nbytes  # output, lse and three gradients
        held = 3 * out.nbytes
        sums = 2 * out.nbytes if passed == 1 else 0
        assert held + peaks[-1] <= 1.2 * (held + ideal) + sums
    assert peaks[1] <= 2.1 * peaks[0]
