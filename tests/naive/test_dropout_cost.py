"""Operations that dropout takes on a CPU, counted."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusedattn as fa
from fusedattn.naive import dropout


class Products(TorchDispatchMode):
    """Counts the elements of integer products."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor) and found.dtype == torch.int64:
            self.elements += found.numel()
        return found


def test_the_first_rounds_are_of_few_numbers():
    """Round 1 multiplies rows and planes, round 2 pairs with planes, round 3 one of two words of all counters."""
    planes = torch.arange(4)
    with Products() as products:
        dropout.keep(torch.tensor(3), planes, 0, 128, 128, 0.5)
    assert products.elements < 9.5 * 4 * 64 * 64


def test_weights_need_no_second_draw(monkeypatch):
    drawn, keep = [], dropout.keep
    monkeypatch.setattr(dropout, "keep", lambda *more: drawn.append(more) or keep(*more))
    query, key, value = torch.randn(3, 2, 4, 60, 32)
    fa.attention(query, key, value, dropout_p=0.5, seed=1, return_weights=True)
    assert len(drawn) == 1
