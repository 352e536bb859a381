"""The order in which a tensor's dimensions lie in memory, and tensors made in the order of another."""


def order(tensor):
    """Dimensions from the slowest to the fastest in memory; row-major where an expanded dimension leaves it open."""
    strides = tensor.stride()
    if any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)):
        return tuple(range(tensor.dim()))
    axes = []
    for axis, stride in enumerate(strides):
        # Dimensions of one element keep their place, whatever stride they carry. No sort(): strides may be symbolic.
        place = len(axes)
        while place and strides[axes[place - 1]] < stride and tensor.shape[axis] > 1:
            place -= 1
        axes.insert(place, axis)
    return tuple(axes)


def dense(like, shape):
    """An uninitialised tensor of `shape`, without gaps, in the dtype, device and dimension order of `like`."""
    axes = order(like)
    made = like.new_empty([shape[axis] for axis in axes])
    return made.permute([axes.index(axis) for axis in range(len(axes))])


def arrange(tensor, like):
    """`tensor` in the dtype and dimension order of `like`, without gaps; differentiable, a copy only if needed."""
    if tensor.dtype == like.dtype and like.is_contiguous() and tensor.is_contiguous():
        return tensor
    axes = order(like)
    tensor = tensor.to(like.dtype)
    if axes == tuple(range(tensor.dim())):
        return tensor.contiguous()
    return tensor.permute(axes).contiguous().permute([axes.index(axis) for axis in range(len(axes))])
