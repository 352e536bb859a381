"""Tests that calls compiled or exported with data-dependent sizes need no guards, and check sizes at run time."""

import functools

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked

import fusedattn as fa
from fusedattn.call.options import AssumedGPU, override
from fusedattn.compat import flash_attn, torch as drop_in

from ..close import assert_like
from ..inside import same

B, H, S, D = 3, 4, 12, 16
OFFSETS = torch.tensor([0, 4, S], dtype=torch.int32)
MODULE = fa.MultiHeadAttention(2 * D, 2)
DROP_IN = drop_in.MultiheadAttention(2 * D, 2, batch_first=True)
LAYER = drop_in.convert(torch.nn.TransformerEncoderLayer(2 * D, 4, 64, dropout=0.0, batch_first=True))


@pytest.fixture(autouse=True)
def _dynamic():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def draw(*shape):
    return torch.randn(shape, requires_grad=True)


def mask(*shape):
    return torch.rand(shape) < 0.8


def dense():
    return [(draw(B, H, S, D), (0, 2)) for _ in range(3)]


def packed():
    return [(draw(S, H, D), (0,)) for _ in range(3)]


def attend(query, key, value, backend=None, mask=None, bias=None, key_mask=None, slopes=None, **options):
    options |= dict(mask=mask, bias=bias, key_mask=key_mask, alibi_slopes=slopes)
    return fa.attention(query, key, value, backend=backend, return_lse=True, **options)


def varlen(query, key, value, key_mask=None):
    longest = {} if key_mask is None else dict(max_seqlen_q=8, max_seqlen_k=8, key_mask=key_mask)
    return fa.attention_varlen(query, key, value, OFFSETS, OFFSETS, causal=True, **longest)


def decode(query, keys, values, lengths, backend=None):
    return fa.attention_decode(query, keys, values, cache_seqlens=lengths, backend=backend)


def caches():
    return [*((torch.randn(B, H, rows, D), (0,)) for rows in (1, S, S)), (torch.tensor([3, 12, 9]).int(), (0,))]


sdpa, ROWS = drop_in.scaled_dot_product_attention, (draw(B, S, 2 * D), (0, 1))
# {name: (function, [(tensor, its dimensions of data-dependent size)])}
CASES = {
    "key mask": (lambda *x: attend(*x[:3], key_mask=x[3], causal=True), [*dense(), (mask(B, S), (0, 1))]),
    "mask, naive": (lambda *x: attend(*x[:3], "naive", mask=x[3]), [*dense(), (mask(B, 1, S, S), (0, 2, 3))]),
    "slopes": (lambda *x: attend(*x[:3], slopes=x[3]), [*dense(), (draw(B, H), (0,))]),
    "bias, triton": (lambda *x: attend(*x[:3], "triton", bias=x[3]), [*dense(), (draw(B, H, S, S), (0, 2, 3))]),
    "decode, triton": (functools.partial(decode, backend="triton"), caches()),
    "sdpa": (functools.partial(sdpa, is_causal=True), dense()),
    "decode": (decode, caches()),
    "sdpa mask": (sdpa, [*dense(), (mask(B, 1, S, S), (0, 2, 3))]),
    "sdpa groups": (functools.partial(sdpa, enable_gqa=True), [(draw(B, n, S, D), (0, 2)) for n in (H, 2, 2)]),
    "sdpa, one batch of keys": (
        sdpa,
        [(draw(B, H, S, D), (0, 2)), *((draw(1, H, S, D), (2,)) for _ in range(2)), (mask(1, 1, S, S), (2, 3))],
    ),
    "varlen": (varlen, packed()),
    "flash": (flash_attn.flash_attn_func, [(draw(B, S, H, D), (0, 1)) for _ in range(3)]),
    "varlen key mask": (varlen, [*packed(), (mask(S), (0,))]),
    "module": (lambda x, seen: MODULE(x, key_mask=seen)[0], [ROWS, (mask(B, S), (0, 1))]),
    "drop-in module": (lambda x, hidden: DROP_IN(x, x, x, key_padding_mask=hidden)[0], [ROWS, (~mask(B, S), (0, 1))]),
    "layer": (LAYER, [(draw(B, S, 2 * D), (0,))]),
}
ON_GPUS = {
    "bias": (lambda *x: attend(*x[:3], bias=x[3]), [*dense(), (draw(B, H, S, S), (0, 2, 3))]),
    "transposed keys": (lambda q, x: attend(q, x.mT, x.mT), [dense()[0], (draw(B, H, D, S), (0, 3))]),
    "decode": (decode, [(x, dims if x.dim() == 1 else (0, 2)) for x, dims in caches()]),
}


def results(function, given):
    got = function(*given)
    got = got if isinstance(got, tuple) else (got,)
    needed = [x for x in given if x.requires_grad]
    return [*got, *(torch.autograd.grad(sum(x.clamp(-99, 99).sum() for x in got), needed) if needed else ())]


def marked(given):
    tensors = [x.detach().clone().requires_grad_(x.requires_grad) for x, _ in given]
    for x, (_, dims) in zip(tensors, given, strict=True):
        mark_unbacked(x, dims)
    return tensors


@pytest.mark.parametrize("name", CASES)
@pytest.mark.one_in(7)
def test_sizes_that_depend_on_data_are_not_guarded_on(name):
    function, given = CASES[name]
    got = results(torch.compile(function, fullgraph=True, backend="aot_eager"), marked(given))
    assert_like(got, results, function, [x for x, _ in given])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["bias", "transposed keys", "decode"])
def test_sizes_that_depend_on_data_are_not_guarded_on_for_a_gpu(name, capability):
    function, given = ON_GPUS[name]
    with override(gpu=AssumedGPU(capability)), pytest.raises(ZeroDivisionError):  # by the graph
        torch.compile(function, fullgraph=True, backend=lambda *_: lambda *_: 1 / 0)(*marked(given))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.one_in(2)
def test_kept_batches_and_lengths_in_training(compiler):
    def step(query, key, value, seen, batches, rows, attend=sdpa):
        query, key, value = (x[batches][:, :, rows] for x in (query, key, value))
        return attend(query, key, value, seen[batches][:, :, rows][..., rows])

    query, key, value = (draw(B, H, S, D) for _ in range(3))
    given = query, key, value, mask(B, 1, S, S), torch.tensor([True, False, True]), torch.arange(S) % 3 > 0
    torchs = functools.partial(step, attend=torch.nn.functional.scaled_dot_product_attention)
    got = results(torch.compile(step, fullgraph=True, backend=compiler), given)
    assert_like(got, results, torchs, given)


@pytest.mark.parametrize("strict", [True, False])
def test_an_export_that_keeps_batches_takes_any(strict):
    class Kept(torch.nn.Module):
        def forward(self, query, key_mask, keep):
            return fa.attention(*[query[keep]] * 3, key_mask=key_mask[keep])

    query, key_mask, first = torch.randn(B, H, S, D), mask(B, S), torch.tensor([True, False, True])
    program = torch.export.export(Kept(), (query, key_mask, first), strict=strict).module()
    for keep in (first, ~first, torch.ones(B, dtype=torch.bool)):
        same([program(query, key_mask, keep)], [Kept()(query, key_mask, keep)])


def test_sizes_that_do_not_fit_raise_at_run_time():
    def step(query, key_mask, keep, others):
        return fa.attention(*[query[keep]] * 3, key_mask=key_mask[others])

    given = torch.randn(B, H, S, D), mask(B, S), torch.tensor([True, False, True]), torch.tensor([True, True, True])
    with pytest.raises(RuntimeError, match="assertion failed"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(*given)
