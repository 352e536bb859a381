"""Launches the kernels that make block masks, lists of tiles to visit, and the layout of packed sequences."""

import torch
from triton import cdiv

from ..call.options import hiding, lengths_of
from ..call.plan import pairs_of
from ..kernels.vocabulary.span import Sequences
from . import arguments, run, tile_table


def new_block_mask(mask, key_mask, query_mask, bias, lengths):
    """Return (an uninitialised block mask, (rows, keys) that it covers, the masks and the bias without broadcasts).

    At least one mask or the bias is not None. Dimensions along which all of them broadcast have size 1.
    """
    mask_size = block_mask_size()
    if lengths is None:
        key_mask, query_mask = arguments.narrow(key_mask), arguments.narrow(query_mask)
    masks = dict(mask=arguments.narrow(mask), key_mask=key_mask, query_mask=query_mask, bias=arguments.narrow(bias))
    shapes = [pairs_of(name, x, lengths) for name, x in masks.items() if x is not None]
    batch, heads, rows, keys = torch.broadcast_shapes(*shapes)
    first = next(x for x in masks.values() if x is not None)
    block_mask = first.new_empty((batch, heads, -(-rows // mask_size), -(-keys // mask_size)), dtype=torch.uint8)
    return block_mask, (rows, keys), masks.values()


def block_mask(mask, key_mask, query_mask, bias, lengths):
    block_mask, (rows, keys), masks = new_block_mask(mask, key_mask, query_mask, bias, lengths)
    (mask, key_mask, query_mask, bias), (batch, heads, *_) = masks, block_mask.shape
    if block_mask.numel():
        # Without token masks all packed sequences may share a block mask, which does not depend on their lengths.
        packed = lengths is not None and not (key_mask is query_mask is None)
        launched = dict(
            BlockMask=block_mask,
            masks=arguments.masks(mask, key_mask, query_mask, batch, heads, rows, keys, packed),
            bias=None if bias is None else arguments.of(bias.expand(batch, heads, rows, keys)),
            rows=rows,
            keys=keys,
            heads=heads,
            BLOCK_MASK_SIZE=block_mask_size(),
        )
        with run.surroundings(run.device_of(block_mask)):
            launched["extents"] = extents(lengths) if packed else None
            run.run_kernel("block_mask", block_mask.numel(), launched, run.device_of(block_mask), num_warps=4)
    return block_mask


def packed_sequences(lengths, block, by_keys=False, count=0, used=None):
    """Return Sequences with `count` slots for blocks of rows or keys. A tensor `used` gets the number of used ones."""
    batch, new = lengths.cu_seqlens_q.shape[0] - 1, lengths.cu_seqlens_q.new_full
    sequences = Sequences(new((count, 2), -1) if count else None, new((batch, 4), 0))
    launched = dict(
        Slots=sequences.slots,
        Extents=sequences.extents,
        Used=used,
        OffsetsQ=lengths.cu_seqlens_q.contiguous(),
        OffsetsK=lengths.cu_seqlens_k.contiguous(),
        n=batch,
        q_len=lengths.rows,
        k_len=lengths.keys,
        max_seqlen_q=lengths.rows if lengths.max_seqlen_q is None else lengths.max_seqlen_q,
        max_seqlen_k=lengths.keys if lengths.max_seqlen_k is None else lengths.max_seqlen_k,
        size=count,
        BLOCK=block,
        BY_KEYS=by_keys,
        CHUNK=64 if run.interpreting() else 1024,
    )
    if batch:
        run.run_kernel("fill_slots", batch, launched, run.device_of(sequences.extents), num_warps=4)
    return sequences


def sequences_of(call, block, by_keys=False, used=None):
    if call.cu_seqlens_q is None:
        return None
    return packed_sequences(lengths_of(call), block, by_keys, arguments.slots(call, block, by_keys), used)


def extents(lengths):
    return None if lengths is None else packed_sequences(lengths, 1).extents


def tile_lists(call, block_mask, tile, by_keys=False, sequences=None):
    (batch, heads, rows, keys), mask_size = arguments.sizes(call), block_mask_size()
    group = heads // call.key.shape[1]
    planes, length, across = block_mask.shape[1], cdiv(rows, tile.rows), cdiv(keys, tile.keys)
    if by_keys:
        planes, length, across = max(1, planes // group), across, length
    batches = block_mask.shape[0]
    if sequences is not None:
        batches, length = 1, sequences.slots.shape[0]
    most = across * group if by_keys else across
    lists = block_mask.new_empty((batches, planes, length, 2, most + 2), dtype=torch.int64)
    if lists.numel():
        launched = arguments.band(call) | dict(
            Lists=lists,
            sequences=sequences,
            tile_count=across,
            block_mask=arguments.of(block_mask.expand(-1, -1, cdiv(rows, mask_size), cdiv(keys, mask_size))),
            heads=planes,
            GROUP=group if by_keys else 1,
            TOP_LEFT=call.top_left,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            BLOCK_MASK_SIZE=mask_size,
            BY_KEYS=by_keys,
            CHUNK=256,
        )
        run.run_kernel("tile_lists", batches * planes * length, launched, run.device_of(lists), num_warps=4)
    return arguments.of(lists.flatten(2, 3).expand(batch, heads // group if by_keys else heads, -1, -1))


def block_mask_of(call):
    """Return the block mask of a call; None if it needs none."""
    if call.block_mask is not None or all(x is None for x in hiding(call)):
        return call.block_mask
    return block_mask(*hiding(call), lengths_of(call))


def walks(call, block_mask, tile, by_keys=False, used=None):
    sequences, lists = sequences_of(call, tile.keys if by_keys else tile.rows, by_keys, used), None
    if block_mask is not None:
        lists = tile_lists(call, block_mask, tile, by_keys, sequences)
    return dict(sequences=sequences, tile_lists=lists)


def block_mask_size():
    return 16 if run.interpreting() else tile_table.BLOCK_MASK_SIZE
