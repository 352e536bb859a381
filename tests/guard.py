"""Guarded tensors: they lie in larger buffers of canaries, which no call may change or depend on."""

from typing import NamedTuple

import torch

from .conftest import wrap_allocations

MARGIN = 192  # elements on each side; for every dtype a multiple of the 16 bytes of an aligned tensor


class Fill(NamedTuple):
    """Values of canaries: NaN or a number for floats, plausible values for other dtypes."""

    floats: float
    bools: bool
    ints: int

    def of(self, dtype):
        if dtype == torch.bool:
            return self.bools
        return self.floats if dtype.is_floating_point else min(self.ints, torch.iinfo(dtype).max)


NAN, PLAUSIBLE = Fill(float("nan"), True, 1), Fill(3.0, False, 10**6)


class Guard:
    """Makes guarded tensors, and checks their canaries.

    Args:
        fill: a Fill.
        gap: canaries behind each innermost line, so that no fast path takes the tensor. With 0 there are MARGIN
            canaries before the first element and behind the last, and no others.
    """

    def __init__(self, fill=NAN, gap=0):
        self.fill, self.gap, self.known = fill, gap, []

    def inside(self, tensor, name="?"):
        """Return a copy surrounded by canaries. An expanded dimension stays expanded."""
        narrow = tensor.detach()
        for axis, step in enumerate(tensor.stride()):
            narrow = narrow.narrow(axis, 0, 1) if step == 0 and tensor.shape[axis] else narrow
        shape = narrow.shape or (1,)
        width = shape[-1] + self.gap
        lines = torch.Size(shape[:-1]).numel() * width
        buffer = self._buffer(lines, tensor.dtype)
        view = buffer[MARGIN : MARGIN + lines].view(*shape[:-1], width)[..., : shape[-1]].view_as(narrow)
        view.copy_(narrow)
        view = view.expand(tensor.shape)
        self.known.append((name, view, whole(view)))
        return view

    def _buffer(self, size, dtype):
        return torch.empty(size + 2 * MARGIN, dtype=dtype).fill_(self.fill.of(dtype))

    def allocates(self, monkeypatch):
        """Surround memory that the package allocates by canaries, and fill its uninitialised elements with them."""
        wrap_allocations(monkeypatch, self._guarded, ("new_empty", "new_empty_strided", "new_zeros", "new_full"))

    def _guarded(self, make, name):
        filled = name in ("new_zeros", "new_full")

        def guarded(*shape, **options):
            made = make(*shape, **options)
            if type(made) is not torch.Tensor or made.device.type != "cpu" or not made.numel():
                return made
            buffer = self._buffer(made.untyped_storage().nbytes() // made.element_size(), made.dtype)
            # Not a view of the buffer: autograd refuses views made inside its functions.
            new = torch.empty(0, dtype=made.dtype).set_(buffer.untyped_storage(), MARGIN, made.shape, made.stride())
            new = new.copy_(made) if filled else new
            self.known.append((f"{name} of {tuple(made.shape)}", new, whole(new)))
            return new

        return guarded

    def check(self, **may_change):
        """Raise AssertionError if canaries or inputs have changed.

        may_change: {name of an input: a mask of the bytes of its memory that may change}. The package may write all
        elements of memory that it allocated.
        """
        for name, view, before in self.known:
            changed = whole(view) != before
            if name in may_change:
                changed &= ~may_change[name]
            elif " of (" in name:
                changed &= ~elements(view)
            assert not changed.any(), f"{name}: {int(changed.sum())} bytes changed, {changed.nonzero()[0].item()} first"


def whole(tensor):
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


def elements(tensor):
    """Return a mask of all bytes of a tensor's memory: True inside its elements."""
    mark = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.bool)
    mark.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
    return mark.repeat_interleave(tensor.element_size())
