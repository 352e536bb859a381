"""Strides: the order of dimensions in memory, and tensors that share it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .private import holds, known


def is_contiguous(tensor: Tensor) -> bool:
    """Return whether a tensor is contiguous; False if a compiler cannot know."""
    if not (torch.compiler.is_compiling() or isinstance(tensor.numel(), torch.SymInt)):
        return tensor.is_contiguous()
    step: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if holds(size != 1, True) and not holds(stride == step, False):
            return holds(tensor.numel() == 0, False)
        step = step * size
    return True


def _is_smaller(stride: Any, other: Any) -> bool:
    """Return whether `stride` < `other`. If a compiler cannot know that, return whether `stride` divides `other`."""
    if holds(stride < other, False):
        return True
    return holds(stride < other, True) and holds(other % stride == 0, False)


def order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions sorted from the largest stride to the smallest; unsorted if a dimension is expanded."""
    axes, strides = list(range(tensor.dim())), tensor.stride()
    # Dimensions of one element keep their place, whatever their stride.
    places = [] if is_contiguous(tensor) else [axis for axis in axes if holds(tensor.shape[axis] > 1, True)]
    if any(holds(strides[axis] == 0, False) for axis in places):
        return tuple(axes)
    sorted_axes: list[int] = []
    for axis in places:  # an insertion sort, because strides may be symbolic
        place = len(sorted_axes)
        while place and _is_smaller(strides[sorted_axes[place - 1]], strides[axis]):
            place -= 1
        sorted_axes.insert(place, axis)
    for place, axis in zip(places, sorted_axes, strict=True):
        axes[place] = axis
    return tuple(axes)


def in_order(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the tensor with its dimensions in the order `axes` in memory, copied if needed."""
    return tensor.permute(*axes).contiguous().permute([axes.index(axis) for axis in range(len(axes))])


def dense(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised dense tensor with the device, order of dimensions and (by default) dtype of `like`."""
    if is_contiguous(like):
        return like.new_empty(shape, dtype=dtype)
    axes = order(like)
    empty = like.new_empty([shape[axis] for axis in axes], dtype=dtype)
    return empty.permute([axes.index(axis) for axis in range(len(axes))])


def arrange(tensor: Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return `tensor`, or a dense copy, with the order of dimensions in memory and (by default) dtype of `like`."""
    dtype = like.dtype if dtype is None else dtype
    if tensor.dtype == dtype and is_contiguous(like) and is_contiguous(tensor):
        return tensor
    axes, tensor = order(like), tensor.to(dtype)
    return tensor.contiguous() if axes == tuple(range(tensor.dim())) else in_order(tensor, axes)


def share(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors overlap in memory; if their strides differ, whether they begin at the same address."""
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or not (a.numel() and b.numel()):
        return False
    distance = b.storage_offset() - a.storage_offset()
    if a.stride() != b.stride():
        return distance == 0
    return _reaches(int(distance), sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True))


def _reaches(distance: int, dims: list[tuple[int, int, int]]) -> bool:
    """Return whether elements of two tensors can lie `distance` apart. dims: [(stride, size, size of the other)]."""
    if not dims:
        return distance == 0
    (stride, size, other), *rest = dims
    steps = (distance // stride, distance // stride + 1) if stride else (0,)  # smaller strides reach less than a step
    return any(-other < n < size and _reaches(distance - n * stride, rest) for n in steps)


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last; equal if it is empty."""
    first, elements = tensor.data_ptr(), 0
    if tensor.numel():
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + elements * tensor.itemsize


def narrow(tensor: Any) -> Any:
    """Undo an expand: keep one element along each dimension with stride 0. None stays None."""
    if tensor is None or not any(shared := [known(step == 0, False) for step in tensor.stride()]):
        return tensor
    return tensor[tuple([slice(0, 1) if alike else slice(None) for alike in shared])]


def own_storage(tensor: Tensor) -> Tensor:
    """Return `tensor`, copied unless it fills its storage: torch requires a tangent with a storage of the same size."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize else tensor.clone()


def row_major(tensor: Tensor) -> Tensor:
    """Return `tensor` with row-major strides, even if it is empty: torch calls every empty tensor contiguous."""
    return tensor.contiguous() if holds(tensor.numel() != 0, True) else tensor.new_empty(tensor.shape)
