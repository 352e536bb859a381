"""Kernel that appends new keys and values to caches: one program per block of new tokens, kv head and sequence."""

import triton
import triton.language as tl

from .vocabulary import columns, memory, pages as paging, rotary as turning, span


@triton.jit(do_not_specialize=["heads", "capacity", "added", "pages", "positions"])
def append(
    K, V,
    cache, rotary, heads, capacity, added, pages, positions,
    spec: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Append new keys K and values V, Views of (B, Hkv, added, D or DV), to the cache; drop those past its capacity."""
    block, plane = span.place(tl.program_id(0), added, heads, BLOCK_M)
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    before = paging.length(cache, plane, capacity)
    exists = rows < tl.minimum(added, capacity - before)
    at = before + rows
    page = paging.number(cache, plane, at, exists, spec.PAGE)
    if cache.table is not None:
        exists &= (page >= 0) & (page < pages)
    lines = paging.rows(at, spec.PAGE)
    k = turning.load(memory.matrix(K, plane), rows, exists, rotary, at, positions, spec)
    v = memory.load(memory.matrix(V, plane), rows, exists, spec.DV)
    keys = paging.matrix(cache.K, plane, page[:, None], pages)
    for n in tl.static_range(columns.count(spec.D)):
        tile = columns.tile_of(k, n, spec.D)
        memory.store(columns.part(keys, n), lines, exists, tile, columns.size(spec.D, n))
    memory.store(paging.matrix(cache.V, plane, page[:, None], pages), lines, exists, v, spec.DV)
