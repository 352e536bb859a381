"""Tests calls of backend="hopper" by compiled code, with extreme numbers and unusual memory layouts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="kernels need Triton")

import fusedattn as fa
from fusedattn.dispatch import backends
from fusedattn.launch import failures, run, tile_table
from fusedattn.testing.tolerance import verdict

from ..close import assert_like
from ..inside import differentiated
from . import calls
from .cases import dense
from .device import gpu

pytestmark = pytest.mark.matrix
BF16 = dict(dtype=torch.bfloat16)


def _attend(*inputs, **options):
    return fa.attention(*inputs, **options, backend="hopper")


def _drawn(rows=70, keys=40, width=64):
    return [torch.randn(1, 1, n, width, **BF16, requires_grad=True) for n in (rows, keys, keys)]


def _far_past_the_end(width):
    """Keys past the end of a tile get weight 0, although their score of 0 is far above all real scores."""
    sizes = (150, 8.0), (70, -8.0), (70, 1.0)
    return [torch.full((1, 1, size, width), value) + torch.randn(1, 1, size, width) / 8 for size, value in sizes]


def _beyond_16_bits(width):
    """Return inputs whose scores exceed the largest bfloat16, but not the largest float32."""
    query, key = (torch.zeros(1, 1, size, width) for size in (40, 33))
    query[..., 0], key[..., 0] = 2.0**64, 2.0**63
    query[..., 1], key[..., 1] = 2.0**60, 2.0**67 - 2.0**59  # together 2**128 - 2**119
    query[..., 2], key[..., 2] = 2.0**60, 2.0**58
    return query, key, torch.randn(1, 1, 33, width)


EXTREME = {
    "keys past the end": (_far_past_the_end, {}),
    # A bias of all rows would give rows past the end a weight of inf, and inf * 0 is NaN.
    "rows past the end": (lambda width: _drawn(width=width), dict(bias=torch.full((1, 1, 1, 40), 200.0))),
    "scores beyond 16 bits": (_beyond_16_bits, dict(scale=1.0)),
}


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("draw, options", EXTREME.values(), ids=EXTREME)
def test_gradients_of_extreme_numbers_are_finite(draw, options, width):
    inputs = [x.detach().to(**BF16).requires_grad_() for x in draw(width)]
    with gpu(90) as device:
        results = differentiated(_attend, inputs, torch.randn(1, 1, inputs[0].shape[2], width, **BF16), **options)
    assert all(x.isfinite().all() for x in results) and "backward" in [x.name for x in device.launches]


@pytest.mark.parametrize("width", [64, 128])
def test_the_row_max_is_added_before_the_logarithm(width):
    """Each of 40 equal keys weighs 1/40 if scores are so large that score + log loses the log in float32."""
    inputs = _drawn(width=width)
    inputs[:2] = [torch.full_like(x, 2.0**15).requires_grad_() for x in inputs[:2]]
    incoming = torch.randn(1, 1, 70, width, **BF16)
    with gpu(90):
        got = differentiated(_attend, inputs, incoming)[3]
    eager = differentiated(fa.reference.eager, inputs, incoming)[3]
    want = incoming.double().mean(2, keepdim=True).expand_as(inputs[1]) * 70 / 40
    assert verdict(got, eager, want).ok


@pytest.mark.parametrize("width", [64, 128])
def test_slopes_beside_a_softcap_may_make_scores_large(width):
    """Weights are right if all visible keys are so far away that their scores are about -2**20."""
    inputs, incoming = _drawn(40, 200, width), torch.randn(1, 1, 40, width, **BF16)
    options = dict(softcap=50.0, alibi_slopes=torch.tensor([5000.0]), key_mask=torch.arange(200)[None] < 20)
    with gpu(90):
        got = differentiated(_attend, inputs, incoming, **options)
    assert_like(got, lambda: differentiated(fa.reference.eager, inputs, incoming, **options))


def test_a_compiled_call_copies_tensors_that_tma_cannot_read():
    inputs = _drawn()
    odd = [torch.cat([x.new_zeros(1), x.detach().flatten()])[1:].view(x.shape) for x in inputs]
    assert all(x.data_ptr() % 16 for x in odd)
    with gpu(90):
        assert torch.equal(torch.compile(_attend, fullgraph=True, backend="eager")(*odd), _attend(*inputs))


def test_a_mapped_call_copies_what_it_expands_for_tma():
    """torch.vmap gives keys that all calls share a stride of 0. Each call is right, recorded or not."""
    with gpu(90), torch.no_grad():
        for _ in range(3):
            query, (key, value) = torch.randn(3, 1, 2, 70, 64, **BF16), torch.randn(2, 1, 2, 40, 64, **BF16)
            got = torch.vmap(lambda query: _attend(query, key, value))(query)  # noqa: B023
            assert_like(got, torch.vmap(lambda query: fa.reference.eager(query, key, value)), query)  # noqa: B023


@pytest.mark.parametrize("forward", ["hopper", "triton"])
def test_the_gradient_of_a_sum_is_copied(forward, monkeypatch):
    """It has strides of 0. A backward, recorded or not, copies it, also after a forward by the universal kernel."""
    inputs, hopper = _drawn(), backends.BACKENDS["hopper"]
    monkeypatch.setattr(backends, "_on_gpu", lambda call: True)
    if forward == "triton":
        monkeypatch.setitem(backends.BACKENDS, "hopper", hopper._replace(reasons=lambda *_: ["it is slower"]))
    with gpu(90) as device:
        for reduce in (torch.sum, torch.mean, torch.sum, torch.sum):  # some are replayed
            device.launches.clear()
            gradients = torch.autograd.grad(reduce(fa.attention(*inputs)), inputs)
            assert [x.name for x in device.launches] == ["forward", "preprocess", "backward", "postprocess"]
            assert device.launches[0].kernel.src.fn.is_gluon() == (forward == "hopper")
            assert_like(gradients, lambda: torch.autograd.grad(reduce(fa.reference.eager(*inputs)), inputs))  # noqa: B023


@pytest.mark.parametrize("width, asked", [(64, "qv"), (128, "qk"), (256, "qv"), (320, "qk")])
def test_a_gradient_that_nobody_asks_for_is_made_and_dropped(width, asked):
    inputs = [x.requires_grad_(name in asked) for x, name in zip(_drawn(width=width), "qkv", strict=True)]
    wanted, incoming = [x for x in inputs if x.requires_grad], torch.randn(1, 1, 70, width, **BF16)
    with gpu(90) as device:
        for _ in range(3):  # the last one is replayed
            gradients = torch.autograd.grad(_attend(*inputs), wanted, incoming)
            assert_like(gradients, lambda: torch.autograd.grad(fa.reference.eager(*inputs), wanted, incoming))
    assert {"backward", "stored_backward", "wide_backward"} & {x.name for x in device.launches}
    assert not {"dq", "dkdv"} & {x.name for x in device.launches}


COPIED = {
    "odd sizes": dict(D=100, Dv=61, causal=True, alibi="own", sinks=True, times=3),
    "odd sizes, packed, deterministic": dict(D=61, Dv=100, B=2, lengths=((40, 70), (77, 33)), two_passes=True),
    "odd strides and bias": dict(D=128, strided=True, bias="pairs", query_mask="own", B=2, dtype=torch.float16),
    "expanded": dict(D=64, expanded=True, B=2, bias="batch"),
    "odd D 256": dict(D=250, Dv=190, softcap=2.0),
    "odd D 512": dict(D=257, Dv=300, causal=True, key_mask="own", B=2, times=3),
}


@pytest.mark.parametrize("name", COPIED)
def test_long_calls_copy_what_tma_cannot_read(name, monkeypatch):
    monkeypatch.setattr(tile_table, "COPIED_LENGTH", 1)
    outcome = calls.execute(*dense((name, dict(Sq=70, Sk=77, Hq=1, backend="hopper") | COPIED[name])), 90)
    assert not outcome.wrong(), "\n".join(outcome.wrong())
    special = [x.name for x in outcome.device.launches if x.kernel.src.fn.is_gluon()]
    assert special[0] == "forward" and special[1] in ("backward", "stored_backward", "wide_backward")


FAILING = {  # a kernel of a backward on Hopper: width of heads, options of the call
    "hopper_bwd": (64, {}),
    "transpose_words": (64, dict(mask=torch.rand(70, 40) < 0.5)),
    "real_keys": (256, dict(key_mask=torch.arange(40) < 30)),
}


@pytest.mark.parametrize("kernel", FAILING)
def test_a_backward_that_fails_leaves_the_call_to_the_kernels_of_every_gpu(kernel, monkeypatch, record_after):
    record_after(None)
    (width, options), run_kernel = FAILING[kernel], run.run_kernel
    inputs = _drawn(width=width)

    def failing(name, *given, **launched):
        if name == kernel:
            raise failures.remember(given[3], RuntimeError("ptxas error"))
        run_kernel(name, *given, **launched)

    monkeypatch.setattr(run, "run_kernel", failing)
    monkeypatch.setattr(backends, "_on_gpu", lambda call: True)
    try:
        with gpu(90) as device:
            out = fa.attention(*inputs, **options)
            with pytest.warns(UserWarning, match="hopper_bwd"):
                torch.autograd.grad(out, inputs, torch.randn_like(out))
            assert fa.explain(*inputs, **options).backward
            assert not fa.explain(*inputs, **options, causal=True).backward
    finally:
        failures.forget()
    assert "dkdv" in [x.name for x in device.launches]


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("width", [64, 128])
def test_blocks_of_hidden_keys_get_zeros(width, ordered, monkeypatch):
    """The universal forward and the Hopper backward share a call: 100 of 300 keys are real, others are NaN."""
    monkeypatch.setattr(backends, "_on_gpu", lambda call: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: ordered)
    inputs, real = _drawn(150, 300, width), (torch.arange(300) < 100) & (torch.arange(300) % 7 > 0)
    shown = [x.detach().clone().requires_grad_() for x in inputs]
    for x in inputs[1:]:
        x.data[:, :, ~real] = float("nan")
    incoming = torch.randn(1, 1, 150, width, **BF16)
    with gpu(90) as device:
        got = differentiated(fa.attention, inputs, incoming, key_mask=real)
    assert [x.name for x in device.launches].count("backward") == 1
    assert not any(x[:, :, ~real].any() for x in got[2:])
    assert_like(got, lambda: differentiated(fa.reference.eager, shown, incoming, key_mask=real))


MASKED = {"D64": (64, {}), "D128 causal": (128, dict(causal=True)), "D256": (256, dict(softcap=5.0))}


@pytest.mark.parametrize("width, options", MASKED.values(), ids=MASKED)
def test_a_plan_has_the_bits_of_its_mask(width, options):
    """Three documents and 40 rows that see nothing: blocks are empty, full and in part; a key mask hides NaN."""
    document, real = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([200, 70, 43])), torch.arange(313) % 7 > 0
    query, key, value = (torch.randn(1, 2, 313, width, **BF16) for _ in range(3))
    shown = [x.clone().requires_grad_() for x in (query, key, value)]
    key[:, :, ~real] = value[:, :, ~real] = float("nan")
    inputs = [x.requires_grad_() for x in (query, key, value)]

    def seen(batch, head, row, at):
        return (document[row] == document[at]) & (row < 273)

    mask = seen(0, 0, torch.arange(313)[:, None], torch.arange(313))
    plan = fa.plan(seen, batch=1, heads=1, rows=313, keys=313, key_mask=real)
    incoming, results = torch.randn(1, 2, 313, width, **BF16), []
    with gpu(90):
        for masks in (dict(mask=mask, key_mask=real), dict(mask=plan)):
            results.append(differentiated(_attend, inputs, incoming, **masks, **options))
    assert all(map(torch.equal, *results))
    masks = dict(mask=mask, key_mask=real)
    assert_like(results[0], lambda: differentiated(fa.reference.eager, shown, incoming, **masks, **options))


@pytest.mark.parametrize("options", [{}, dict(causal=True, align="top_left")], ids=["full", "top_left"])
def test_packed_sequences_are_those_of_dense_calls(options):
    """Each sequence has the bits of a dense call, and NaN in the sequences between them changes none."""
    lengths = (70, 40), (9, 9), (130, 200)  # rows, keys
    rows, keys = ([n[i] for n in lengths] for i in (0, 1))
    query, key, value = (torch.randn(sum(n), 2, 64, **BF16) for n in (rows, keys, keys))
    for x, n in ((query, rows), (key, keys), (value, keys)):
        x[n[0] : n[0] + n[1]] = float("nan")
        x.requires_grad_()
    ends = [torch.tensor([0, *n]).cumsum(0).int() for n in (rows, keys)]
    with gpu(90) as device:
        out = fa.attention_varlen(query, key, value, *ends, **options, backend="hopper")
        incoming = torch.randn_like(out)
        gradients = torch.autograd.grad(out, (query, key, value), incoming)
        assert [x.name for x in device.launches].count("backward") == 1
        for b in (0, 2):
            rows, keys = (slice(*e[b : b + 2].tolist()) for e in ends)
            pick = rows, keys, keys
            own = [x[i].detach() for x, i in zip((query, key, value), pick, strict=True)]
            dense = [x.transpose(0, 1)[None].requires_grad_() for x in own]
            want = _attend(*dense, **options)
            assert torch.equal(out[rows], want[0].transpose(0, 1))
            wanted = torch.autograd.grad(want, dense, incoming[rows].transpose(0, 1)[None])
            for got, of_dense, i in zip(gradients, wanted, pick, strict=True):
                assert torch.equal(got[i], of_dense[0].transpose(0, 1))


@pytest.mark.parametrize("biased", [False, True])
def test_sequences_of_a_vmap_have_a_sink_each(biased):
    """A call under `torch.vmap` packs the sequences of all calls; their sinks, and so their biases, differ."""
    ends, lengths = torch.tensor([0, 70, 150], dtype=torch.int32), dict(max_seqlen_q=80, max_seqlen_k=80)
    inputs = [torch.randn(2, 150, 2, 64, **BF16, requires_grad=True) for _ in range(3)]
    inputs += [torch.tensor([[0.0, 1.0], [2.0, 5.0]], requires_grad=True)]
    inputs += [torch.randn(2, 1, 1, 80, 1).requires_grad_()] * biased

    def attend(query, key, value, sinks, bias=None):
        return fa.attention_varlen(query, key, value, ends, ends, sinks=sinks, bias=bias, backend="hopper", **lengths)

    def eager(*mapped):
        found = []
        for query, key, value, sinks, *bias in zip(*mapped, strict=True):
            for begin, end in ((0, 70), (70, 150)):
                own = [each[begin:end].transpose(0, 1)[None] for each in (query, key, value)]
                options = dict(bias=bias[0][:, :, : end - begin]) if biased else {}
                found.append(fa.reference.eager(*own, sinks=sinks, **options)[0].transpose(0, 1))
        return torch.cat(found).unflatten(0, (2, 150))

    incoming = torch.randn_like(inputs[0])
    with gpu(90) as device:
        got = differentiated(torch.vmap(attend), inputs, incoming)
    assert {"dq", "backward"} <= {x.name for x in device.launches}
    assert_like(got, lambda: differentiated(eager, inputs, incoming))


def test_heads_of_one_key_head_share_a_block():
    query, key = (torch.randn(1, heads, rows, 64, **BF16) for heads, rows in ((8, 9), (2, 70)))
    with gpu(90) as device:
        _attend(query, key, key)
        _attend(query, key, key, sinks=torch.zeros(8))
    assert [x.grid for x in device.launches] == [(2, 1, 1), (8, 1, 1)]


def test_a_mode_sees_a_query_mask_of_a_forward_on_hopper():
    """With gradients the call has a block mask; the operator's check accepts it, too."""
    inputs, shown = _drawn(), torch.arange(70)[None] % 3 > 0
    with gpu(90) as device:
        want = _attend(*inputs, query_mask=shown)
        with FlopCounterMode(display=False) as counter:
            assert torch.equal(_attend(*inputs, query_mask=shown), want)
    assert counter.get_total_flops() and [x.name for x in device.launches].count("forward") == 2


