"""Limits of Hopper's kernels: why they refuse a call, and which of their tiles fit it. TMA descriptors of tensors."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import cdiv

from ..call.decode import Decode
from ..call.layout import narrow
from ..call.options import ATTENDED, Call, sizes
from ..call.private import known
from ..kernels.vocabulary import dropout
from ..kernels.vocabulary.memory import width
from . import arguments, tile_table
from .tile_table import Backward, Pipeline

KERNELS: dict[str, Any] = {}
missing: str | None = None
try:
    from triton.experimental.gluon import language
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from ..kernels.hopper import backward, forward, products, stored, visits, wide, work  # noqa: F401 - for launches
except (ImportError, AttributeError) as error:  # Gluon is experimental: names come and go
    missing = f"this version of Triton lacks names that its kernel uses ({error})"
else:
    KERNELS |= dict(hopper=forward.forward, hopper_bwd=backward.backward, hopper_bwd_deterministic=backward.backward)
    KERNELS |= dict(hopper_bwd_ds=stored.stored_backward, hopper_bwd_wide=wide.wide_backward)
    KERNELS |= dict.fromkeys(tile_table.PRODUCTS, products.grad_product)
RAGGED_ROWS = 2**30  # limit on the rows of packed sequences
FEWEST_ROWS = 32  # minimum mean length of packed sequences in the backward, which pads dq of each to whole blocks
# Optional fields of a Call that the kernels support, or that `limits` checks one by one. It refuses other fields.
# A block mask needs no support, because it only marks blocks that other masks hide.
_KNOWN = "block_mask", "left", "right", "origin", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
_SUPPORTED = "seed", "bias", "mask", "mask_bits", "key_mask", "query_mask", "softcap", "alibi_slopes", "sinks"
_IN_PREFILL = "query_mask", "softcap", "alibi_slopes", "sinks"  # what the forward supports with caches
_FORMS_OF_BACKWARD = {width: forms for rows in tile_table.BACKWARDS.values() for width, forms in rows.items()}
_OTHERS = tuple(name for name, default in Call._field_defaults.items() if default is None and name not in _KNOWN)


def _argument(name):
    return {"seed": "dropout_p", "mask_bits": "mask"}.get(name, name)


def limits(call: Call, options: tuple[str, ...] = _SUPPORTED, forms=tile_table.HOPPER) -> list[str]:
    """Return reasons why a Hopper kernel cannot take a call, or []. options: those it supports. forms: its tiles."""
    given = [name for name in _OTHERS if getattr(call, name) is not None]
    lacks = [f"it does not support {_argument(name)}" for name in given if name not in options]
    if call.query.dtype not in (torch.float16, torch.bfloat16):
        lacks.append(f"it supports float16 and bfloat16, not {call.query.dtype}")
    if call.bias is not None and call.bias.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        lacks.append(f"it does not support a bias of {call.bias.dtype}")
    widest, columns = max(forms), max(call.query.shape[3], call.value.shape[3])
    if columns > widest:
        lacks.append(f"it does not support heads wider than {widest}")
    elif not any(fits(call, form) for form in forms[row_width(call)]):
        heavy = "bias", *tile_table.MOST_KEYS[256], "mask", "mask_bits"
        names = " and ".join(dict.fromkeys(_argument(name) for name in heavy if name in given))
        lacks.append(f"no tile has room for {names} with heads of {columns} columns")
    if call.cu_seqlens_q is not None and any(known(x.shape[2] > RAGGED_ROWS, False) for x in (call.query, call.key)):
        lacks.append("packed sequences have more than 2**30 rows")
    if known(call.key.shape[2] == 0, False):
        lacks.append("there are no keys")
    return lacks


def reasons(call: Call) -> list[str]:
    """Return the reasons why the Hopper forward should not take a call, whatever the GPU; [] if it should."""
    return limits(call) + _odd(call, "value") + unreachable(call) if missing is None else [missing]


def cache_reasons(decode: Decode) -> list[str]:
    """Return the reasons why the Hopper forward cannot attend to these caches, whatever the GPU; [] if it can."""
    if missing is not None:
        return [missing]
    (call, key, value), rows = decode[:3], decode.call.query.shape[2]
    if known(rows < tile_table.PREFILL_ROWS, False):
        return [f"it takes {tile_table.PREFILL_ROWS} queries or more of a sequence, not {rows}"]
    lacks = limits(call, _IN_PREFILL) + _odd(call, "value")
    read: dict[str, Tensor | None] = dict(query=call.query, key_cache=key, value_cache=value)
    if lacks := lacks + (["no pages"] if known(key.shape[0] == 0, False) else _unreadable(read)):
        return lacks
    most = max(pipeline.keys for pipeline in tile_table.HOPPER[row_width(call)])
    if decode.table is not None and known(key.shape[2] % most != 0, False):
        lacks.append(f"pages have {key.shape[2]} keys, not a multiple of {most}")
    pitch = pitch_of(key)
    same = [x.stride(0) % max(1, _row(x)) == 0 for x in (key, value)] + [pitch_of(value) == pitch]
    if not all(known(x, True) for x in (*same, key.shape[2] <= pitch, key.shape[0] * pitch <= RAGGED_ROWS)):
        lacks.append("pages do not start at multiples of a row's stride, below row 2**30")
    return lacks


def _pays_copies(call):
    """Return whether copies of query, key and value are cheap beside the call, because rows see many keys."""
    least = tile_table.COPIED_LENGTH
    total = least * (1 if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1)
    enough = [call.query.shape[2] >= total, call.key.shape[2] >= total]
    if call.right is not None:
        enough.append(call.key.shape[2] >= 2 * total if call.left is None else call.left + call.right + 1 >= least)
    return all(known(x, True) for x in enough)


def _odd(call, *names):
    """Return a sentence per tensor whose columns TMA can neither read nor write; [] if copies are cheap."""
    odd = {name: size for name in names if (size := getattr(call, name).shape[3]) % 8}
    if odd and _pays_copies(call):
        return []
    return [f"the head dimension of {name} is {size}, not a multiple of 8" for name, size in odd.items()]


def unreachable(call: Call) -> list[str]:
    """Return a sentence per tensor that TMA cannot read: mask_bits, and, if not copied, query, key, value, bias."""
    by_tma = {name: getattr(call, name) for name in ATTENDED} | dict(bias=by_tiles(call))
    if (lacks := _unreadable(by_tma)) and _pays_copies(call):
        lacks = []
    if call.mask_bits is not None and not arguments.aligned(call.mask_bits):
        lacks.append("the words of its plan lie at an address that is no multiple of 16")
    return lacks


def _unreadable(tensors: dict[str, Tensor | None]) -> list[str]:
    lacks = []
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not arguments.strided(tensor):
            step = arguments.TMA_BYTES // tensor.element_size()
            lacks.append(f"the strides of {name} are {tuple(tensor.stride())}, not multiples of {step} that end with 1")
        elif not arguments.aligned(tensor):
            lacks.append(f"{name} lies at an address that is no multiple of 16")
    return lacks


def readable(tensor: Tensor) -> Tensor:
    """Return the tensor if TMA can read it, otherwise a copy that TMA can read."""
    return tensor if reachable(tensor) else writable(tensor).copy_(tensor)


def writable(tensor: Tensor) -> Tensor:
    """Return the tensor if TMA can write it, otherwise a new tensor of the same shape, with rows padded in memory."""
    if reachable(tensor):
        return tensor
    *shape, columns = tensor.shape
    return tensor.new_empty(*shape, cdiv(columns, 8) * 8)[..., :columns]


def all_readable(call: Call, names: tuple[str, ...] = ATTENDED) -> Call:
    """Return the call with copies in place of those tensors (`names`, and bias) that TMA cannot read."""
    tensors: Any = {name: readable(getattr(call, name)) for name in names}
    if call.bias is not None and (bias := by_tiles(call)) is not None:
        tensors["bias"] = readable(bias).expand(call.bias.shape)
    return call._replace(**tensors)


def band_of(call: Call) -> str:
    call = arguments.bounded(call)
    return ("full", "causal", "window")[(call.left is not None) + (call.right is not None)]


def variant(call: Call, cached: bool) -> str:
    """Return, as text, the properties of a call that select the machine code of a Hopper kernel."""
    widths = f"D {call.query.shape[3]}", f"Dv {call.value.shape[3]}", str(call.query.dtype).removeprefix("torch.")
    options = sorted({_argument(name) for name in _OTHERS if getattr(call, name) is not None})
    packed, partial = ["packed"] * (call.cu_seqlens_q is not None), ["partial"] * bool(call.partial)
    return ", ".join((*widths, band_of(call), *["caches"] * cached, *packed, *partial, *options))


def by_tiles(call: Call) -> Tensor | None:
    """Return the bias that TMA loads, without broadcasts; None without a bias, or if it is equal for all keys."""
    bias = narrow(call.bias)
    return None if bias is None or known(bias.shape[3] == 1, False) else bias


def fits(call: Call, form: Pipeline | Backward) -> bool:
    """Return whether a tile suits a call: its options spill no registers, and bias and mask bits fit shared memory."""
    bias, columns = by_tiles(call), row_width(call)
    if isinstance(form, Backward):
        if bias is None or columns > tile_table.ONE_PASS:
            wide = columns == 256 and sum(tile_widths(call)) == 512
            return not wide or bias is None or bias.element_size() == 2 or bias.shape[2] == 1
        return bias_tiles(call, bias, form) > 0
    most = tile_table.MOST_KEYS.get(columns, {})
    if any(form.keys > keys and getattr(call, name) is not None for name, keys in most.items()):
        return False
    if form.keys < tile_table.WARPGROUP_ROWS and not call.mask is call.mask_bits is None:  # a word has 64 keys
        return False
    return _forward_bytes(call, form, bias) <= (tile_table.TILE_BYTES if bias is None else tile_table.BIASED_BYTES)


def _forward_bytes(call, form, bias):
    """Return the bytes of shared memory that a forward takes for tiles and mask bits."""
    part, columns_v = part_of(call), value_columns(call)
    columns = width.fn(call.query.shape[3]) if part is None else cdiv(call.query.shape[3], part) * part
    apart = form.stages == 1
    of_key = forward.TILES_OF_K.value * (part or columns) if apart else form.stages * columns
    elements = form.rows * columns * (1 if columns > 128 or apart else 2)
    elements += form.keys * (of_key + form.stages * columns_v)
    elements += 0 if part or columns == columns_v else form.rows * columns_v  # the output tile
    if bias is not None:  # for each warpgroup a tile, or one row of at least 128 bytes
        size = form.keys * bias.element_size()
        elements += (form.warpgroups * max(size, 128) if known(bias.shape[2] == 1, True) else form.rows * size) // 2
    ahead = cdiv(forward.TILES_OF_K.value, columns // part if part else 1) if apart else form.stages
    return 2 * elements + _word_bytes(call, form, ahead)


def _word_bytes(call, form, ahead):
    """Return the bytes of shared memory for words of a mask: a bit per pair, in two slots for each of `ahead` steps."""
    return 0 if call.mask is call.mask_bits is None else ahead * form.rows * form.keys // 4


def bias_tiles(call, bias, form):
    """Return how many bias tiles fit in shared memory beside a backward's other tiles: at most two per warpgroup."""
    each, rows = tile_table.WARPGROUP_ROWS, form.stages * form.rows
    size = each * (1 if bias.shape[2] == 1 else each) * bias.element_size()
    elements = (form.keys + rows) * sum(tile_widths(call)) + 2 * form.keys * form.rows  # k, v; q, do; two steps of ds
    singles = 2 * each * each + 4 * rows  # float32: dq, row statistics
    left = tile_table.TILE_BYTES - 2 * elements - 4 * singles - _word_bytes(call, form, form.stages)
    return 2 * max(0, min(2, left // (2 * size)))  # even: each tile then has one reader, which misses no barrier phase


def heavy_options(call: Call) -> list[str]:
    """Return the fields of a Call that are set and take many registers."""
    fields = "softcap", "alibi_slopes", "bias", "seed", "mask", "mask_bits"
    return [name for name in fields if getattr(call, name) is not None and (name != "mask" or call.mask_bits is None)]


def backward_limits(call: Call) -> list[str]:
    """Return the reasons why the Hopper backward does not support the options of a call; [] if it does."""
    lacks, given = limits(call, forms=_FORMS_OF_BACKWARD), heavy_options(call)
    most = tile_table.MOST_OPTIONS.get(row_width(call), 1)
    both = row_width(call) == 128 and "bias" in given and not {"mask", "mask_bits"}.isdisjoint(given)
    if len(given) > most - both:
        names, fewer = ", ".join(map(_argument, given)), f", {most - 1} with bias and mask" if both else ""
        lacks.append(f"it supports {most} of {names} at once{fewer}: with more, its loop would reload registers")
    if call.seed is not None and call.origin is not None and not dropout.is_aligned(call.origin):
        lacks.append("it supports dropout_p in parts of a call only if rows and keys start at multiples of 16")
    if call.cu_seqlens_q is not None and (call.cu_seqlens_q.shape[0] - 1) * FEWEST_ROWS > call.query.shape[2]:
        few = f"packed sequences have fewer than {FEWEST_ROWS} rows on average"
        lacks.append(f"{few}: sums of dq would be mostly padding")
    return lacks + _odd(call, "value", "query")


def reachable(*tensors: Tensor) -> bool:
    return all(arguments.strided(x) and arguments.aligned(x) for x in tensors)


def tile_widths(call: Call) -> tuple[int, int]:
    """Return (columns of a key tile, columns of a value tile) in the backward.

    Each of two warpgroups computes half of the columns of dq, at least 64. With D and Dv up to 64 it computes half of
    the rows of a block of 128, or half of the columns of a block of 64.
    """
    width_k, width_v = width.fn(call.key.shape[3]), width.fn(call.value.shape[3])
    is_wide = row_width(call) > tile_table.ONE_PASS
    return (width_k if row_width(call) == 64 else max(width_k, 128)), (max(width_v, 128) if is_wide else width_v)


def row_width(call: Call) -> int:
    return tile_table.width_on_hopper(call.query.shape[3], call.value.shape[3])


def part_of(call):
    """Return the columns of each part of a query or key tile in the forward; None if tiles are not divided."""
    part = tile_table.PARTS.get(row_width(call))
    return None if part is None or call.query.shape[3] <= part else part


def value_columns(call):
    """Return the columns of a tile of values, and of the output, in the forward."""
    return min(width.fn(call.value.shape[3]), tile_table.MOST_COLUMNS)


def column_parts(call):
    """Return the number of programs that share the output columns of a block of rows in the forward."""
    return cdiv(call.value.shape[3], tile_table.MOST_COLUMNS)


def group_of(call):
    return call.query.shape[1] // max(1, call.key.shape[1])


def scores_of_a_head(call):
    """Return (shape, bytes) of the stored score gradients of a key head. Packed sequences get whole blocks of keys."""
    group, (_, _, rows, keys) = group_of(call), sizes(call)
    if call.cu_seqlens_k is not None:
        rows = max(1, min(rows, call.query.shape[2]))  # a maximum length may be any bound
        block = 2 * tile_table.WARPGROUP_ROWS
        keys = arguments.slots(call, block, by_keys=True) * block
    shape = group, 1, keys, cdiv(rows, 64) * 64  # each row starts an L2 line
    return shape, math.prod(shape) * call.query.element_size()


def buffers_of(call: Call) -> int:
    """Return the number of score buffers of a backward: one for gradients; with heads over 256, another for weights."""
    return 1 + (row_width(call) > 256)


def parts_of(call: Call) -> list[dict[str, slice]]:
    """Return the parts of a call, each {letter of Dims: slice}. Gradients of scores are stored for one part at a time.

    In packed sequences, a part is one query head of each key head; otherwise a range of rows that starts at a multiple
    of 128. [{}] is the whole call: its gradients fit, or it cannot be divided.
    """
    (group, _, _, padded), size = scores_of_a_head(call)
    if size <= tile_table.SCORES_BYTES:
        return [{}]
    if call.cu_seqlens_q is not None:
        divided = group > 1 and call.seed is None  # dropout counts the heads of a call
        return [{"H": slice(n, None, group)} for n in range(group)] if divided else [{}]
    block, length = 2 * tile_table.WARPGROUP_ROWS, call.query.shape[2]
    most = max(1, tile_table.SCORES_BYTES // (size // padded * block)) * block
    each = cdiv(cdiv(length, cdiv(length, most)), block) * block
    return [{"Q": slice(start, min(start + each, length))} for start in range(0, length, each)]


def stored_limits(call: Call) -> list[str]:
    """Return [reason why gradients of scores of packed sequences do not fit into memory], or []."""
    if call.cu_seqlens_q is None:
        return []
    ((group, *_), size), most = scores_of_a_head(call), 2 * tile_table.SCORES_BYTES // buffers_of(call)
    size //= group if call.seed is None else 1
    if size <= most:
        return []
    return [f"gradients of scores of a head take {size >> 20} MiB, and it stores no more than {most >> 20}"]


def _row(cache: Tensor) -> int:
    """Return the stride between the rows of a cache; between its pages if each has one row."""
    return cache.stride(0 if known(cache.shape[2] == 1, False) else 2)


def pitch_of(cache: Tensor) -> int:
    """Return the distance from a page of a cache to the next one in memory, in rows."""
    return cache.shape[2] if known(cache.shape[0] == 1, False) else cache.stride(0) // max(1, _row(cache))


def rows_of_cache(cache: Tensor) -> Tensor:
    """Return a cache as (1, Hkv, rows of all pages, D). Rows between pages may belong to other heads."""
    pages, heads, page, columns = cache.shape
    strides = 0, cache.stride(1), _row(cache), cache.stride(3)
    return cache.as_strided((1, heads, (pages - 1) * pitch_of(cache) + page, columns), strides)


@cache
def _layout(tile, dtype):
    return language.NVMMASharedLayout.get_default_for([*tile], getattr(language, str(dtype).removeprefix("torch.")))


def descriptor(tensor: Tensor, rows: int, columns: int | None = None, packed: bool = False, heads: int = 1) -> Any:
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
        shape = [RAGGED_ROWS + 1, total + 1, all_heads, RAGGED_ROWS, width]
        strides, block, tile = [2**34 - row, row, head, row, 1], [1, *block], [1, *tile]
    return TensorDescriptor(tensor, shape, strides, block, _layout(tuple(tile), tensor.dtype))


def of_bias(call, keys):
    bias = by_tiles(call)
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
    return TensorDescriptor(words, [*words.shape], [size, 1], [1, size], language.NVMMASharedLayout(0, 32, 2))
