"""Kernels that compute the block mask (blocks with no, some or all pairs visible), and list the tiles to compute."""

import triton
import triton.language as tl

from .vocabulary import masks as masking, memory, span, walk
from .vocabulary.masks import BLOCK, CONSTANT, EMPTY, FULL, SOME


@triton.jit(do_not_specialize=["heads", "rows", "keys"])
def block_mask(BlockMask, Words, extents, masks, bias, heads, rows, keys):
    """Fill BlockMask (B, H, row blocks, key blocks), int32, contiguous: a program computes the entry of one block."""
    # Words, unless None, gets masks.pairs in bits. If masks.pairs hides a part of a block, the block's entry is the
    # index of its words (see `masks.Bits`). B or H is 1 if masks and bias do not vary along it. A bias (View or None)
    # of -inf hides its pair. Such a bias, which kernels always load, does not keep a block from being FULL, nor does a
    # hidden row, whose output is overwritten. For packed sequences (extents), rows and keys are maximum lengths; pairs
    # past the end do not count.
    down, right, plane = span.place_tile(rows, keys, heads, BLOCK, BLOCK)
    bits = tl.arange(0, BLOCK)
    r, c = down * BLOCK + bits[:, None], right * BLOCK + bits[None, :]
    plane, seq_rows, seq_keys = span.within(extents, plane, rows, keys, ())
    seq_rows, seq_keys = tl.minimum(seq_rows, rows), tl.minimum(seq_keys, keys)
    exists = (r < seq_rows) & (c < seq_keys)
    real = masking.real_rows(masks, plane, r, seq_rows)
    seen = exists & masking.real_keys(masks, plane, c, seq_keys)
    if masks.pairs is not None:
        shown = memory.load_pairs(memory.matrix(masks.pairs, plane), r, c, rows, keys, CHECK=True) != 0
        seen &= shown
    every = tl.min(tl.min((seen | ~exists | ~real).to(tl.int32), 1), 0)
    seen &= real
    if bias is not None:
        b = memory.load_pairs(memory.matrix(bias, plane), r, c, rows, keys, CHECK=True)
        seen &= memory.cast(b, tl.float32) > float("-inf")
    some = tl.max(tl.max(seen.to(tl.int32), 1), 0)
    mark = tl.where(some == 0, EMPTY, tl.where(every != 0, FULL, SOME))
    if Words is not None:
        number = tl.program_id(0) + CONSTANT
        whole = tl.min(tl.min((shown | (r >= rows) | (c >= keys)).to(tl.int32), 1), 0)
        cut = (mark == SOME) & (whole == 0)
        mark = tl.where(cut, number, mark)
        words = tl.sum(shown.to(tl.int64) << bits[None, :], 1)
        tl.store(Words + number.to(tl.int64) * BLOCK + bits, words)
        if tl.program_id(0) == 0:
            for constant in tl.static_range(CONSTANT):
                tl.store(Words + constant * BLOCK + bits, words * 0 - (constant != EMPTY))
            end = tl.num_programs(0) + CONSTANT
            for spare in range(end, tl.cdiv(end, 16) * 16):  # Words has a multiple of 16 blocks
                tl.store(Words + tl.cast(spare, tl.int64) * BLOCK + bits, words * 0)
    tl.store(BlockMask + tl.program_id(0), mark)


@triton.jit
def transpose_words(Words, ByKeys):
    """Fill ByKeys, int64 like Words (count, BLOCK): bit r of word c is bit c of word r. A program takes one block."""
    bits = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * BLOCK + bits
    seen = (tl.load(Words + at)[:, None] >> bits[None, :]) & 1
    tl.store(ByKeys + at, tl.sum(seen << bits[:, None], 0))


@triton.jit(do_not_specialize=["heads", "q_len", "k_len", "tile_count", "left", "right"])
def tile_lists(
    Lists, sequences, block_mask, heads, q_len, k_len, tile_count, left, right,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TOP_LEFT: tl.constexpr,
    BY_KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Fill Lists (B, H, blocks, 2, most + 2), int64: for each block its partly visible tiles, then its full ones."""
    # Lists is contiguous. A list is [count, tile 0, tile 1, ..., 0]. Loops read one entry ahead, and ignore the last 0.
    # In a partly visible tile, a mask or the band hides pairs. block_mask is a View. `most` = GROUP * tile_count is the
    # maximum length of a list. With BY_KEYS, H counts kv heads, and a block of keys lists tiles of rows in GROUP query
    # heads. The upper half of an entry is the head in its group. For packed sequences B is 1, and blocks are slots.
    OWN: tl.constexpr = BLOCK_N if BY_KEYS else BLOCK_M
    block, plane, q_len, k_len = span.locate(sequences, q_len, k_len, heads, OWN, BY_KEYS)
    if sequences is not None and not BY_KEYS:
        block = span.latest_first(block, q_len, BLOCK_M) // BLOCK_M  # slots count the blocks of rows from the last
    band = span.band(q_len, k_len, left, right, TOP_LEFT)
    if BY_KEYS:
        band = span.flip(band)
        ranges = span.blocks(band, block * BLOCK_N, BLOCK_N, BLOCK_M)
        begin, full, full_end, end = span.masked_past(ranges, (block + 1) * BLOCK_N, k_len)
    else:
        begin, full, full_end, end = span.blocks(band, block * BLOCK_M, BLOCK_M, BLOCK_N)
    # If the band begins past the last key, list no tile, so that lists by rows and by keys have the same tiles.
    begin = tl.where(block * OWN + band.low < band.keys, begin, end)
    most = tile_count * GROUP
    partial_list = Lists + tl.program_id(0).to(tl.int64) * 2 * (most + 2)
    full_list = partial_list + most + 2
    partial_count, full_count = begin * 0, begin * 0
    for start in tl.range(0, most, CHUNK):
        n = start + tl.arange(0, CHUNK)
        tile, member = n % tile_count, n // tile_count
        live = (n < most) & (tile >= begin) & (tile < end)
        i, j = (tile, tile * 0 + block) if BY_KEYS else (tile * 0 + block, tile)
        head = span.query_head(plane, member, GROUP)
        some, every = walk.covered(block_mask, head, i, j, q_len, k_len, live, BLOCK_M, BLOCK_N)
        every &= (tile >= full) & (tile < full_end)
        entry = (member.to(tl.int64) << 32) | tile
        partial, full_tiles = (some & ~every).to(tl.int32), (some & every).to(tl.int32)
        tl.store(partial_list + partial_count + tl.cumsum(partial, 0), entry, mask=partial != 0)
        tl.store(full_list + full_count + tl.cumsum(full_tiles, 0), entry, mask=full_tiles != 0)
        partial_count += tl.sum(partial, 0)
        full_count += tl.sum(full_tiles, 0)
    tl.store(partial_list, partial_count.to(tl.int64))
    tl.store(full_list, full_count.to(tl.int64))
    tl.store(partial_list + partial_count + 1, 0)
    tl.store(full_list + full_count + 1, 0)
