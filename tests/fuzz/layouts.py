"""Layouts of tensors in memory: any order, offset and steps, between NaN, expanded, or overlapping."""

import itertools
from typing import NamedTuple

import torch


def shown(case):
    """Return a NamedTuple as Python code, without default values."""
    named = {name: x for name, x in case._asdict().items() if x != case._field_defaults.get(name, shown)}
    return f"{type(case).__name__}({', '.join(f'{name}={x!r}' for name, x in named.items())})"


class Layout(NamedTuple):
    """Layout in memory: order (index of a permutation), step of the innermost dimension, and gap after each line."""

    order: int = 0
    step: int = 1
    gap: int = 0
    offset: int = 0
    expanded: tuple[int, ...] = ()  # dimensions of stride 0
    overlapping: bool = False  # each row starts one element after the previous one

    __repr__ = shown

    @property
    def shared(self):
        return bool(self.expanded) or self.overlapping


PLAIN = Layout()


def lay(tensor, layout):
    """Return a copy of a tensor with a layout; elements that share memory get one value."""
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
    """Return a new tensor of `size` elements, in the dtype of `like`: NaN, True or the largest integer."""
    if like.dtype == torch.bool:
        return like.new_ones(size)
    return like.new_full((size,), float("nan") if like.is_floating_point() else torch.iinfo(like.dtype).max)
