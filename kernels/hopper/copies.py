"""Copies by the tensor memory accelerator, under the names of Triton 3.8; older versions have other names.

Triton 3.9 keeps the older names, which raise when a kernel that calls them is compiled.
"""

from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):
    async_load, async_store = tma.async_load, tma.async_store
else:
    async_load, async_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
