"""Tests that torch's FLOP counter counts our operators as it counts torch's own attention."""

import functools
import importlib
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter

import fusedattn as fa

from ..sequences import offsets

OPERATORS = torch.ops.fusedattn
SHAPES = {  # shapes of query, key and value
    "groups": ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
    "lengths": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
    "width of values": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3)),
}
ROWS, KEYS = (3, 0, 2), (4, 2, 1)


def counted(function):
    with flop_counter.FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_flop_counts().get("Global", {}), result


def both(forward, backward):
    return {OPERATORS.forward: forward, OPERATORS.backward: backward}


def of_torch(shapes):
    """Return the FLOP counts of a forward and a backward of torch's own memory-efficient kernel."""
    query, key, value = (torch.empty(shape, device="meta", dtype=torch.float16) for shape in shapes)
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    aten = torch.ops.aten
    forward, (out, lse, *seed) = counted(
        lambda: aten._scaled_dot_product_efficient_attention(query, key, value, None, True)
    )
    arguments = out, query, key, value, None, out, lse, *seed, 0.0, [True, True, True, False]
    backward, _ = counted(lambda: aten._scaled_dot_product_efficient_attention_backward(*arguments))
    return both(sum(forward.values()), sum(backward.values()))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.one_in(2)
def test_a_forward_and_a_backward_count_as_torchs(name, backend, device):
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in SHAPES[name]]
    want = of_torch(SHAPES[name])
    for _ in range(2):  # without the counter, the second call would be a replay
        out = fa.attention(*inputs, causal=True, backend=backend)
        assert counted(lambda out=out: out.sum().backward())[0] == {OPERATORS.backward: want[OPERATORS.backward]}
        assert counted(lambda: fa.attention(*inputs, causal=True, backend=backend).sum().backward())[0] == want


def of_packed(tensors, cu_seqlens, backend):
    """Return the FLOP counts of packed sequences by our operators and by torch's own formulas."""
    query, key, value = tensors
    options = dict(max_seqlen_q=max(ROWS), max_seqlen_k=max(KEYS), backend=backend)
    got, _ = counted(lambda: fa.attention_varlen(*tensors, *cu_seqlens, **options).sum().backward())
    aten, formulas = torch.ops.aten, flop_counter.flop_registry
    forward, backward = formulas[aten._flash_attention_forward], formulas[aten._flash_attention_backward]
    rest = *cu_seqlens, max(ROWS), max(KEYS)
    return got, both(forward(query, key, value, *rest), backward(query, query, key, value, None, None, *rest))


def draw_packed(device):
    tensors = [torch.randn(sum(x), 4, 8, device=device, requires_grad=True) for x in (ROWS, KEYS, KEYS)]
    return tensors, (offsets(ROWS, device), offsets(KEYS, device))


def test_each_packed_sequence_counts_with_its_own_length(backend, device):
    got, want = of_packed(*draw_packed(device), backend)
    assert got == want and got[OPERATORS.forward] == 2 * sum(a * b for a, b in zip(ROWS, KEYS, strict=True)) * 4 * 16


def test_packed_sequences_of_unknown_lengths_count_with_the_longest_or_all_pairs(device):
    with FakeTensorMode():
        tensors, cu_seqlens = draw_packed(device)
        got, want = of_packed(tensors, cu_seqlens, "triton")
        every, _ = counted(lambda: fa.attention_varlen(*tensors, *cu_seqlens, backend="triton"))
    assert got == want and got[OPERATORS.forward] == 2 * 3 * max(ROWS) * max(KEYS) * 4 * 16
    assert every == {OPERATORS.forward: 2 * sum(ROWS) * sum(KEYS) * 4 * 16}


@pytest.mark.parametrize("page", [None, 2], ids=["dense", "pages"])
@pytest.mark.parametrize("known", [True, False])
def test_each_row_of_a_cache_counts_with_its_own_length(known, page, backend, device):
    """FLOPs of a cache count the length and new keys of each sequence; if lengths are unknown, the capacity counts."""
    with torch.enable_grad() if known else FakeTensorMode():
        query, new = torch.randn(2, 4, 1, 8, device=device), torch.randn(2, 2, 1, 8, device=device)
        shape = (2, 2, 6, 8) if page is None else (6, 2, page, 8)
        caches = [torch.randn(shape, device=device) for _ in range(2)]
        table = None if page is None else torch.arange(6, device=device).view(2, 3).int()
        lengths = dict(cache_seqlens=torch.tensor([1, 4], device=device).int(), block_table=table)
        options = dict(new_key=new, new_value=new, backend=backend if known else "triton")
        got, _ = counted(lambda: fa.attention_decode(query, *caches, **lengths, **options))
    assert got == {OPERATORS.decode: 2 * (1 + 1 + 4 + 1 if known else 2 * 6) * 4 * 16}


class Model(torch.nn.Module):
    def forward(self, *inputs):
        return fa.attention(*inputs, backend="cpu")


@pytest.mark.parametrize("what", ["forward and backward", "backward", "decode", "an exported program"])
def test_a_counter_that_is_imported_later_counts(what, backend, device, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.flop_counter")
    monkeypatch.setattr(torch.utils, "flop_counter", None)
    module = importlib.import_module("torch.utils.flop_counter")
    assert module is not flop_counter
    late_counter = module.FlopCounterMode(display=False)
    inputs = [torch.randn(1, 2, 4, 8, device=device, requires_grad=what != "decode") for _ in range(3)]
    lengths = torch.tensor([3], device=device).int()
    attend = functools.partial(fa.attention, *inputs, backend=backend)
    products = 2 * 2 * 2 * 4 * 4 * 8
    want = both(products, 5 * products // 2)
    if what == "an exported program":
        program = torch.export.export(Model(), tuple(x.cpu() for x in inputs)).module()
        with torch.no_grad(), late_counter:
            program(*(x.cpu() for x in inputs))
        del want[OPERATORS.backward]
    elif what == "decode":
        for grad in (torch.no_grad, torch.inference_mode):
            with grad(), late_counter:
                fa.attention_decode(*inputs, cache_seqlens=lengths, backend=backend)
            want = {OPERATORS.decode: 2 * 2 * 2 * 4 * 3 * 8}
    elif what == "backward":
        out = attend()
        with late_counter:
            out.sum().backward()
        del want[OPERATORS.forward]
    else:
        with late_counter:
            attend().sum().backward()
    assert late_counter.get_flop_counts()["Global"] == want


def test_a_formula_of_the_users_own_is_kept(device):
    inputs = [torch.randn(1, 2, 4, 8, device=device) for _ in range(3)]
    mine = {OPERATORS.forward: lambda *shapes, **others: 7}
    with flop_counter.FlopCounterMode(display=False, custom_mapping=mine) as counter:
        fa.attention(*inputs, backend="triton")
    assert counter.get_total_flops() == 7
