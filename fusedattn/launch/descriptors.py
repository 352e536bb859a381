"""TMA descriptors of the tensors that Hopper's kernels read and write."""

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16, float32
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import arguments, hopper, tile_table

_DTYPES = {torch.bfloat16: bfloat16, torch.float16: float16, torch.float32: float32}


@cache
def _layout(tile, dtype):
    return NVMMASharedLayout.get_default_for([*tile], _DTYPES[dtype])


def descriptor(
    tensor: Tensor, rows: int, columns: int | None = None, packed: bool = False, heads: int = 1
) -> TensorDescriptor:
    """Return a TMA descriptor of (B, H, S, D), for blocks of `heads` heads, `rows` rows and `columns` (None: all).

    If packed, B is 1, and TMA neither loads nor stores past the end of a sequence. Source: triton/tools/ragged_tma.py.
    Two more dimensions have strides of 2**34 - s and s, where s is the stride of a row. Their coordinates, 2**30 and
    the end of the sequence, add up to the address 2**30 rows before that end, because addresses wrap around at 2**64.
    Counted from there, the sequence ends with row 2**30 - 1. The descriptor has 2**30 rows: later rows are outside.
    """
    shape, strides, block = arguments.block(tensor, rows)
    block = [1, heads, rows, block[3] if columns is None else columns]
    tile = [1, 1, heads * rows, block[3]]
    if packed:
        (_, all_heads, total, width), (_, head, row, _) = shape, strides
        shape = [hopper.RAGGED_ROWS + 1, total + 1, all_heads, hopper.RAGGED_ROWS, width]
        strides, block, tile = [2**34 - row, row, head, row, 1], [1, *block], [1, *tile]
    return TensorDescriptor(tensor, shape, strides, block, _layout(tuple(tile), tensor.dtype))


def of_bias(call, keys):
    bias = hopper.by_tiles(call)
    if bias is None:
        return None
    if bias.shape[2] == 1:  # TMA writes to shared memory at multiples of 128 bytes
        return descriptor(bias, 1, max(keys, 128 // bias.element_size()))
    return descriptor(bias, tile_table.WARPGROUP_ROWS, keys)


def of_words(words):
    """Return a TMA descriptor of mask_bits, as int32: Triton's descriptors have no 64-bit elements. None stays None."""
    if words is None:
        return None
    words = words.view(torch.int32)
    size = words.shape[1]
    return TensorDescriptor(words, [*words.shape], [size, 1], [1, size], NVMMASharedLayout(0, 32, 2))
