"""torch's FLOP counter counts our operators as it counts torch's own attention."""

import functools
import importlib
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import flop_counter

import fusedattn as fa
from fusedattn.operators.namespace import OPERATORS

from ..sequences import offsets

SHAPES = {  # of query, key and value
    "groups": ((2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
    "lengths": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8)),
    "width of values": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3)),
}
ROWS, KEYS = (3, 0, 2), (4, 2, 1)


@pytest.fixture(params=["triton", "cpu"])
def backend(request, device):
    if request.param == "cpu" != device:
        pytest.skip("about CPU tensors")
    return request.param


def counted(function):
    """({operator: what is counted of it}, what a function returns)."""
    with flop_counter.FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_flop_counts().get("Global", {}), result


def both(forward, backward):
    return {OPERATORS.forward: forward, OPERATORS.backward: backward}


def of_torch(shapes):
    """What is counted of a forward and a backward of one of torch's kernels for GPUs, of tensors without data."""
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
def test_a_forward_and_a_backward_count_as_torchs(name, backend, device):
    inputs = [torch.randn(shape, device=device, requires_grad=True) for shape in SHAPES[name]]
    want = of_torch(SHAPES[name])
    for _ in range(2):  # the second would be replayed
        out = fa.attention(*inputs, causal=True, backend=backend)
        assert counted(lambda out=out: out.sum().backward())[0] == {OPERATORS.backward: want[OPERATORS.backward]}
        assert counted(lambda: fa.attention(*inputs, causal=True, backend=backend).sum().backward())[0] == want


def of_packed(tensors, cu_seqlens, backend):
    """What is counted of a forward and a backward of packed sequences; what torch's formulas for its own say of it."""
    query, key, value = tensors
    longest = max(ROWS), max(KEYS)
    options = dict(max_seqlen_q=longest[0], max_seqlen_k=longest[1], backend=backend)
    got, _ = counted(lambda: fa.attention_varlen(*tensors, *cu_seqlens, **options).sum().backward())
    forward, backward = (
        flop_counter.flop_registry[x]
        for x in (torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)
    )
    rest = *cu_seqlens, *longest
    return got, both(forward(query, key, value, *rest), backward(query, query, key, value, None, None, *rest))


def draw_packed(device):
    tensors = [torch.randn(sum(x), 4, 8, device=device, requires_grad=True) for x in (ROWS, KEYS, KEYS)]
    return tensors, (offsets(ROWS, device), offsets(KEYS, device))


def test_each_packed_sequence_counts_with_its_own_length(backend, device):
    got, want = of_packed(*draw_packed(device), backend)
    assert got == want and got[OPERATORS.forward] == 2 * sum(a * b for a, b in zip(ROWS, KEYS, strict=True)) * 4 * 16


def test_a_packed_sequence_whose_length_nobody_knows_counts_with_the_longest(device):
    with FakeTensorMode():
        got, want = of_packed(*draw_packed(device), "triton")
    assert got == want and got[OPERATORS.forward] == 2 * 3 * max(ROWS) * max(KEYS) * 4 * 16


def test_packed_sequences_without_a_longest_count_all_pairs(device):
    with FakeTensorMode():
        tensors, cu_seqlens = draw_packed(device)
        got, _ = counted(lambda: fa.attention_varlen(*tensors, *cu_seqlens, backend="triton"))
    assert got == {OPERATORS.forward: 2 * sum(ROWS) * sum(KEYS) * 4 * 16}


@pytest.mark.parametrize("page", [None, 2], ids=["dense", "pages"])
@pytest.mark.parametrize("known", [True, False])
def test_each_row_of_a_cache_counts_with_its_own_length(known, page, backend, device):
    """With what is appended; where nobody knows the lengths, with all there is room for."""
    with torch.enable_grad() if known else FakeTensorMode():
        query, new = torch.randn(2, 4, 1, 8, device=device), torch.randn(2, 2, 1, 8, device=device)
        shape = (2, 2, 6, 8) if page is None else (6, 2, page, 8)
        caches = [torch.randn(shape, device=device) for _ in range(2)]
        table = None if page is None else torch.arange(6, device=device).view(2, 3).int()
        lengths = dict(cache_seqlens=torch.tensor([1, 4], device=device).int(), block_table=table)
        options = dict(new_key=new, new_value=new, backend=backend if known else "triton")
        got, _ = counted(lambda: fa.attention_decode(query, *caches, **lengths, **options))
    assert got == {OPERATORS.decode: 2 * (1 + 1 + 4 + 1 if known else 2 * 6) * 4 * 16}


@pytest.fixture
def late_counter(monkeypatch):
    """torch's counter, imported after the package and after all other calls."""
    monkeypatch.delitem(sys.modules, "torch.utils.flop_counter")
    monkeypatch.setattr(torch.utils, "flop_counter", None)
    module = importlib.import_module("torch.utils.flop_counter")
    assert module is not flop_counter
    return module.FlopCounterMode(display=False)


@pytest.mark.parametrize("backward_alone", [False, True])
def test_a_counter_that_is_imported_later_counts_a_backward(backward_alone, late_counter, backend, device):
    inputs = [torch.randn(1, 2, 4, 8, device=device, requires_grad=True) for _ in range(3)]
    attend = functools.partial(fa.attention, *inputs, backend=backend)
    before = attend() if backward_alone else None
    with late_counter:
        (before if backward_alone else attend()).sum().backward()
    counts = both(2 * 2 * 2 * 4 * 4 * 8, 5 * 2 * 2 * 4 * 4 * 8)
    if backward_alone:
        del counts[OPERATORS.forward]
    assert late_counter.get_flop_counts()["Global"] == counts


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_a_counter_that_is_imported_later_counts_a_decode(grad, late_counter, backend, device):
    query, *caches = (torch.randn(1, 2, length, 8, device=device) for length in (1, 6, 6))
    with grad(), late_counter:
        fa.attention_decode(query, *caches, cache_seqlens=torch.tensor([3], device=device).int(), backend=backend)
    assert late_counter.get_flop_counts()["Global"] == {OPERATORS.decode: 2 * 2 * 2 * 3 * 8}


def test_a_counter_that_is_imported_later_counts_an_exported_program(late_counter):
    class Model(torch.nn.Module):
        def forward(self, query):
            return fa.attention(query, query, query, backend="cpu")

    query = torch.randn(1, 2, 4, 8)
    program = torch.export.export(Model(), (query,)).module()
    with torch.no_grad(), late_counter:
        program(query)
    assert late_counter.get_flop_counts()["Global"] == {OPERATORS.forward: 2 * 2 * 2 * 4 * 4 * 8}


def test_a_formula_of_the_users_own_is_kept(device):
    inputs = [torch.randn(1, 2, 4, 8, device=device) for _ in range(3)]
    mine = {OPERATORS.forward: lambda *shapes, **others: 7}
    with flop_counter.FlopCounterMode(display=False, custom_mapping=mine) as counter:
        fa.attention(*inputs, backend="triton")
    assert counter.get_total_flops() == 7


def test_importing_the_package_imports_neither_the_counter_nor_a_finder():
    program = "import sys; before = [*sys.meta_path]; import fusedattn; assert sys.meta_path == before"
    program += "; assert not {'torch.utils.flop_counter', 'triton'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", program], check=True)
