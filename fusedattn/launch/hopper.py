"""Limits and arguments of the Hopper kernels. In all functions, `form` is the tile of a backward kernel."""

import math
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from triton import cdiv

from ..call.decode import Decode
from ..call.layout import narrow
from ..call.options import Call
from ..call.private import holds
from ..kernels.vocabulary import dropout
from ..kernels.vocabulary.masks import Masks
from ..kernels.vocabulary.memory import width
from ..kernels.vocabulary.partials import Partials
from . import arguments as kernel_arguments, tile_table
from .tile_table import Backward, Pipeline

try:
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16, float16, float32
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ..kernels.hopper import backward, products, stored, visits, wide
    from ..kernels.hopper.forward import TILES_OF_K, Form, Spec, Stored, forward as kernel
    from ..kernels.hopper.work import Caches
except (ImportError, AttributeError) as error:  # Gluon is experimental: names come and go
    kernel, _why = None, str(error)

KERNELS: dict[str, Any] = {}
if kernel is not None:
    KERNELS |= dict(hopper=kernel, hopper_bwd=backward.backward, hopper_bwd_deterministic=backward.backward)
    KERNELS |= dict(hopper_bwd_ds=stored.stored_backward, hopper_bwd_wide=wide.wide_backward)
    KERNELS |= dict.fromkeys(tile_table.PRODUCTS, products.grad_product)
missing = None if kernel is not None else f"this version of Triton lacks names that its kernel uses ({_why})"
RAGGED_ROWS = 2**30  # limit on the rows of packed sequences
FEWEST_ROWS = 32  # of packed sequences, on average, in the backward: its sums of dq pad each to whole blocks
# Optional fields of a Call that the kernels support, or that `limits` checks one by one. It refuses others.
# A block mask needs no support: it marks what other masks hide.
_KNOWN = "block_mask", "left", "right", "origin", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
_IN_FORWARD = "seed", "bias", "mask", "mask_bits", "key_mask", "query_mask", "softcap", "alibi_slopes", "sinks"
_IN_PREFILL = "query_mask", "softcap", "alibi_slopes", "sinks"  # of the forward, with caches
_IN_BACKWARD = _IN_FORWARD
_FORMS_OF_BACKWARD = {width: forms for rows in tile_table.BACKWARDS.values() for width, forms in rows.items()}
_OTHERS = tuple(name for name, default in Call._field_defaults.items() if default is None and name not in _KNOWN)
_DESCRIPTORS = (
    (kernel_arguments.TensorDescriptor,) if kernel is None else (kernel_arguments.TensorDescriptor, TensorDescriptor)
)
_LAYOUTS = {} if kernel is None else {torch.bfloat16: bfloat16, torch.float16: float16, torch.float32: float32}


def _argument(name):
    return {"seed": "dropout_p", "mask_bits": "mask"}.get(name, name)


def limits(call: Call, known: tuple[str, ...] = _IN_FORWARD, forms=tile_table.HOPPER) -> list[str]:
    """Return the reasons why the Hopper forward, or the kernels of `forms`, do not support a call; [] if they do."""
    given = [name for name in _OTHERS if getattr(call, name) is not None]
    lacks = [f"it does not support {_argument(name)}" for name in given if name not in known]
    if call.query.dtype not in (torch.float16, torch.bfloat16):
        lacks.append(f"it supports float16 and bfloat16, not {call.query.dtype}")
    lengths = call.query.shape[2], call.key.shape[2]
    if call.bias is not None and call.bias.dtype not in _LAYOUTS:
        lacks.append(f"it does not support a bias of {call.bias.dtype}")
    widest = max(forms)
    if max(call.query.shape[3], call.value.shape[3]) > widest:
        lacks.append(f"it does not support heads wider than {widest}")
    elif not any(fits(call, form) for form in forms[row_width(call)]):
        heavy = "bias", *tile_table.MOST_KEYS[256], "mask", "mask_bits"
        names = " and ".join(dict.fromkeys(_argument(name) for name in heavy if name in given))
        columns = max(call.query.shape[3], call.value.shape[3])
        lacks.append(f"no tile has memory for {names} with heads of {columns} columns")
    if call.cu_seqlens_q is not None and any(holds(length > RAGGED_ROWS, False) for length in lengths):
        lacks.append("packed sequences have more than 2**30 rows")
    if holds(call.key.shape[2] == 0, False):  # unknown to a compiler; the operator checks again when it runs
        lacks.append("there are no keys")
    if call.value.shape[3] % 8 and not _pays_copies(call):
        lacks.append(f"the head dimension of value is {call.value.shape[3]}, not a multiple of 8")
    return lacks


