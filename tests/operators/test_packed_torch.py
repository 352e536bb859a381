"""Tests of packed sequences in compiled and exported code, and of their second derivatives."""

import pytest
import torch

import fusedattn as fa

from ..cases import Case
from ..close import assert_like
from ..inside import leaves, same
from ..sequences import attention_varlen, by_sequence, draw_packed, offsets


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["triton", "naive", "cpu"])
@pytest.mark.one_in(3)
def test_compiled_code_knows_no_lengths(backend, device):
    def attend(*tensors):
        return fa.attention_varlen(*tensors, max_seqlen_q=32, max_seqlen_k=32, causal=True, backend=backend)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, keys in (((5, 18), (9, 20)), ((1, 4), (5, 6))):
        *tensors, grad = draw_packed(rows, keys, device)
        tensors += offsets(rows, device), offsets(keys, device)

        def results(function, tensors=tensors, grad=grad):
            out = function(*tensors)
            return out, *torch.autograd.grad(out, tensors[:3], grad)

        if backend != "naive":
            same(results(compiled), results(attend))
        else:  # compiled code may round differently
            assert_like(results(compiled), lambda: results(attend))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Packed(torch.nn.Module):
    def forward(self, x, cu_seqlens):
        return fa.attention_varlen(x, x, x, cu_seqlens, cu_seqlens, max_seqlen_q=16, max_seqlen_k=16, softcap=3.0)


def test_an_export_takes_any_number_of_sequences():
    sequences, tokens = torch.export.Dim("sequences", min=3, max=99), torch.export.Dim("tokens", min=2, max=999)
    inputs = torch.randn(9, 2, 8), torch.tensor([0, 3, 7, 9], dtype=torch.int32)
    exported = torch.export.export(Packed(), inputs, dynamic_shapes=({0: tokens}, {0: sequences})).module()
    for lengths in ((3, 4, 2), (5, 16), (1, 0, 8, 2, 6)):
        inputs = torch.randn(sum(lengths), 2, 8), offsets(lengths)
        assert_like(exported(*inputs), Packed().forward, *inputs)


@pytest.mark.parametrize("backend", ["triton", "naive"])
def test_second_derivatives(backend, device):
    rows, keys = (2, 0, 3), (3, 2, 2)
    case = Case("", B=3, Sq=3, Sk=3, causal=True, softcap=1.5, bias="pairs", sinks=True, dtype=torch.float32)
    tensors, options = case.draw(device)
    inputs = [*(tensors[name] for name in ("query", "key", "value")), options.pop("bias"), options.pop("sinks")]

    def derive(attend):
        made = leaves(*inputs)
        query, key, value, bias, sinks = made
        more = options | dict(bias=bias, sinks=sinks, return_lse=True, return_weights=True)
        out, lse, weights = attend(query, key, value, **more)
        total = (out * tensors["out"]).sum() + lse[lse > -1e9].square().sum() + weights.pow(3).sum()
        first = torch.autograd.grad(total, made, create_graph=True)
        return torch.autograd.grad(sum(x[x.isfinite()].square().sum() for x in first), made)

    got = derive(attention_varlen(rows, keys, backend))
    assert_like(got, derive, by_sequence(fa.reference.eager, rows, keys))
