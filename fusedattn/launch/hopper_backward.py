"""Launches the Hopper backwards: their buffers and arguments. `form` is the tile of a backward kernel."""

from typing import Any

import torch
from torch import Tensor
from triton import cdiv

from ..call.options import TENSORS, Call, Origin, sliced, with_tensors
from ..kernels.hopper import backward, products, visits
from ..kernels.vocabulary.masks import Masks
from ..kernels.vocabulary.memory import width
from . import arguments, blocks, hopper, run, tile_table
from .descriptors import descriptor, of_bias, of_words
from .tile_table import Backward


def unit(call: Call) -> tuple[int, int]:
    """Return (rows, columns) of a block in the buffer that sums dq. Each block is contiguous."""
    return tile_table.WARPGROUP_ROWS, hopper.tile_widths(call)[0]


def _is_table(call):
    """Return whether products subtract row statistics: not if scores are scaled first, or dp is after dropout."""
    return call.seed is None and arguments.scored(call).softmax_scale is not None


def _are_rows(call):
    """Return whether the statistics of a row of wide heads are together: for TMA if packed, and for other kernels."""
    return not call.cu_seqlens_q is call.bias is call.alibi_slopes is None


def new_rows(call: Call, stats: Tensor) -> tuple[Tensor, int | None]:
    """Return (buffer of row statistics that `preprocess` fills, its padded number of rows or None)."""
    batch, heads, length, _ = call.query.shape
    if hopper.row_width(call) <= tile_table.ONE_PASS and _is_table(call):
        return stats.new_empty((batch, 2 * heads, length, 16), dtype=torch.bfloat16), None
    if hopper.row_width(call) <= tile_table.ONE_PASS or _are_rows(call):
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
    width_k, width_v = hopper.tile_widths(call)
    at_once = width_k // (2 * each // form.rows)  # columns of dq that are added at a time
    lines, packed = sums.view(*sums.shape[:2], -1, 32), call.cu_seqlens_q is not None
    common, bias = _common(call), hopper.by_tiles(call)
    tiles = 0 if bias is None else hopper.bias_tiles(call, bias, form)
    made: Any = [descriptor(grad, each, width, packed) for grad, width in zip(grads, (width_k, width_v), strict=True)]
    columns: tuple[int, ...] = ()
    if call.partial:  # float32
        made, columns = map(arguments.of, grads), (call.key.shape[3], call.value.shape[3])
    grad_key, grad_value = made
    return dict(
        Q=descriptor(call.query, form.rows, width_k, packed),
        K=descriptor(call.key, each, width_k, packed),
        V=descriptor(call.value, each, width_v, packed),
        GradOut=descriptor(grad_out, form.rows, width_v, packed),
        Rows=descriptor(rows, form.rows, rows.shape[3], packed, heads=2 if _is_table(call) else 1),
        Bias=of_bias(call, each),
        Words=of_words(words),
        Sums=descriptor(lines, each // 2 * at_once // 16),
        Turns=turns,
        GradK=grad_key,
        GradV=grad_value,
        form=backward.Form(form.stages, tiles, common.pop("REGISTERS"), hopper.group_of(call), call.top_left, columns),
        rules=_rules(call),
        **common,
    )


def _stored(grad, rows, columns, packed):
    """Return how a kernel stores a gradient: float32, of a part of the keys or rows, by threads, others by TMA."""
    return arguments.of(grad) if grad.dtype == torch.float32 else descriptor(grad, rows, columns, packed)


def _rules(call):
    rules = arguments.rules(call)
    return rules._replace(masks=Masks(None, rules.masks.keys, None, rules.masks.bits))


def _common(call):
    return dict(
        heads=call.key.shape[1],
        REGISTERS=tile_table.REGISTERS[2][1:],
        **arguments.band(call),
    )


def _part(call, part):
    """Return one of `hopper.parts_of` a call."""
    length = call.query.shape[2]
    rows = part.get("Q", slice(0, length))
    of_blocks = slice(rows.start // blocks.BLOCK, cdiv(rows.stop, blocks.BLOCK))
    tensors = [sliced(name, getattr(call, name), q=of_blocks, **part) for name in TENSORS]
    call = with_tensors(call, tensors)._replace(partial=True)
    if "Q" not in part:
        return call
    origin = Origin(*call.origin or (0, 0, 0, 0, call.query.shape[1]))
    shift = origin.shift + (rows.start if call.top_left else rows.stop - length)
    return call._replace(origin=[*origin._replace(shift=shift, row=origin.row + rows.start)])


def heads_at_a_time(call: Call) -> int:
    """Return the number of key heads whose scores fit into the buffers at once."""
    (_, size), buffers = hopper.scores_of_a_head(call), hopper.buffers_of(call)
    fit, twice = (limit // (buffers * size) for limit in (tile_table.SCORES_BYTES, 2 * tile_table.SCORES_BYTES))
    return min(call.key.shape[0] * call.key.shape[1], max(1, fit, min(twice, 2 // buffers)))


def new_scores(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return the buffers for gradients of scores and, or None, weights: (query heads, 1, Sk, Sq rounded up to 64)."""
    (group, *shape), _ = hopper.scores_of_a_head(call)
    shape = [heads_at_a_time(call) * group, *shape]
    return call.query.new_empty(shape), call.query.new_empty(shape) if hopper.buffers_of(call) > 1 else None


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
    """Return arguments of hopper_bwd_ds or hopper_bwd_wide, but no sequences, tile lists, planes, before.

    words: of the mask, by `transpose_words`. scores and weights: buffers, as `new_scores` returns them.
    """
    each, (_, _, length, keys) = tile_table.WARPGROUP_ROWS, arguments.sizes(call)
    (width_k, width_v), packed = hopper.tile_widths(call), call.cu_seqlens_q is not None
    size = 2 * hopper.group_of(call) * length * (call.query.shape[3] + call.value.shape[3])
    common, rules, bias = _common(call), _rules(call), hopper.by_tiles(call)
    if words is not None:
        rules = rules._replace(masks=rules.masks._replace(bits=rules.masks.bits._replace(words=words)))
    registers, columns = common.pop("REGISTERS"), (call.query.shape[3], call.value.shape[3])
    shared = common | dict(
        section=_section(call, tile_table.SECTION_BYTES, size, cdiv(keys, form.keys), multiprocessors),
        rules=rules,
        Rows=descriptor(rows, form.rows, 4, packed)
        if _are_rows(call)
        else descriptor(rows[..., :length], 4, form.rows),
        GradScores=descriptor(scores[..., :length], each, form.rows),
    )
    if weights is not None:
        by_rows = {"Q": call.query, "GradOut": grad_out}
        by_keys = {"K": call.key, "V": call.value}
        return (
            shared
            | {name: descriptor(x, form.rows, each, packed) for name, x in by_rows.items()}
            | {name: descriptor(x, form.keys, each, packed) for name, x in by_keys.items()}
            | dict(Weights=descriptor(weights[..., :length], each, form.rows))
            | dict(form=visits.Form(hopper.group_of(call), *columns, call.top_left, registers))
        )
    return shared | dict(
        form=visits.Form(hopper.group_of(call), *columns, call.top_left, registers),
        Q=descriptor(call.query, form.rows, width_k, packed),
        K=descriptor(call.key, each, width_k, packed),
        V=descriptor(call.value, each, width_v, packed),
        GradOut=descriptor(grad_out, form.rows, width_v // 2, packed),
        Bias=None if bias is None or bias.shape[2] == 1 else of_bias(call, each),
        GradV=_stored(grad_value, each, width_v, packed),
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
    (_, _, length, _), packed = arguments.sizes(call), call.cu_seqlens_q is not None
    block = (2 * each, each) if of_key else (each, 2 * each)
    group, blocks = hopper.group_of(call), cdiv(grad.shape[2], form.keys)
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
        Product=_stored(grad, each, columns, packed),
        heads=grad.shape[1],
        scale=scale,
        form=made,
    )


def launch_sums(name, p, query_sums, turns, grads, form):
    """Compute dk and dv, and add up dq in query_sums, by a Hopper kernel."""
    call, device = p.call, run.device_of(p.call.query)
    grads = [grads["key"], grads["value"]]
    rows = p.launched["Rows"]
    kind = run.kind_of(name, call)
    with run.surroundings(device):
        words = blocks.words_by_keys(call, kind)
        launched = backward_arguments(call, p.grad_out, rows, words, query_sums, turns, grads, form)
        # Without a mask of pairs the kernel finds the blocks that a key mask leaves out by itself.
        call = call._replace(block_mask=None) if words is None else call
        launched |= blocks.walks(call, form, by_keys=True)
        programs = arguments.slots(call, form.keys, by_keys=True) * call.key.shape[1]
        run.run_kernel(name, programs, launched, device, kind, num_warps=4, maxnreg=tile_table.REGISTERS[2][0])


def _with_real(name, call, p, device, kind):
    """Return the call with a copy of key or value, with rows of 0 where key_mask hides a key: 0 * NaN is NaN."""
    if call.key_mask is None:
        return call
    original = getattr(call, name)
    (batch, heads, length, width), rows = original.shape, 64
    shown = hopper.writable(torch.empty_like(original))
    masks, views = p.launched["rules"].masks, dict(K=arguments.of(original), Shown=arguments.of(shown))
    launched = views | dict(keys=masks.keys, heads=heads, k_len=length, D=width, BLOCK_M=rows)
    run.run_kernel("real_keys", cdiv(length, rows) * batch * heads, launched, device, kind, num_warps=8)
    return call._replace(**{name: shown})


def launch_stored(name, p, grads, form):
    """Compute the gradients of query, key and value from stored gradients of scores, a part of the call at a time."""
    call, parts = p.call, hopper.parts_of(p.call)
    device, kind, statistics = run.device_of(call.query), run.kind_of(name, call), p.launched["Rows"]
    assert len(parts) == 1 or not run.is_replayed(), "what is recorded are launches: sums would be lost"
    with run.surroundings(device):
        words = blocks.words_by_keys(call, kind)
        call = call._replace(block_mask=None) if words is call.key_mask is None else call
        real = _with_real("key", call, p, device, kind)
        shown = call if hopper.buffers_of(call) == 1 else _with_real("value", real, p, device, kind)
        of_keys = totals = [grads[name] for name in ("key", "value")]
        for part in parts:
            made = of_keys if len(parts) == 1 else [torch.empty_like(x, dtype=torch.float32) for x in of_keys]
            of_rows = statistics if _are_rows(call) else statistics.mT
            of_rows, grad_out, grad_query = (sliced("query", x, **part) for x in (of_rows, p.grad_out, grads["query"]))
            of_rows = of_rows if _are_rows(call) else of_rows.mT
            given = real.key, grad_out, of_rows, words, (grad_query, *made)
            _launch_part(name, _part(shown, part) if part else shown, *given, form)
            totals = made if totals is of_keys else [total.add_(x) for total, x in zip(totals, made, strict=True)]
        for grad, total in zip(of_keys, totals, strict=True):
            if total is not grad:
                grad.copy_(total)


def _launch_part(name, call, key, grad_out, rows, words, grads, form):
    """Launch the kernels of `launch_stored` for a part of a call, some heads at a time.

    key: that of the call, with 0 in hidden rows. rows: row statistics. grads: of query, key and value.
    """
    (scores, weights), device = new_scores(call), run.device_of(call.query)
    multiprocessors, (grad_query, grad_key, grad_value) = run.multiprocessors(device), grads
    tile, (batch, heads, *_) = form._replace(rows=form.keys), call.key.shape
    at_a_time, several = heads_at_a_time(call), call.left is call.right is call.cu_seqlens_q is call.block_mask is None
    options = dict(device=device, kind=run.kind_of(name, call), num_warps=4, maxnreg=tile_table.REGISTERS[2][0])
    by_keys, by_rows = blocks.walks(call, tile, by_keys=True), blocks.walks(call, tile)
    first = stored_arguments(call, grad_out, rows, words, scores, weights, grad_value, form, multiprocessors)
    launches = [(name, first | by_keys, 1)]
    of_value = [] if weights is None else [("hopper_dk", weights, grad_out, grad_value, 1.0)]
    of_key = "hopper_dk", scores, call.query, grad_key, call.scale
    of_query = "hopper_dq", scores, key, grad_query, call.scale
    for kernel, stored, others, grad, scale in (*of_value, of_key, of_query):
        is_of_key = kernel == "hopper_dk"
        walks, members = (by_keys, 1) if is_of_key else (by_rows, hopper.group_of(call))
        product = product_arguments(call, stored, others, grad, is_of_key, scale, form, multiprocessors)
        launches.append((kernel, product | walks, members * product["form"].ACROSS))
    for before in range(0, batch * heads, at_a_time):
        for kernel, launched, members in launches:
            planes = min(at_a_time, batch * heads - before) * members
            programs = arguments.slots(call, form.keys, kernel != "hopper_dq") // batch * planes
            programs = min(programs, multiprocessors) if kernel != name and several else programs
            some = dict(planes=planes, section=min(planes, launched["section"]), before=before)
            run.run_kernel(kernel, programs, launched | some, **options)
