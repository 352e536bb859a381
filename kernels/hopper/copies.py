"""TMA copies under the names that Triton 3.8 gives them, and a view of shared memory, for each version of Triton.

Triton 3.9 keeps the older names, which raise when a kernel that calls them is compiled.
"""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared as fence_async_shared, tma

if hasattr(tma, "async_load"):
    async_load, async_store = tma.async_load, tma.async_store
else:
    async_load, async_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global


@builtin
def as_blocks(tensor_desc, memory, _semantic=None):
    """Return a view of shared memory in blocks of a descriptor, which has the same rows and element size."""
    block = list(tensor_desc.block_type.shape)
    shape = [memory.shape[0] * memory.shape[-1] // block[-1], *block]
    return _semantic.memdesc_reinterpret(memory, tensor_desc.dtype, shape, tensor_desc.layout)


@builtin
def async_add(tensor_desc, coord, src, _semantic=None):
    """Begin to add a tile of shared memory to global memory by TMA; `store_wait` waits for the end."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)