def reasons(call: Call) -> list[str]:
    """Return the reasons why the Hopper forward cannot take a call, whatever the GPU; [] if it can."""
    return limits(call) + unreachable(call) if missing is None else [missing]


def cache_reasons(decode: Decode) -> list[str]:
    """Return the reasons why the Hopper forward cannot attend to these caches, whatever the GPU; [] if it can."""
    if missing is not None:
        return [missing]
    (call, key, value), rows = decode[:3], decode.call.query.shape[2]
    if rows < tile_table.PREFILL_ROWS:
        return [f"it takes {tile_table.PREFILL_ROWS} queries or more of a sequence, not {rows}"]
    lacks = limits(call, _IN_PREFILL)
    lacks += _unreadable(dict(query=call.query, key_cache=key, value_cache=value)) if key.shape[0] else ["no pages"]
    if lacks:
        return lacks
    most = max(pipeline.keys for pipeline in tile_table.HOPPER[row_width(call)])
    if decode.table is not None and key.shape[2] % most:
        lacks.append(f"pages have {key.shape[2]} keys, not a multiple of {most}")
    alike = all(x.stride(0) % max(1, _row(x)) == 0 and key.shape[2] <= _pitch(x) == _pitch(key) for x in (key, value))
    if not alike or key.shape[0] * _pitch(key) > RAGGED_ROWS:
        lacks.append("pages do not start at multiples of a row's stride, below row 2**30")
    return lacks


