"""Tests cases that PyTorch's kernel for CPUs gets wrong, and the number of scores that our calls compute."""

import itertools

import pytest
import torch

import fusedattn as fa
from fusedattn.call.options import Arguments
from fusedattn.call.varlen import checked_varlen
from fusedattn.cpu import tiling
from fusedattn.testing.compare import compare, with_gradients
from fusedattn.testing.tolerance import verdict

from ..close import assert_computes, assert_like
from ..conftest import run_python
from ..inside import alike as draw, by, call_of, named
from ..sequences import attention_varlen

INFINITE = float("inf")


@pytest.mark.parametrize("keys", [6, 70])
@pytest.mark.parametrize("given", ["lse", "weights", "lse and weights"])
@pytest.mark.parametrize("options", [dict(causal=True), dict(mask=torch.arange(80)[:, None] > 70)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_incoming_gradients_of_rows_that_see_nothing_are_ignored(dtype, options, given, keys):
    """Incoming gradients of rows that see no key are ignored; a loss such as lse.square() makes them infinite."""
    query, key, value = draw(1, 2, 80, 16, dtype=dtype)
    leaves = [query.requires_grad_(), key[:, :, :keys].requires_grad_(), value[:, :, :keys].requires_grad_()]
    incoming = dict(lse=torch.randn(1, 2, 80, dtype=dtype), weights=torch.randn(1, 2, 80, keys, dtype=dtype))
    for x in incoming.values():
        x[:, :, :2] = float("nan")

    def grads(backend):
        _, *results = by(backend)(*leaves, **options, return_lse=True, return_weights=True)
        some = {name: x for name, x in zip(("lse", "weights"), results, strict=True) if name in given}
        return torch.autograd.grad([*some.values()], leaves, [incoming[name] for name in some], materialize_grads=True)

    assert_like(grads("cpu"), grads, "eager")


def test_without_the_kernel_the_naive_path_is_taken(monkeypatch):
    monkeypatch.setattr("fusedattn.cpu.run.flash_attention_for_cpu", None)
    found = fa.explain(*draw(1, 2, 9, 8))
    assert found.backend == "naive" and found.reasons["cpu"] == ["this version of PyTorch does not have its kernel"]


@pytest.mark.parametrize("scale", [100.0, -1e5, 1e10, 1e20, 1e30], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_large_scores_are_finite_and_right(dtype, scale):
    """Gradients of large scores are finite and right; PyTorch's backward may compute infinite weights for them."""
    inputs = draw(1, 2, 100, 16, dtype=dtype, requires_grad=True)
    grads = lambda name: torch.autograd.grad(by(name)(*inputs, scale=scale, causal=True).sum(), inputs)  # noqa: E731
    assert all(x.isfinite().all() for x in grads("cpu"))
    assert_like(grads("cpu"), grads, "eager")


@pytest.mark.parametrize("scale", [1.7e38, -3.4e38])
@pytest.mark.parametrize("keys", [5, 40, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_scale_whose_product_with_a_key_overflows(dtype, keys, scale):
    query, key, value = ((x * size).to(dtype) for x, size in zip(draw(1, 2, keys, 16), (1e-18, 1.0, 1.0), strict=True))
    tensors = dict(query=query, key=key, value=value, out=torch.randn_like(query))
    assert_computes(fa.attention, tensors, dict(scale=scale), "out", backend="cpu")


SCALED = [
    # the kernel's exp(0) of bfloat16 is 1 - 5e-5, but the lse is float32
    *((torch.bfloat16, dict(scale=scale, window=(0, 0))) for scale in (1e-4, 1e-40)),
    # such a scale turns the kernel's causal mask into infinity
    *((torch.float32, dict(scale=scale, causal=True)) for scale in (-0.3, 0.0)),
]


@pytest.mark.parametrize("dtype, options", SCALED, ids=str)
def test_scales_that_the_kernel_gets_wrong(dtype, options):
    inputs = draw(1, 2, 100, 16, dtype=dtype)
    attend = lambda name: by(name)(*inputs, **options, return_lse=True)  # noqa: E731
    assert_like(attend("cpu"), attend, "eager")


@pytest.mark.parametrize(
    "options, sizes",
    [
        *itertools.product([{}, dict(window=(90, 0)), dict(sinks=torch.zeros(1))], [(n, 100, 32) for n in (1, 4, 32)]),
        (dict(causal=True, scale=2.0), (62, 70, 16)),
    ],
    ids=str,
)
@pytest.mark.one_in(2)
def test_gradients_of_few_rows_are_as_good_as_eagers(options, sizes):
    """At most 2 % of random calls with an lse of 8 to 39 may exceed the tolerance, as eager may be exact by chance."""
    exceeded, (rows, keys, columns) = 0, sizes
    for seed in range(50):
        torch.manual_seed(seed)
        (query, out), (key, value) = torch.randn(2, 1, 1, rows, columns), torch.randn(2, 1, 1, keys, columns)
        tensors, scaled = dict(query=query, key=key, value=value, out=out), dict(scale=0.6) | options
        found = compare(with_gradients(fa.attention, tensors, scaled, "out", backend="cpu"), tensors, scaled, "out")
        exceeded += not all(found[name].ok for name in ("query", "key", "value"))
    assert exceeded <= 1


@pytest.mark.parametrize("sequences, rows", [(1, 7), (70, 1)])
@pytest.mark.parametrize("seed", range(5))
def test_gradients_of_few_rows_with_large_scores_are_as_good_as_eagers(sequences, rows, seed):
    """Gradients of few rows are as exact as eager's; PyTorch's kernel is less exact, as few errors do not cancel."""
    torch.manual_seed(seed)
    (query, out), (key, value) = torch.randn(2, sequences, 2, rows, 32), torch.randn(2, sequences, 2, 100, 32)
    lengths = [rows] * sequences, [100] * sequences
    function, packed = (fa.attention, {}) if sequences == 1 else (attention_varlen(*lengths), dict(lengths=lengths))
    assert_computes(function, named(query, key, value, out), dict(scale=4.0), "out", **packed)


@pytest.mark.parametrize("keys", [8, 100])
def test_rows_that_query_mask_hides_have_no_weights_beside_a_sink_either(keys):
    real = torch.arange(keys) != 3
    options = dict(bias=torch.zeros(keys, 1).masked_fill(~real[:, None], 500.0), sinks=torch.zeros(2), query_mask=real)
    assert_computes(fa.attention, named(*torch.randn(4, 1, 2, keys, 16)), options, "out", (), backend="cpu")


STRIDED = {
    "every second column": lambda x: torch.stack((x, x), -1)[..., 0],
    "columns apart": lambda x: x.mT.contiguous().mT,
    "reversed order": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:, :1].expand_as(x),
    "a slice": lambda x: torch.cat((x, x, x), 2)[:, :, 40:80],
    "rows that overlap": lambda x: x.reshape(-1)[: 2 * 4 * 55].view(2, 4, 55).unfold(-1, 16, 1).detach(),
    "heads that overlap": lambda x: x.reshape(-1).as_strided((2, 4, 40, 16), (2000, 1, 16, 1)).detach(),
}


@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(100, 40)), dict(key_mask=True)], ids=str)
def test_gradients_that_are_summed_over_keys(options):
    """Gradients summed over keys, as for a projection's bias, are right, although a rounded lse shifts a whole row.

    With sinks, the value's gradient has 1.2 times the allowed mean error for 600 keys: the kernel's own sums.
    """
    query, key, value = draw(2, 4, 600, 64)
    options = dict(key_mask=torch.rand(2, 600) > 0.3) if "key_mask" in options else options
    direction = torch.randn(2, 4, 600, 64)

    def summed(function, dtype, **more):
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        out = function(*leaves, **options, **more)
        return [x.sum((0, 2)) for x in torch.autograd.grad(out, leaves, direction.to(dtype))]

    got = summed(fa.attention, torch.float32, backend="cpu")
    eager, oracle = (summed(fa.reference.eager, dtype) for dtype in (torch.float32, torch.float64))
    for name, *results in zip("qkv", got, eager, oracle, strict=True):
        found = verdict(*results, torch.zeros(4, dtype=torch.bool))
        assert found.ok, (name, found)


@pytest.mark.parametrize("inputs", [(2, 1, 90, 16), (1, 90, 1, 16), (1, 1, 1, 16), (2, 90, 4, 1)], ids=str)
def test_sizes_of_one_have_any_stride(inputs):
    """Dimensions of size 1 may have any stride; saved bfloat16 tensors become float32 views, which need even ones."""
    tensors = [torch.randn(inputs).bfloat16().permute(0, 3, 1, 2).mT for _ in range(4)]
    assert_computes(fa.attention, named(*tensors), dict(causal=True), "out", backend="cpu")


def test_one_key_has_all_the_weight():
    for size in (1.0, 300.0, 2.0**18):
        query, key = torch.full((1, 1, 5, 64), size).sqrt(), torch.full((1, 1, 1, 64), size).sqrt() / 3
        weights = fa.attention(query, key, key, return_weights=True, backend="cpu")[1]
        assert torch.equal(weights, torch.ones_like(weights))


@pytest.mark.parametrize(("rows", "dim"), [(64, 24), (64, 32), (64, 128), (1, 24)])
def test_gradients_of_rather_large_scores(rows, dim):
    """Gradients are right for large scores, whose scale PyTorch's forward and backward round in different ways."""
    torch.manual_seed(5)
    tensors = dict(query=torch.randn(4, 4, rows, dim) * (4.0 if rows > 1 else 12.0), key=torch.randn(4, 4, 130, dim))
    tensors |= dict(value=torch.randn(4, 4, 130, dim), out=torch.randn(4, 4, rows, dim), lse=torch.randn(4, 4, rows))
    assert_computes(by("cpu"), tensors, {})


@pytest.mark.parametrize("size", [2.0**6, 2.0**8, 2.0**10, 2.0**14, 2.0**19], ids=str)
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(sinks=5.0), dict(causal=True, sinks=-2.0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.one_in(5)
def test_large_scores_that_are_exact(saves, dtype, options, size):
    """Weights of large exact scores are right: merged rectangles and sinks do not compute them from a rounded lse."""
    query, key = (torch.randint(-4, 5, (1, 2, n, 16)) / 4.0 for n in (100, 200))
    query[..., 0], key[..., 0] = 1.0, size
    value, options = torch.randn(1, 2, 200, 16), dict(options, scale=1.0)
    if "sinks" in options:
        options["sinks"] = torch.full((2,), size + options["sinks"])

    def results(function, of, **more):
        inputs = [x.to(dtype).to(of).requires_grad_(saves) for x in (query, key, value)]
        out = function(*inputs, **options, **more).detach()
        with torch.no_grad():
            return out, function(*inputs, **options, **more, return_weights=True)[1]

    eager, exact = (results(fa.reference.eager, of) for of in (dtype, torch.float64))
    for each in zip(results(fa.attention, dtype, backend="cpu"), eager, exact, strict=True):
        found = verdict(*each, torch.zeros(1, 2, 100, dtype=torch.bool))
        assert found.ok, found


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.one_in(3)
def test_any_strides(name, causal):
    """Tensors of any strides are right; PyTorch's kernel reads each tensor as if its last stride were 1."""
    *inputs, out = [STRIDED[name](x) for x in torch.randn(4, 2, 4, 40, 16)]
    for _ in range(3):  # the last calls are replays
        got = assert_computes(fa.attention, named(*inputs, out), dict(causal=causal), "out", backend="cpu")
        assert got["out"].stride() == fa.attention(*inputs, causal=causal, backend="naive").stride()


@pytest.mark.parametrize("widths", [(16, 9), (9, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_of_other_widths(widths, dtype):
    """Results for channels-last tensors with D != Dv are right; copies padded to one D keep the order of dimensions."""
    shapes = ((2, 4, n, widths[wide]) for n, wide in ((40, 0), (90, 0), (90, 1), (40, 1)))
    tensors = [STRIDED["channels last"](torch.randn(shape).to(dtype)) for shape in shapes]
    assert_computes(fa.attention, named(*tensors), {}, "out")


@pytest.mark.parametrize("hidden", [slice(0, 3), slice(600, 640), slice(0, 600)], ids=str)
def test_rows_that_see_nothing_at_first_or_at_all(hidden):
    """Rows that see none of the first 512 keys, or no key, are right; PyTorch's kernel gives them an lse of 0."""
    inputs, mask = [*draw(1, 2, 20, 16)[:1], *draw(1, 2, 640, 16)[:2]], torch.ones(20, 640, dtype=torch.bool)
    mask[:, hidden] = mask[5] = False
    out, lse = fa.attention(*inputs, mask=mask, return_lse=True, backend="cpu")
    assert (out[:, :, 5] == 0).all() and (lse[:, :, 5] == -INFINITE).all()
    assert_like((out, lse), lambda: fa.reference.eager(*inputs, mask=mask, return_lse=True))


def test_an_lse_of_0_is_no_row_that_sees_nothing():
    query, key, value = torch.zeros(1, 1, 4, 8), torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    mask = torch.tensor([[True], [False], [True], [False]])
    out, lse = fa.attention(query, key, value, mask=mask, return_lse=True, backend="cpu")
    assert lse.flatten().tolist() == [0.0, -INFINITE, 0.0, -INFINITE]
    assert torch.equal(out[0, 0, 0], value[0, 0, 0]) and (out[0, 0, 1] == 0).all()


@pytest.mark.parametrize("keys", [1, 3, 15, 16, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("differentiated", [False, True])
@pytest.mark.one_in(4)
def test_nan_that_a_row_sees_makes_it_nan(dtype, keys, differentiated):
    """A row that sees NaN is NaN; PyTorch's kernel may return an empty row if all its scores are NaN."""
    query, key, value = draw(2, 2, keys, 16, dtype=dtype)
    query[0, 1, 0], key[1, 0] = float("nan"), float("nan")
    bad = torch.zeros(2, 2, keys, dtype=torch.bool)
    bad[0, 1, 0] = bad[1, 0] = True
    value += 4  # a common mean, which is subtracted in bfloat16
    for options in ({}, {"causal": True}, {"sinks": torch.zeros(2)}, {"window": (2, 0)}):
        for _ in range(2):  # the second call is replayed
            leaves = [x.clone().requires_grad_(differentiated) for x in (query, key, value)]
            out, lse = fa.attention(*leaves, **options, return_lse=True, backend="cpu")
            alone = fa.attention(*leaves, **options, backend="cpu")
            for x in (out, alone, lse[..., None]):
                assert torch.equal(x.isnan().all(-1), bad) and torch.equal(x.isnan().any(-1), bad)
    lengths = torch.full((2,), keys, dtype=torch.int32)
    cache = fa.attention_decode(query[:, :, :1], key, value, cache_seqlens=lengths, backend="cpu")
    assert torch.equal(cache.isnan().all(-1), bad[:, :, :1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_a_bias_in_another_dtype(dtype):
    """A bias in another dtype is right; with a float64 query, PyTorch's kernel would read a float32 mask as float64."""
    inputs = draw(1, 2, 40, 16, dtype=dtype)
    for of in (torch.float32, torch.float64, dtype):
        bias = torch.randn(40, 40, dtype=of)
        got = fa.attention(*inputs, bias=bias, backend="cpu")
        assert_like(got, lambda bias=bias: fa.reference.eager(*inputs, bias=bias))


TOKENS = torch.arange(512)
SAME = TOKENS[:, None] // 128 == TOKENS // 128  # documents
ROWS, COLUMNS = torch.arange(300)[:, None], torch.arange(330)


def scores_of(call):
    """Return the number of scores that the kernel computes for one head; a causal square counts half."""
    total = 0
    for part in tiling.parts(call):
        for where in tiling.rectangles(part):
            area = (where.last - where.first) * (where.end - where.begin)
            total += part.call.query.shape[0] * (area // 2 if where.causal else area)
    return total


def test_a_true_byte_of_a_mask_may_be_larger_than_one():
    query, key, value = draw(1, 2, 80, 16)
    mask = torch.arange(80 * 80, dtype=torch.uint8).view(80, 80).view(torch.bool)
    assert torch.equal(*(fa.attention(query, key, value, mask=x) for x in (mask, mask.logical_not().logical_not())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "mask",
    [
        torch.rand(2, 8, 300, 1, generator=torch.Generator().manual_seed(0)) < 0.5,
        COLUMNS // 100 == ROWS // 100,
        (COLUMNS > 200) & (ROWS > 130),
        (COLUMNS // torch.tensor([90, 110]).view(2, 1, 1, 1) == ROWS // 100).expand(-1, 8, -1, -1),
        COLUMNS < torch.tensor([0, 70, 180, 200, 0, 5, 66, 7]).view(1, 8, 1, 1),
        COLUMNS <= 128 + ROWS // 4,
        torch.zeros(300, 330, dtype=torch.bool),
    ],
    ids=["rows", "documents", "a corner", "batches", "heads", "neighbours", "nothing"],
)
@pytest.mark.one_in(3)
def test_blocks_that_a_mask_hides_change_nothing(mask, dtype):
    sizes = dict(query=(300, 16), key=(330, 16), value=(330, 16), out=(300, 16), lse=(300,))
    tensors = {name: torch.randn(2, 8, *size, dtype=dtype) for name, size in sizes.items()}
    assert_computes(fa.attention, tensors, dict(mask=mask), backend="cpu")


@pytest.mark.parametrize(
    ("options", "share"),
    [
        ({}, 1.0),
        (dict(causal=True), 0.5),
        *[(dict(window=window), 0.3) for window in ((64, 0), (0, 64))],
        (dict(window=(64, 64)), 0.5),
        *[(dict(key_mask=mask), 0.5) for mask in (TOKENS < 256, TOKENS >= 256, TOKENS < torch.tensor([[64], [448]]))],
        (dict(key_mask=TOKENS < 256, query_mask=TOKENS < 256), 0.25),
        *[(dict(mask=mask), 0.25) for mask in (SAME, TOKENS[None] < 128, TOKENS[:, None] < 128)],
        (dict(mask=torch.ones(512, 512, dtype=torch.bool).tril()), 0.65),
        (dict(mask=SAME, causal=True), 0.25),
        (dict(mask=torch.arange(512 * 512).view(512, 512) % 3 == 0), 1.0),
        (dict(causal=True, key_mask=TOKENS < 256), 0.45),
    ],
    ids=str,
)
def test_what_is_hidden_is_not_computed(options, share):
    assert scores_of(call_of(*draw(2, 8, 512, 16), **options)) <= share * 2 * 512 * 512 + 512


def test_packed_sequences_are_computed_alone():
    lengths = [512, 100, 100, 100, 0, 300]
    cu, inputs = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32), draw(sum(lengths), 1, 16)
    call = checked_varlen(Arguments(*inputs), cu, cu, None, None, False)
    assert scores_of(call) == sum(n * n for n in lengths)
    assert len(tiling.parts(call)) == 3  # the three of length 100 are a batch, without a copy
    part = tiling.parts(call)[1]
    assert part.call.query.shape == (3, 1, 100, 16) and part.call.query.data_ptr() == call.query[:, :, 512:].data_ptr()


@pytest.mark.parametrize("length", [8, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("more", [{}, dict(sinks=torch.ones(2))], ids=["", "sinks"])
def test_queries_that_see_nothing_may_be_infinite_or_nan(more, dtype, length):
    mask = (torch.arange(length) >= 3)[:, None].expand(length, length).tril()
    query, key, value = torch.randn(3, 1, 2, length, 16).to(dtype).unbind()
    wild, results = query.clone(), []
    wild[0, :, :3, 0], key[:, :, 0, 0] = torch.tensor([[INFINITE], [float("nan")]]), -1.0  # a score of -inf first
    for x in (wild, query):
        inputs = [x.requires_grad_(), key, value.requires_grad_()]
        got = fa.attention(*inputs, mask=mask, return_lse=True, return_weights=True, backend="cpu", **more)
        results.append((*got, *torch.autograd.grad(got[0][:, :, 3:].sum(), inputs[::2])))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("rows", [1, 64, 400])
def test_batches_with_other_padding_are_computed_alone(rows):
    """Batches of different padding are not computed together: hidden keys would have to be copied, as 0."""
    query, keys = torch.randn(4, 8, rows, 64), torch.randn(4, 8, 512, 64)
    real = torch.arange(512) >= torch.tensor([[0], [10], [30], [100]])
    split = tiling.parts(call_of(query, keys, keys, key_mask=real))
    assert len(split) == 4 and not any(tiling.has_holes(part) for part in split)
    assert len(tiling.parts(call_of(query[:, :, :1], keys[:, :, :16], keys[:, :, :16], key_mask=real[:, 90:106]))) == 1


PEAK = """
import resource, sys, torch, fusedattn as fa
def run(length):
    inputs = [torch.randn(1, 1, length, 264, dtype=getattr(torch, sys.argv[1]), requires_grad=True) for _ in range(3)]
    torch.autograd.grad(fa.attention(*inputs, causal=True, backend="cpu"), inputs, torch.randn_like(inputs[0]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
run(1024), run(4096)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_of_wide_heads_is_linear_in_the_sequence(dtype):
    """Inputs, output, gradients and what the backward holds grow by less than one score for each pair would take."""
    short, long = map(int, run_python("-c", PEAK, dtype).split())
    assert long - short < 4096 * 4096 * getattr(torch, dtype).itemsize


@pytest.mark.parametrize("batch", [1, 64])
def test_a_bias_in_a_large_call(batch):
    """A large call is right, and has the same bits without gradients, when each head may become a batch."""
    query, key, value = torch.randn(3, 64, 3, 49, 32)
    bias = torch.randn(batch, 3, 49, 49)
    bias[:, 0, 5] = -INFINITE  # a row that sees nothing
    results = fa.attention(query, key, value, bias=bias, return_lse=True)
    assert_like(results, lambda *x: fa.reference.eager(*x, bias=bias, return_lse=True), query, key, value)
    query.requires_grad_()
    assert all(map(torch.equal, fa.attention(query, key, value, bias=bias, return_lse=True), results))