class Packed(torch.nn.Module):
    def forward(self, query, key, *ends):
        options = dict(max_seqlen_q=130, max_seqlen_k=130, backend="hopper")
        return fa.attention_varlen(query, key, key, *ends, **options)


def test_an_export_takes_more_rows_than_keys_and_fewer():
    few, many = (torch.randn(n, 1, 64, **BF16) for n in (150, 200))
    ends = [torch.tensor([0, 70, n], dtype=torch.int32) for n in (150, 200)]
    lengths = [{0: torch.export.Dim(name, min=4, max=9999)} for name in ("rows", "keys")]
    with gpu(90):
        exported = torch.export.export(Packed(), (few, many, *ends), dynamic_shapes=(*lengths, ({}, {})), strict=True)
        inputs = many, few, *ends[::-1]
        assert torch.equal(exported.module()(*inputs), Packed()(*inputs))


def test_bits_do_not_depend_on_other_sequences(monkeypatch):
    """A short sequence beside a long one does not change the tile, which depends on lengths in dense calls."""
    monkeypatch.setitem(tile_table.HOPPER_LONG, 64, (dict(full=260), tile_table.Pipeline(3, 128, 2)))
    tensors, results = [torch.randn(560, 1, 64, **BF16) for _ in range(3)], []
    for total in (560, 300):
        ends = torch.tensor([0, 280, total], dtype=torch.int32)
        with gpu(90):
            given = *(x[:total] for x in tensors), ends, ends
            results.append(fa.attention_varlen(*given, return_lse=True, backend="hopper"))
    (out, lse), (beside, lse_beside) = results
    assert torch.equal(out[:280], beside[:280]) and torch.equal(lse[:, :280], lse_beside[:, :280])


