"""Kernel that computes the layout of packed sequences: their starts, lengths, and the order of their blocks."""

import triton
import triton.language as tl


@triton.jit
def _extent(offsets, i, exists, total, most):
    """Return (start, length) of packed sequences i. Offsets are unchecked, so clamp them to [0, total]."""
    start = tl.minimum(tl.maximum(tl.load(offsets + i, mask=exists, other=0), 0), total)
    end = tl.minimum(tl.maximum(tl.load(offsets + i + 1, mask=exists, other=0), 0), total)
    return start, tl.minimum(tl.maximum(end - start, 0), most)


@triton.jit(do_not_specialize=["n", "q_len", "k_len", "max_seqlen_q", "max_seqlen_k", "size"])
def fill_slots(
    Slots, Extents, Used, OffsetsQ, OffsetsK,
    n, q_len, k_len, max_seqlen_q, max_seqlen_k, size,
    BLOCK: tl.constexpr, BY_KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the Extents (n, 4) of n packed sequences and, unless None, the Slots (size, 2) of their blocks, int32."""
    # An extent is (first row, rows, first key, keys). A slot is the (sequence, block of BLOCK rows or keys) that one
    # program of each head computes. The most work comes first. Unused slots stay as they are. Used, unless None, gets
    # the number of used slots. The grid has a program for each sequence.
    number = tl.program_id(0)
    row, rows = _extent(OffsetsQ, number, True, q_len, max_seqlen_q)
    key, keys = _extent(OffsetsK, number, True, k_len, max_seqlen_k)
    extent = row, rows, key, keys
    for column in tl.static_range(4):
        tl.store(Extents + number * 4 + column, extent[column])
    if Slots is not None:
        length = rows if BY_KEYS else keys
        before = number.to(tl.int64) * 0  # int64: unchecked offsets that fall and rise may add up to over 2**31 rows
        used = before
        for start in tl.range(0, n, CHUNK):
            i = start + tl.arange(0, CHUNK)
            exists = i < n
            _, other_rows = _extent(OffsetsQ, i, exists, q_len, max_seqlen_q)
            _, other_keys = _extent(OffsetsK, i, exists, k_len, max_seqlen_k)
            longer = other_rows if BY_KEYS else other_keys
            count = tl.cdiv(other_keys if BY_KEYS else other_rows, BLOCK)
            if Used is not None:
                used += tl.sum(tl.where(exists, count, 0))
            before += tl.sum(tl.where(exists & ((longer > length) | ((longer == length) & (i < number))), count, 0))
        if Used is not None:
            tl.store(Used, tl.minimum(used, size).to(tl.int32), mask=number == 0)
        blocks = tl.cdiv(keys if BY_KEYS else rows, BLOCK)
        for start in tl.range(0, blocks, CHUNK):
            block = start + tl.arange(0, CHUNK)
            slot = Slots + (before + block) * 2
            exists = (block < blocks) & (before + blocks <= size)  # all blocks of a sequence, or none
            tl.store(slot, block * 0 + number, mask=exists)
            tl.store(slot + 1, block, mask=exists)