def _pays_copies(call):
    """Return whether copies of query, key and value take little of the time of a call: if rows see many keys."""
    sequences = 1 if call.cu_seqlens_q is None else max(1, call.cu_seqlens_q.shape[0] - 1)
    rows, keys = (x.shape[2] // sequences for x in (call.query, call.key))
    banded = keys if call.right is None else keys // 2 if call.left is None else call.left + call.right + 1
    return all(holds(length >= tile_table.COPIED_LENGTH, False) for length in (rows, keys, banded))


def is_copied(call: Call) -> bool:
    """Return whether Hopper kernels read copies: TMA cannot read or write a tensor of the call, and copies pay."""
    odd = call.query.shape[3] % 8 or call.value.shape[3] % 8
    return bool(odd or _unreadable(_by_tma(call))) and _pays_copies(call)


def _by_tma(call):
    return {name: getattr(call, name) for name in ("query", "key", "value")} | dict(bias=by_tiles(call))


def unreachable(call: Call) -> list[str]:
    """Return a sentence for each of query, key, value and bias that TMA cannot read, unless they are copied."""
    if (lacks := _unreadable(_by_tma(call))) and _pays_copies(call):
        lacks = []
    if call.mask_bits is not None and not kernel_arguments.aligned(call.mask_bits):
        lacks.append("the words of its plan lie at an address that is no multiple of 16")
    return lacks


def _unreadable(tensors: dict[str, Tensor | None]) -> list[str]:
    lacks = []
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not kernel_arguments.strided(tensor):
            step = kernel_arguments.TMA_BYTES // tensor.element_size()
            lacks.append(f"the strides of {name} are {tuple(tensor.stride())}, not multiples of {step} that end with 1")
        elif not kernel_arguments.aligned(tensor):
            lacks.append(f"{name} lies at an address that is no multiple of 16")
    return lacks


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor if TMA can read it, otherwise a copy that TMA can read."""
    return tensor if reachable(tensor) else writable(tensor).copy_(tensor)


def writable(tensor: Tensor) -> Tensor:
    """Return the tensor if TMA can write it, otherwise a new one of the same shape. Its rows are padded in memory."""
    if reachable(tensor):
        return tensor
    *shape, columns = tensor.shape
    return tensor.new_empty(*shape, cdiv(columns, 8) * 8)[..., :columns]


def all_readable(call: Call, names: tuple[str, ...] = ("query", "key", "value")) -> Call:
    """Return a call with readable tensors under `names`, and a readable bias."""
    tensors: Any = {name: readable(getattr(call, name)) for name in names}
    if call.bias is not None and (bias := by_tiles(call)) is not None:
        tensors["bias"] = readable(bias).expand(call.bias.shape)
    return call._replace(**tensors)


@cache
def _layout(tile, dtype):
    return NVMMASharedLayout.get_default_for([*tile], _LAYOUTS[dtype])


def _row(cache: Tensor) -> int:
    """Return the stride of a row of a cache. If a page is one row, its stride is arbitrary: the next row is a page."""
    return cache.stride(0 if cache.shape[2] == 1 else 2)


def _pitch(cache: Tensor) -> int:
    """Return the number of rows from the start of a page of a cache to the start of the next one in memory."""
    return cache.shape[2] if cache.shape[0] == 1 else cache.stride(0) // max(1, _row(cache))


def _rows_of(cache: Tensor) -> Tensor:
    """Return a cache as (1, Hkv, rows of all pages, D); between pages, a head's rows may be those of other heads."""
    pages, heads, page, columns = cache.shape
    strides = 0, cache.stride(1), _row(cache), cache.stride(3)
    return cache.as_strided((1, heads, (pages - 1) * _pitch(cache) + page, columns), strides)


def descriptor(
    tensor: Tensor, rows: int, columns: int | None = None, packed: bool = False, heads: int = 1
) -> "TensorDescriptor":
    """Return a TMA descriptor of (B, H, S, D) that copies `rows` rows and `columns` columns (None: all) of `heads`.

    If packed, B is 1, and TMA neither loads nor stores past the end of a sequence. Source: triton/tools/ragged_tma.py.
    Two more dimensions have strides of 2**34 - s and s, where s is the stride of a row. Their coordinates, 2**30 and
    the end of the sequence, add up to the address of 2**30 rows before that end, as addresses wrap around at 2**64.
    Counted from there, the sequence ends with row 2**30 - 1. The descriptor has 2**30 rows: later rows are outside.
    """
    shape, strides, block = kernel_arguments.block(tensor, rows)
    block = [1, heads, rows, block[3] if columns is None else columns]
    tile = [1, 1, heads * rows, block[3]]
    if packed:
        (_, all_heads, total, width), (_, head, row, _) = shape, strides
        shape = [RAGGED_ROWS + 1, total + 1, all_heads, RAGGED_ROWS, width]
        strides, block, tile = [2**34 - row, row, head, row, 1], [1, *block], [1, *tile]
    return TensorDescriptor(tensor, shape, strides, block, _layout(tuple(tile), tensor.dtype))


def is_descriptor(value) -> bool:
    return isinstance(value, _DESCRIPTORS)


def band_of(call: Call) -> str:
    call = kernel_arguments.bounded(call)
    return ("full", "causal", "window")[(call.left is not None) + (call.right is not None)]


def variant(call: Call, cached: bool) -> str:
    """Return a list of what selects the machine code of a Hopper kernel for a call."""
    sizes = f"D {call.query.shape[3]}", f"Dv {call.value.shape[3]}", str(call.query.dtype).removeprefix("torch.")
    options = sorted({_argument(name) for name in _OTHERS if getattr(call, name) is not None})
    packed, partial = ["packed"] * (call.cu_seqlens_q is not None), ["partial"] * bool(call.partial)
    return ", ".join((*sizes, band_of(call), *["caches"] * cached, *packed, *partial, *options))


def _visible(call, more):
    """Return the maximum number of keys that `more` + 1 neighbouring rows see."""
    keys = kernel_arguments.sizes(call)[3]
    return keys if call.left is None or call.right is None else min(keys, call.left + call.right + 1 + more)


def splits(call: Call, pipeline: Pipeline, multiprocessors: int) -> int:
    """Return into how many splits to divide the keys. It depends on sizes alone, so equal calls give equal bits."""
    if call.cu_seqlens_q is not None or call.sinks is not None or call.query_mask is not None:
        return 1
    batch, heads, rows, _ = kernel_arguments.sizes(call)
    blocks = cdiv(rows, pipeline.rows) * batch * heads * _column_parts(call)
    steps = cdiv(_visible(call, pipeline.rows - 1), 64)
    merged = 8 * batch * heads * rows * call.value.shape[3] / tile_table.MERGED_BYTES_A_US
    return _fastest(blocks, steps, *tile_table.BLOCK_US[row_width(call)], merged, multiprocessors)


@lru_cache(maxsize=1024)  # sequences may have any length
def _fastest(blocks, steps, fixed, each, merged, multiprocessors):
    """Return the number of splits for which a forward is estimated fastest; 1 if that saves less than a tenth.

    steps: 64 keys each. fixed, each, merged: us for a block of rows, for one of its steps, and for merging a split.
    """

    def estimate(count):
        rounds = cdiv(blocks * count, multiprocessors)
        return rounds * (fixed + each * cdiv(steps, count)) + (count > 1) * (tile_table.MERGE_US + merged * count)

    most = min(4 * multiprocessors // max(1, blocks), tile_table.MOST_SPLITS, steps)
    best = min(range(1, max(1, most) + 1), key=estimate)
    return best if estimate(best) < 0.9 * estimate(1) else 1


def programs(call: Call, pipeline: Pipeline, count: int, multiprocessors: int) -> int:
    """Return the grid size. If it is below the number of blocks, a program computes several. count: key splits."""
    batch, heads, _, _ = kernel_arguments.sizes(call)
    count *= _column_parts(call)
    planes, band, keys = batch * heads * count, band_of(call), _visible(call, 0)
    blocks = kernel_arguments.slots(call, pipeline.rows) * heads * count
    most = tile_table.SHARED_KEYS if band == "full" else tile_table.SHARED_KEYS_OF_BANDS
    if not pipeline.persistent or keys > most.get(row_width(call), keys):
        return blocks
    if band != "causal":
        return min(blocks, multiprocessors)
    if call.cu_seqlens_q is not None:
        return blocks
    pairs = blocks // 2
    rounds = cdiv(pairs, multiprocessors)
    if planes % 2 or pairs < tile_table.SHARED_PAIRS * rounds * multiprocessors:
        return blocks
    return min(pairs, multiprocessors)


def by_tiles(call: Call) -> Tensor | None:
    """Return the bias without broadcasts if TMA is to load it: if there is one, and it is not equal for all keys."""
    bias = narrow(call.bias)
    return None if bias is None or bias.shape[3] == 1 else bias


def fits(call: Call, form: Pipeline | Backward) -> bool:
    """Return whether options spill no registers with a kernel's tiles, and a bias and words fit into shared memory."""
    bias = by_tiles(call)
    most = {} if isinstance(form, Backward) else tile_table.MOST_KEYS.get(row_width(call), {})
    if any(form.keys > keys and getattr(call, name) is not None for name, keys in most.items()):
        return False
    if form.keys < tile_table.WARPGROUP_ROWS and not call.mask is call.mask_bits is None:  # words are of 64 keys
        return False
    if bias is None:
        return True
    if row_width(call) > tile_table.ONE_PASS and isinstance(form, Backward):
        return row_width(call) != 256 or bias.element_size() == 2 or bias.shape[2] == 1
    if isinstance(form, Backward):
        return _bias_tiles(call, bias, form) > 0
    part, columns_v = _part(call), min(width.fn(call.value.shape[3]), tile_table.MOST_COLUMNS)
    columns = width.fn(call.query.shape[3]) if part is None else cdiv(call.query.shape[3], part) * part
    apart = form.stages == 1
    of_key = TILES_OF_K.value * (part or columns) if apart else form.stages * columns
    elements = form.rows * columns * (1 if columns > 128 or apart else 2)
    elements += form.keys * (of_key + form.stages * columns_v)
    elements += 0 if part or columns == columns_v else form.rows * columns_v  # of the output
    elements += form.rows * form.keys * bias.element_size() // 2
    ahead = cdiv(TILES_OF_K.value, columns // part if part else 1) if apart else form.stages
    return 2 * elements + _word_bytes(call, form, ahead) <= tile_table.TILE_BYTES


def _word_bytes(call, form, ahead):
    """Return the bytes of shared memory for words of a mask: a bit a pair, in two slots for each step `ahead`."""
    return 0 if call.mask is call.mask_bits is None else ahead * form.rows * form.keys // 4


def _bias_tiles(call, bias, form):
    """Return how many bias tiles fit into shared memory beside those of a backward: at most two a warpgroup."""
    each, rows = tile_table.WARPGROUP_ROWS, form.stages * form.rows
    size = each * (1 if bias.shape[2] == 1 else each) * bias.element_size()
    elements = (form.keys + rows) * sum(_widths(call)) + 2 * form.keys * form.rows  # k, v; q, do; two steps of ds
    singles = 2 * each * each + 4 * rows  # float32: dq, row statistics
    left = tile_table.BACKWARD_BYTES - 2 * elements - 4 * singles - _word_bytes(call, form, form.stages)
    return 2 * max(0, min(2, left // (2 * size)))  # a warpgroup has tiles of its own, or it could miss a phase of one


def _bias(call, keys):
    bias = by_tiles(call)
    if bias is None:
        return None
    if bias.shape[2] == 1:  # TMA writes to multiples of 128 bytes
        return descriptor(bias, 1, max(keys, 128 // bias.element_size()))
    return descriptor(bias, tile_table.WARPGROUP_ROWS, keys)


def _words(words):
    """Return a TMA descriptor of the words of a mask, as int32: TMA copies no elements of 64 bits."""
    if words is None:
        return None
    words = words.view(torch.int32)
    size = words.shape[1]
    return TensorDescriptor(words, [*words.shape], [size, 1], [1, size], NVMMASharedLayout(0, 32, 2))


def arguments(
    call: Call, out: Tensor, lse: Tensor | None, stats: Tensor | None, pipeline: Pipeline, partials: Partials | None,
    count: int, decode: Decode | None = None,
) -> dict:  # fmt: skip
    """Return the arguments of the Hopper forward, except sequences and tile lists. count: number of key splits.

    decode: None, or the Decode of the call, whose caches are then the keys and values.
    """
    query, key, value = call.query, call.key, call.value
    caches, page, by_rows = Caches(None, None, None), RAGGED_ROWS, call.cu_seqlens_q is not None
    if decode is not None:
        lengths, by_rows = decode.lengths + decode.added, True
        key, value = _rows_of(decode.key_cache), _rows_of(decode.value_cache)
        caches = Caches(*map(kernel_arguments.of, (lengths, decode.table)), _pitch(decode.key_cache))
        if decode.table is not None and decode.table.shape[1] > 1:
            page = decode.key_cache.shape[2]
    batch, heads = query.shape[:2]
    group, each, packed = heads // key.shape[1], tile_table.WARPGROUP_ROWS, call.cu_seqlens_q is not None
    keys = max(1, kernel_arguments.sizes(call)[3])
    together = tile_table.L2_BYTES // (2 * keys * (query.shape[3] + value.shape[3]))
    wide = None if partials is not None or out.dtype == query.dtype else kernel_arguments.of(out)
    by_groups = tile_table.REGISTERS if call.key_mask is call.mask_bits is None else tile_table.CLEANING_REGISTERS
    _, registers, fewer = by_groups[pipeline.warpgroups]
    part = _part(call)
    parts = 1 if part is None else cdiv(query.shape[3], part)
    columns = min(width.fn(value.shape[3]), tile_table.MOST_COLUMNS)
    planes = count * _column_parts(call)  # of a head
    form = Form(pipeline.warpgroups, pipeline.stages, pipeline.ping_pong, registers, fewer)
    return dict(
        Q=descriptor(query, each, part, packed),
        K=descriptor(key, pipeline.keys, part, by_rows),
        V=descriptor(value, pipeline.keys, columns, by_rows),
        caches=caches,
        Bias=_bias(call, pipeline.keys),
        Words=_words(call.mask_bits),
        Out=descriptor(out, each, columns, packed) if partials is None and out.dtype == query.dtype else None,
        stored=Stored(wide, partials, *((lse, stats) if partials is None else (None, None))),
        rules=kernel_arguments.rules(call),
        planes=batch * heads * planes,
        section=min(batch * heads, max(1, together) * group) * planes,
        splits=count,
        spec=Spec(heads, group, value.shape[3], parts, call.top_left, page, form),
        **kernel_arguments.band(call),
    )


def backward_limits(call: Call) -> list[str]:
    """Return the reasons why the Hopper backward does not support the options of a call; [] if it does."""
    lacks = limits(call, _IN_BACKWARD, _FORMS_OF_BACKWARD)
    heavy = "softcap", "alibi_slopes", "bias", "seed", "mask", "mask_bits"
    given = [name for name in heavy if getattr(call, name) is not None and (name != "mask" or call.mask_bits is None)]
    if len(given) > (most := tile_table.MOST_OPTIONS.get(row_width(call), 1)):
        names = ", ".join(map(_argument, given))
        lacks.append(f"it supports {most} of {names} at once: with more, registers would spill")
    if call.bias is not None and by_tiles(call) is None and row_width(call) <= 256:
        lacks.append("it does not support a bias that is equal for all keys")
    if call.cu_seqlens_q is not None and call.sinks is not None and call.sinks.shape[0] > 1:
        lacks.append("it does not support packed sequences with a sink each")
    if call.seed is not None and call.origin is not None and not dropout.is_aligned(call.origin):
        lacks.append("it supports dropout_p in parts of a call only if rows and keys start at multiples of 16")
    if call.cu_seqlens_q is not None and (call.cu_seqlens_q.shape[0] - 1) * FEWEST_ROWS > call.query.shape[2]:
        lacks.append(
            f"packed sequences have fewer than {FEWEST_ROWS} rows on average: sums of dq would be mostly padding"
        )
    if call.query.shape[3] % 8 and not _pays_copies(call):
        lacks.append(f"the head dimension of query is {call.query.shape[3]}, not a multiple of 8")
    return lacks


def reachable(*tensors: Tensor) -> bool:
    return all(kernel_arguments.strided(x) and kernel_arguments.aligned(x) for x in tensors)


def _widths(call: Call) -> tuple[int, int]:
    """Return (columns of a key tile, columns of a value tile).

    Each of two warpgroups computes half of the columns of dq, at least 64; with D and Dv up to 64, half of the rows, or
    of the columns in blocks of 64 rows.
    """
    width_k, width_v = width.fn(call.key.shape[3]), width.fn(call.value.shape[3])
    is_wide = row_width(call) > tile_table.ONE_PASS
    return (width_k if row_width(call) == 64 else max(width_k, 128)), (max(width_v, 128) if is_wide else width_v)


def row_width(call: Call) -> int:
    return tile_table.width_on_hopper(call.query.shape[3], call.value.shape[3])


def _part(call):
    """Return the columns of a part of a tile of query or key in the forward; None if tiles are not divided."""
    part = tile_table.PARTS.get(row_width(call))
    return None if part is None or call.query.shape[3] <= part else part


def _column_parts(call):
    """Return among how many programs the forward divides the columns of a block of rows of the output."""
    return cdiv(call.value.shape[3], tile_table.MOST_COLUMNS)


def unit(call: Call) -> tuple[int, int]:
    """Return (rows, columns) of a block in the buffer that sums dq. Each block is contiguous."""
    return tile_table.WARPGROUP_ROWS, _widths(call)[0]


def _is_table(call):
    """Return whether products subtract row statistics: not if scores are scaled first, or dp is after dropout."""
    return call.seed is None and kernel_arguments.scored(call).softmax_scale is not None


def _are_rows(call):
    """Return whether the statistics of a row of wide heads are contiguous, for TMA if packed, or for the kernel dq."""
    return not call.cu_seqlens_q is call.bias is call.alibi_slopes is None


def new_rows(call: Call, stats: Tensor) -> tuple[Tensor, int | None]:
    """Return (buffer of row statistics that `preprocess` fills, its padded number of rows or None)."""
    batch, heads, length, _ = call.query.shape
    if row_width(call) <= tile_table.ONE_PASS and _is_table(call):
        return stats.new_empty((batch, 2 * heads, length, 16), dtype=torch.bfloat16), None
    if row_width(call) <= tile_table.ONE_PASS or _are_rows(call):
        return stats.new_empty((batch, heads, length, 4)), None
    pitch = cdiv(length, 4) * 4  # TMA reads 16 bytes at a time
    return stats.new_empty((batch, heads, 4, pitch)), pitch


def backward_arguments(
    call: Call, grad_out: Tensor, rows: Tensor, words: Tensor | None, sums: Tensor, turns: Tensor | None,
    grads: list[Tensor], form: Backward,
) -> dict:  # fmt: skip
    """Return the arguments of hopper_bwd and hopper_bwd_deterministic, except sequences and tile lists.

    words: of the mask, by `transpose_words`. grads: [grad_key, grad_value].
    """
    each = tile_table.WARPGROUP_ROWS
    width_k, width_v = _widths(call)
    at_once = width_k // (2 * each // form.rows)  # columns of dq that are added at a time
    lines, packed = sums.view(*sums.shape[:2], -1, 32), call.cu_seqlens_q is not None
    common, bias = _common(call), by_tiles(call)
    tiles = 0 if bias is None else _bias_tiles(call, bias, form)
    made: Any = [descriptor(grad, each, width, packed) for grad, width in zip(grads, (width_k, width_v), strict=True)]
    columns: tuple[int, ...] = ()
    if call.partial:  # float32
        made, columns = map(kernel_arguments.of, grads), (call.key.shape[3], call.value.shape[3])
    grad_key, grad_value = made
    return dict(
        Q=descriptor(call.query, form.rows, width_k, packed),
        K=descriptor(call.key, each, width_k, packed),
        V=descriptor(call.value, each, width_v, packed),
        GradOut=descriptor(grad_out, form.rows, width_v, packed),
        Rows=descriptor(rows, form.rows, rows.shape[3], packed, heads=2 if _is_table(call) else 1),
        Bias=_bias(call, each),
        Words=_words(words),
        Sums=descriptor(lines, each // 2 * at_once // 16),
        Turns=turns,
        GradK=grad_key,
        GradV=grad_value,
        form=backward.Form(form.stages, tiles, common.pop("REGISTERS"), _group(call), call.top_left, columns),
        rules=_rules(call),
        **common,
    )


def _rules(call):
    rules = kernel_arguments.rules(call)
    return rules._replace(masks=Masks(None, rules.masks.keys, None, rules.masks.bits))


def _common(call):
    return dict(
        heads=call.key.shape[1],
        REGISTERS=tile_table.REGISTERS[2][1:],
        **kernel_arguments.band(call),
    )


def _group(call):
    return call.query.shape[1] // call.key.shape[1]


def _scores_of_a_head(call):
    """Return (shape, bytes) of the stored gradients of scores of one key head; packed sequences have blocks of keys."""
    group, (_, _, rows, keys) = _group(call), kernel_arguments.sizes(call)
    if call.cu_seqlens_k is not None:
        block = 2 * tile_table.WARPGROUP_ROWS
        keys = kernel_arguments.slots(call, block, by_keys=True) * block
    shape = group, 1, keys, cdiv(rows, 64) * 64  # each row starts an L2 line
    return shape, math.prod(shape) * call.query.element_size()


def stored_limits(call: Call) -> list[str]:
    _, size = _scores_of_a_head(call)
    if size <= tile_table.SCORES_BYTES:
        return []
    most = tile_table.SCORES_BYTES >> 20
    return [f"gradients of scores take {cdiv(size, 2**20)} MiB for a head of key, and it stores no more than {most}"]


def heads_at_a_time(call: Call) -> int:
    """Return the number of key heads whose scores fit into the buffers at once."""
    (_, size), buffers = _scores_of_a_head(call), _buffers(call)
    return min(call.key.shape[0] * call.key.shape[1], max(2 // buffers, tile_table.SCORES_BYTES // (buffers * size)))


def _buffers(call):
    """Return how many buffers of scores a backward fills: with heads wider than 256, weights have one, too."""
    return 1 + (row_width(call) > 256)


def new_scores(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return buffers (query heads, 1, Sk, Sq rounded up to 64) for gradients of scores and, or None, for weights."""
    (group, *shape), _ = _scores_of_a_head(call)
    shape = [heads_at_a_time(call) * group, *shape]
    return call.query.new_empty(shape), call.query.new_empty(shape) if _buffers(call) > 1 else None


def _section(call, fits, size, blocks, multiprocessors):
    """Return how many kv heads are scheduled together, so that their blocks read from L2.

    fits: bytes of L2 to use. size: bytes of a head that its blocks read. blocks: number of blocks in a head. A mask
    or window makes blocks unequal, and the short ones cannot fill a GPU: sections (heads scheduled together) then have
    nearly equal numbers of heads, and at least 1.5 blocks per multiprocessor.
    """
    heads, most = heads_at_a_time(call), max(1, fits // size)
    if call.left is None and call.right is None:
        return most
    sections = max(1, heads // max(most, cdiv(3 * multiprocessors, 2 * blocks)))
    return cdiv(heads, sections)


def stored_arguments(
    call: Call, grad_out: Tensor, rows: Tensor, words: Tensor | None, scores: Tensor, weights: Tensor | None,
    grad_value: Tensor, form: Backward, multiprocessors: int,
) -> dict:  # fmt: skip
    """Return the arguments of hopper_bwd_ds or hopper_bwd_wide, except sequences, tile lists, planes and before.

    words: of the mask, by `transpose_words`. scores and weights: buffers, as `new_scores` returns them.
    """
    each, (_, _, length, keys) = tile_table.WARPGROUP_ROWS, kernel_arguments.sizes(call)
    (width_k, width_v), packed = _widths(call), call.cu_seqlens_q is not None
    size = 2 * _group(call) * length * (call.query.shape[3] + call.value.shape[3])
    common, rules, bias = _common(call), _rules(call), by_tiles(call)
    if words is not None:
        rules = rules._replace(masks=rules.masks._replace(bits=rules.masks.bits._replace(words=words)))
    registers, columns = common.pop("REGISTERS"), (call.query.shape[3], call.value.shape[3])
    shared = common | dict(
        form=visits.Form(_group(call), *columns, call.top_left, registers),
        section=_section(call, tile_table.SECTION_BYTES, size, cdiv(keys, form.keys), multiprocessors),
        rules=rules,
        Rows=descriptor(rows, form.rows, 4, packed)
        if _are_rows(call)
        else descriptor(rows[..., :length], 4, form.rows),
        GradScores=descriptor(scores[..., :length], each, form.rows),
    )
    if weights is not None:
        return shared | dict(
            Q=descriptor(call.query, form.rows, each, packed),
            K=descriptor(call.key, form.keys, each, packed),
            V=descriptor(call.value, form.keys, each, packed),
            GradOut=descriptor(grad_out, form.rows, each, packed),
            Weights=descriptor(weights[..., :length], each, form.rows),
        )
    return shared | dict(
        Q=descriptor(call.query, form.rows, width_k, packed),
        K=descriptor(call.key, each, width_k, packed),
        V=descriptor(call.value, each, width_v, packed),
        GradOut=descriptor(grad_out, form.rows, width_v // 2, packed),
        Bias=None if bias is None or bias.shape[2] == 1 else _bias(call, each),
        GradV=kernel_arguments.of(grad_value) if call.partial else descriptor(grad_value, each, width_v, packed),
    )


def product_arguments(
    call: Call, factor: Tensor, others: Tensor, grad: Tensor, of_key: bool, scale: float, form: Backward,
    multiprocessors: int,
) -> dict:  # fmt: skip
    """Return the arguments of hopper_dk (`of_key`) or hopper_dq, except sequences, tile lists, planes and before.

    factor: gradients of scores, or weights for the gradient of value. others: what it is multiplied by.
    """
    each, columns = tile_table.WARPGROUP_ROWS, min(max(128, width.fn(grad.shape[3])), tile_table.MOST_COLUMNS)
    across = cdiv(grad.shape[3], columns)  # programs for the columns of a block
    (_, _, length, _), packed = kernel_arguments.sizes(call), call.cu_seqlens_q is not None
    block = (2 * each, each) if of_key else (each, 2 * each)
    group, blocks = _group(call), cdiv(grad.shape[2], form.keys)
    size = 2 * others.shape[2] * others.shape[3] * (group if of_key else 1)
    blocks = blocks if of_key else blocks * group
    section = _section(call, tile_table.SECTION_BYTES // 2, size, blocks, multiprocessors)
    common = _common(call)
    registers = common.pop("REGISTERS")
    made = products.Form(group, grad.shape[3], across, of_key, call.top_left, form.stages, registers)
    return common | dict(
        section=(section if of_key else section * group) * across,
        GradScores=descriptor(factor[..., :length], *block),
        Others=descriptor(others, each, columns, packed),
        Product=kernel_arguments.of(grad) if call.partial else descriptor(grad, each, columns, packed),
        heads=grad.shape[1],
        scale=scale,
        form=made,
    )