def test_sums_of_short_sequences_are_not_padded_to_blocks():
    """Sequences of one row would need 258 times the memory of query for sums of dq."""
    inputs, ends = [torch.randn(40, 1, 64, **BF16, requires_grad=True) for _ in range(2)], range(0, 41, 10)
    with gpu(90) as device:
        differentiated(lambda *x: Packed()(*x, *[torch.tensor(ends, dtype=torch.int32)] * 2), inputs)
    assert "dkdv" in [x.name for x in device.launches]


_HIDDEN = torch.arange(400)[None] // 128 == 2 - torch.arange(130)[:, None] // 128  # block 1 adds after block 3
_RANGES = [0, 130, 0, 130], [0, 130, 130, 260, 260], [0, 400, 0, 400, 400]  # the last keys do not fit in the slots


@pytest.mark.parametrize("rows, keys, mask", [(_RANGES[0], _RANGES[0], None), (*_RANGES[1:], ~_HIDDEN)])
def test_wrong_offsets_leave_no_program_waiting(rows, keys, mask, passes, unchecked):
    """Offsets on a GPU are unchecked: if they decrease, a deterministic backward is wrong, but it ends."""
    inputs = [torch.randn(ends[-1], 1, 64, **BF16, requires_grad=True) for ends in (rows, keys, keys)]
    offsets = [torch.tensor(ends, dtype=torch.int32) for ends in (rows, keys)]
    passes(2)
    with gpu(90) as device:
        most = dict(max_seqlen_q=130, max_seqlen_k=max(keys))
        differentiated(lambda *x: fa.attention_varlen(*x, *offsets, **most, mask=mask, backend="hopper"), inputs)
    assert [x.name for x in device.launches].count("backward") == 1


