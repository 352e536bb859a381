"""Launches of the kernels that make block masks, tile lists, and the layout of packed sequences."""

import functools

import torch
from triton import cdiv

from ..call.layout import narrow
from ..call.options import hiding, lengths_of, sizes
from ..call.plan import pairs_of
from ..kernels.vocabulary import masks as masking
from ..kernels.vocabulary.span import Sequences
from . import arguments, run

BLOCK, CONSTANT = masking.BLOCK.value, masking.CONSTANT.value


def marked(call):
    """Return a call with its block mask and its mask of pairs in bits; the call itself if it has both or needs none."""
    whole = call.block_mask is not None and (call.mask is None or call.mask_bits is not None)
    if whole or not arguments.hides(call):
        return call
    mask, key_mask, query_mask, bias = hiding(call)
    # Without key_mask, packed sequences may share a block mask. Then it must not depend on their lengths.
    packed = call.cu_seqlens_q is not None and key_mask is not None
    mask, bias, key_mask = narrow(mask), narrow(bias), key_mask if packed else narrow(key_mask)
    masks = dict(mask=mask, key_mask=key_mask, query_mask=narrow(query_mask))
    # Dimensions along which all masks and the bias broadcast have size 1. But with a mask of pairs, rows and keys are
    # at least BLOCK.
    given = {name: x for name, x in (*masks.items(), ("bias", bias)) if x is not None}
    shapes = {name: pairs_of(name, x) for name, x in given.items()}
    if packed:
        sequences, _, _, longest = sizes(call)
        shapes["key_mask"] = sequences, 1, 1, longest
    batch, heads, rows, keys = torch.broadcast_shapes(*shapes.values())
    if mask is not None:
        rows, keys = (BLOCK if n == 1 else n for n in (rows, keys))
    new, mask_bits = next(iter(given.values())).new_empty, None
    block_mask = new((batch, heads, cdiv(rows, BLOCK), cdiv(keys, BLOCK)), dtype=torch.int32)
    if mask is not None:
        mask_bits = new((cdiv(CONSTANT + block_mask.numel(), 16) * 16, BLOCK), dtype=torch.int64)
    if block_mask.numel():
        launched = dict(BlockMask=block_mask, Words=mask_bits, rows=rows, keys=keys, heads=heads)
        launched |= dict(masks=arguments.masks(*masks.values(), batch, heads, rows, keys, packed))
        launched |= dict(bias=None if bias is None else arguments.of(bias.expand(batch, heads, rows, keys)))
        with run.surroundings(run.device_of(block_mask)):
            launched["extents"] = extents(lengths_of(call)) if packed else None
            run.run_kernel("block_mask", block_mask.numel(), launched, run.device_of(block_mask), num_warps=4)
    return call._replace(block_mask=block_mask, mask_bits=mask_bits)


def packed_sequences(lengths, block, by_keys=False, count=0, used=None):
    """Return Sequences with `count` slots for blocks of rows or keys. A tensor `used` gets the number of used slots."""
    batch, new = lengths.cu_seqlens_q.shape[0] - 1, functools.partial(run.full, lengths.cu_seqlens_q)
    sequences = Sequences(new((count, 2), -1) if count else None, new((batch, 4), 0))
    longest = lengths.max_seqlen_q, lengths.max_seqlen_k
    most_q, most_k = (lengths.rows, lengths.keys) if None in longest else longest
    launched = dict(Slots=sequences.slots, Extents=sequences.extents, Used=used)
    launched |= dict(OffsetsQ=lengths.cu_seqlens_q.contiguous(), OffsetsK=lengths.cu_seqlens_k.contiguous())
    launched |= dict(n=batch, q_len=lengths.rows, k_len=lengths.keys, max_seqlen_q=most_q, max_seqlen_k=most_k)
    launched |= dict(size=count, BLOCK=block, BY_KEYS=by_keys, CHUNK=64 if run.interpreting() else 1024)
    if batch:
        run.run_kernel("fill_slots", batch, launched, run.device_of(sequences.extents), num_warps=4)
    return sequences


def words_by_keys(call, kind):
    """Return mask_bits with rows and keys swapped in each block, or None. kind: `run.kind_of` the kernel to read it."""
    if call.mask_bits is None:
        return None
    words = call.mask_bits.new_empty(call.mask_bits.shape)
    launched = dict(Words=call.mask_bits, ByKeys=words)
    run.run_kernel("transpose_words", words.shape[0], launched, run.device_of(words), kind, num_warps=4)
    return words


def sequences_of(call, block, by_keys=False, used=None):
    if call.cu_seqlens_q is None:
        return None
    return packed_sequences(lengths_of(call), block, by_keys, arguments.slots(call, block, by_keys), used)


def extents(lengths):
    return None if lengths.cu_seqlens_q is None else packed_sequences(lengths, 1).extents


def tile_lists(call, tile, by_keys=False, sequences=None):
    (batch, heads, rows, keys), block_mask = sizes(call), call.block_mask
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
        marks = arguments.of(block_mask.expand(-1, -1, cdiv(rows, BLOCK), cdiv(keys, BLOCK)))
        launched = dict(Lists=lists, sequences=sequences, block_mask=marks, heads=planes, tile_count=across)
        launched |= dict(GROUP=group if by_keys else 1, TOP_LEFT=call.top_left, BY_KEYS=by_keys)
        # In the interpreter small lists take several chunks.
        launched |= arguments.band(call) | dict(
            BLOCK_M=tile.rows, BLOCK_N=tile.keys, CHUNK=2 if run.interpreting() else 256
        )
        run.run_kernel("tile_lists", batches * planes * length, launched, run.device_of(lists), num_warps=4)
    return arguments.of(lists.flatten(2, 3).expand(batch, heads // group if by_keys else heads, -1, -1))


def walks(call, tile, by_keys=False, used=None):
    sequences = sequences_of(call, tile.keys if by_keys else tile.rows, by_keys, used)
    lists = None if call.block_mask is None else tile_lists(call, tile, by_keys, sequences)
    return dict(sequences=sequences, tile_lists=lists)
