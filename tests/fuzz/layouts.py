"""Layouts of tensors in memory: any order, offset and steps, among NaN, expanded, or overlapping."""

import itertools
from typing import NamedTuple

import torch


def shown(case):
    """A NamedTuple as code that makes it, without what is as it is by default."""
    named = {name: x for name, x in case._asdict().items() if x != case._field_defaults.get(name, shown)}
    return f"{type(case).__name__}({', '.join(f'{name}={x!r}' for name, x in named.items())})"


class Layout(NamedTuple):
    """order: which permutation of the dimensions lies in memory. step: of the innermost one. gap: behind each line."""

    order: int = 0
    step: int = 1
    gap: int = 0
    offset: int = 0
    expanded: tuple[int, ...] = ()  # these dimensions have one element, seen as often as they are long
    overlapping: bool = False  # each row begins one element behind the one before it

    __repr__ = shown

    @property
    def shared(self):
        """Return whether places share memory."""
        return bool(self.expanded) or self.overlapping


PLAIN = Layout()


def lay(tensor, layout):
    """The same values so laid out; where places share memory, those of the last that is written to it."""
    if layout == PLAIN or tensor.dim() == 0:
        return tensor.clone()
    rank, shape = tensor.dim(), tensor.shape
    if layout.overlapping and rank > 1 and tensor.numel():
        lines = [*shape[:-2], shape[-2] + shape[-1] - 1]
        made = _padding(tensor, layout.offset + torch.Size(lines).numel())[layout.offset :].view(lines)
        made.copy_(torch.linspace(-1, 1, made.numel(), dtype=torch.float64).sin().view(lines))
        made[..., : shape[-2]] = tensor[..., 0]
        return made.as_strided(shape, (*made.stride()[:-1], 1, 1), layout.offset)
    for axis in layout.expanded:
        if axis < rank and shape[axis]:
            tensor = tensor.narrow(axis, 0, 1)
    orders = list(itertools.islice(itertools.permutations(range(rank)), 24))
    order = orders[layout.order % len(orders)]
    inner = [tensor.shape[axis] for axis in order]
    line = inner[-1] * layout.step + layout.gap
    lines = _padding(tensor, layout.offset + torch.Size(inner[:-1]).numel() * line)[layout.offset :]
    view = lines.view(*inner[:-1], line)[..., : inner[-1] * layout.step : layout.step]
    view = view.permute([order.index(axis) for axis in range(rank)])
    return view.copy_(tensor).expand(shape)


def _padding(like, size):
    """Return the surrounding memory: NaN, True or the largest number."""
    if like.dtype == torch.bool:
        return like.new_ones(size)
    return like.new_full((size,), float("nan") if like.is_floating_point() else torch.iinfo(like.dtype).max)


def memory(x):
    """All of the memory that a tensor lies in, as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).clone()