@pytest.mark.parametrize("width, ordered", [(64, 1), (128, 1), (64, 2), (128, 2), (256, 1)])
def test_a_block_of_keys_that_no_row_sees(width, ordered, passes):
    inputs = [torch.randn(1, h, n, width, **BF16, requires_grad=True) for h, n in ((4, 70), (1, 400), (1, 400))]
    options = dict(mask=torch.rand(70, 400) < 0.5) | (dict(alibi_slopes=torch.rand(4)) if width < 256 else {})
    options["mask"][:, 256:384] = False
    passes(ordered)
    with gpu(90) as device:
        got = differentiated(_attend, inputs, **options)
    assert {"backward", "stored_backward"} & {x.name for x in device.launches}
    assert_like(got, lambda: differentiated(fa.reference.eager, inputs, **options))


def test_the_last_keys_add_first_however_many_blocks_are_hidden_before_them(passes):
    """The last two blocks of keys add large numbers that cancel exactly, before block 1 adds small ones."""
    query, value = (torch.zeros(1, 1, n, 128, **BF16, requires_grad=True) for n in (128, 4992))
    key, blocks = torch.randn_like(value).unflatten(2, (39, 128)), value.data.normal_().unflatten(2, (39, 128))
    blocks[:, :, 37] = blocks[:, :, 38]
    mask = torch.zeros(128, 39, 128, dtype=torch.bool)
    mask[:, 37:] = mask[64:, 1] = True  # of 64 rows block 1 has the first step, the last blocks have the second
    passes(2)
    incoming, found = torch.randn_like(query), []
    with gpu(90, max_lanes=2**15) as device:
        for large in (0.0, 2.0**24):
            key[:, :, 37:] = large * key[:, :, 1:2] * torch.tensor([1.0, -1.0])[:, None, None]
            inputs = query, key.flatten(2, 3).requires_grad_(), value
            out = _attend(*inputs, mask=mask.flatten(1))
            found.append(torch.autograd.grad(out, inputs, incoming)[0])
            assert [x.name for x in device.launches].count("backward") == len(found)
    assert found[0].any() and torch.equal(*found)


def test_a_part_of_a_plan_shares_its_words():
    """A plan whose block mask is the last batch of a larger one has the numbers of words far behind its own."""
    inputs, mask = _drawn(64, 64), torch.rand(40, 1, 64, 64) < 0.5
    plan = fa.plan(mask)
    part = plan._replace(block_mask=plan.block_mask[39:], shape=(1, 1, 64, 64))
    with gpu(90):
        got = differentiated(_attend, inputs, mask=part)
    assert_like(got, lambda: differentiated(fa.reference.eager, inputs, mask=mask[39:]))


@pytest.mark.parametrize("row", [0, 1, 64])
def test_caches_of_one_key_have_any_stride_of_rows_and_lengths_are_clamped(row, unchecked):
    query, cache = torch.randn(2, 1, 128, 64, **BF16), torch.randn(2, 1, 1, 64, **BF16)
    cache = cache.as_strided(cache.shape, (64, 64, row, 1))
    with gpu(90):
        ends, new = torch.tensor([2**31 - 1, -5], dtype=torch.int32), dict.fromkeys(("new_key", "new_value"), cache + 0)
        out = fa.attention_decode(query, cache, cache, cache_seqlens=ends, **new, backend="hopper")
    assert torch.equal(out, cache.expand_as(out))
