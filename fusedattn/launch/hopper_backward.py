"""Launches of the Hopper backwards. form: the kernel's tile. p: the call, grad_out, and launched, {name: argument}."""

import torch
from torch import Tensor
from triton import cdiv

from ..call.options import TENSORS, Call, origin_of, sizes, sliced, with_tensors
from ..kernels.vocabulary.masks import Masks
from ..kernels.vocabulary.memory import width
from . import arguments, blocks, hopper, run, tile_table
from .hopper import descriptor, of_bias, of_words

REGISTERS, OPTIONS = tile_table.REGISTERS[2][1:], dict(num_warps=4, maxnreg=tile_table.REGISTERS[2][0])
EACH = tile_table.WARPGROUP_ROWS  # keys of a warpgroup


def unit(call: Call) -> tuple[int, int]:
    """Return (rows, columns) of a block in the buffer that sums dq. Each block is contiguous."""
    return EACH, hopper.tile_widths(call)[0]


def _are_rows(call):
    """Return whether row statistics of wide heads are (rows, 4), as packed rows and kernels dq, dkdv and dbias need."""
    return not call.cu_seqlens_q is call.bias is call.alibi_slopes is None or arguments.sums_sinks_by_row(call)


def new_rows(call: Call, stats: Tensor, score) -> tuple[Tensor, int | None]:
    """Return (buffer of row statistics that `preprocess` fills, its padded number of rows or None)."""
    (batch, heads, length, _), narrow = call.query.shape, hopper.row_width(call) <= tile_table.ONE_PASS
    # Products subtract row statistics: not with dropout, scaled scores, wide heads or the kernel dq.
    if narrow and call.seed is None and score.softmax_scale is not None and not arguments.sums_sinks_by_row(call):
        return stats.new_empty((batch, 2 * heads, length, 16), dtype=torch.bfloat16), None
    if narrow or _are_rows(call):
        return stats.new_empty((batch, heads, length, 4)), None
    pitch = cdiv(length, 4) * 4  # TMA reads 16 bytes at a time
    return stats.new_empty((batch, heads, 4, pitch)), pitch


def _rules(p, words):
    """Return the Rules of a backward. Their masks are the key mask and, unless None, a mask of pairs in `words`."""
    rules = p.launched["rules"]
    bits = None if words is None else rules.masks.bits._replace(words=words)
    return rules._replace(masks=Masks(None, rules.masks.keys, None, bits))


def _result(call, grad, columns):
    """Return the argument for a gradient: a descriptor, or a View if it is float32, because a sum of parts follows."""
    if grad.dtype == torch.float32:
        return arguments.of(grad)
    return descriptor(grad, EACH, columns, call.cu_seqlens_q is not None)


def _dq_at(call, in_order):
    """Return when a step stores dq (`backward.Form`): the latest point with few register reloads (bench/NOTES.md)."""
    given = hopper.heavy_options(call)
    if len(given) == 2 and call.seed is not None:
        return 1
    return 0 if len(given) > 2 or (len(given) == 2 and (in_order or call.bias is not None)) else 2


def launch_sums(name, p, query_sums, turns, grads, form):
    """Compute dk and dv, and add up dq in query_sums, by hopper_bwd or hopper_bwd_deterministic."""
    call, device, rows = p.call, run.device_of(p.call.query), p.launched["Rows"]
    kind, packed, bias = run.kind_of(name, call), call.cu_seqlens_q is not None, hopper.by_tiles(call)
    width_k, width_v = hopper.tile_widths(call)
    at_once = width_k // (2 * EACH // form.rows)  # columns of dq that are added at a time
    tiles = 0 if bias is None else hopper.bias_tiles(call, bias, form)
    columns = (call.key.shape[3], call.value.shape[3]) if call.partial else ()
    dq_at, group = _dq_at(call, turns is not None), hopper.group_of(call)
    with run.surroundings(device):
        words = blocks.words_by_keys(call, kind)
        launched = arguments.band(call) | dict(
            Q=descriptor(call.query, form.rows, width_k, packed),
            K=descriptor(call.key, EACH, width_k, packed),
            V=descriptor(call.value, EACH, width_v, packed),
            GradOut=descriptor(p.grad_out, form.rows, width_v, packed),
            Rows=descriptor(rows, form.rows, rows.shape[3], packed, heads=rows.shape[1] // call.query.shape[1]),
            Bias=of_bias(call, EACH),
            Words=of_words(words),
            Sums=descriptor(query_sums.view(*query_sums.shape[:2], -1, 32), EACH // 2 * at_once // 16),
            Turns=turns,
            GradK=_result(call, grads["key"], width_k),
            GradV=_result(call, grads["value"], width_v),
            rules=_rules(p, call.mask_bits),
            heads=call.key.shape[1],
            form=hopper.backward.Form(form.stages, tiles, dq_at, REGISTERS, group, call.top_left, columns),
        )
        # Without a mask of pairs, the kernel itself finds the blocks that a key mask hides.
        call = call._replace(block_mask=None) if words is None else call
        launched |= blocks.walks(call, form, by_keys=True)
        programs = arguments.slots(call, form.keys, by_keys=True) * call.key.shape[1]
        run.run_kernel(name, programs, launched, device, kind, **OPTIONS)


def heads_at_a_time(call: Call) -> int:
    """Return the number of key heads whose scores fit into the buffers at once."""
    (_, size), buffers = hopper.scores_of_a_head(call), hopper.buffers_of(call)
    fit, twice = (limit // (buffers * size) for limit in (tile_table.SCORES_BYTES, 2 * tile_table.SCORES_BYTES))
    return min(call.key.shape[0] * call.key.shape[1], max(1, fit, min(twice, 2 // buffers)))


def new_scores(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return buffers (query heads, 1, Sk, Sq rounded up to 64): for gradients of scores, and for weights or None."""
    (group, *shape), _ = hopper.scores_of_a_head(call)
    shape = [heads_at_a_time(call) * group, *shape]
    return call.query.new_empty(shape), call.query.new_empty(shape) if hopper.buffers_of(call) > 1 else None


def _section(call, fits, size, blocks, multiprocessors):
    """Return how many kv heads are scheduled together, so that their blocks read from L2.

    fits: bytes of L2 to use. size: bytes of a head that its blocks read. blocks: number of blocks in a head. A
    causal mask or a window makes blocks unequal, and short blocks cannot fill a GPU. Sections (heads scheduled
    together) then have nearly equal numbers of heads, and at least 1.5 blocks per multiprocessor.
    """
    heads, most = heads_at_a_time(call), max(1, fits // size)
    if call.left is None and call.right is None:
        return most
    sections = max(1, heads // max(most, cdiv(3 * multiprocessors, 2 * blocks)))
    return cdiv(heads, sections)


def _stored(p, words, scores, weights, grad_value, form, multiprocessors):
    """Return arguments of hopper_bwd_wide (with `weights`) or hopper_bwd_ds. `_launch_part` adds the others."""
    call, rows, (width_k, width_v) = p.call, p.launched["Rows"], hopper.tile_widths(p.call)
    (_, _, length, keys), group = sizes(call), hopper.group_of(call)
    columns = call.query.shape[3], call.value.shape[3]
    packed, bias, size = call.cu_seqlens_q is not None, hopper.by_tiles(call), 2 * group * length * sum(columns)
    launched = arguments.band(call) | dict(
        GradScores=descriptor(scores[..., :length], EACH, form.rows),
        rules=_rules(p, words),
        heads=call.key.shape[1],
        section=_section(call, tile_table.SECTION_BYTES, size, cdiv(keys, form.keys), multiprocessors),
        form=hopper.visits.Form(group, *columns, call.top_left, REGISTERS, bias is None),
    )
    if _are_rows(call):
        launched["Rows"] = descriptor(rows, form.rows, 4, packed)
    else:
        launched["Rows"] = descriptor(rows[..., :length], 4, form.rows)
    if weights is not None:
        shapes = (form.rows, EACH), (form.keys, EACH), (form.keys, EACH), (form.rows, EACH)
        launched["Weights"] = descriptor(weights[..., :length], EACH, form.rows)
    else:
        shapes = (form.rows, width_k), (EACH, width_k), (EACH, width_v), (form.rows, width_v // 2)
        launched["Bias"] = None if bias is None or bias.shape[2] == 1 else of_bias(call, EACH)
        launched["GradV"] = _result(call, grad_value, width_v)
    tensors = dict(Q=call.query, K=call.key, V=call.value, GradOut=p.grad_out)
    blocks = zip(tensors.items(), shapes, strict=True)
    return launched | {name: descriptor(x, *shape, packed) for (name, x), shape in blocks}


def _with_real(name, call, p, device, kind):
    """Return the call with 0 in key or value (`name`) where key_mask hides a key, because 0 * NaN is NaN."""
    if call.key_mask is None:
        return call
    original = getattr(call, name)
    (batch, heads, length, width), rows = original.shape, 64
    shown = hopper.writable(torch.empty_like(original))
    masks, views = p.launched["rules"].masks, dict(K=arguments.of(original), Shown=arguments.of(shown))
    launched = views | dict(keys=masks.keys, heads=heads, k_len=length, D=width, BLOCK_M=rows)
    run.run_kernel("real_keys", cdiv(length, rows) * batch * heads, launched, device, kind, num_warps=8)
    return call._replace(**{name: shown})


def _product(call, factor, others, grad, of_key, scale, form, multiprocessors):
    """Return arguments of hopper_dk (`of_key`) or hopper_dq to multiply factor by others; `_launch_part` adds some."""
    columns = min(max(128, width.fn(grad.shape[3])), tile_table.MOST_COLUMNS)
    across = cdiv(grad.shape[3], columns)  # programs for the columns of a block
    (_, _, length, _), group, blocks = sizes(call), hopper.group_of(call), cdiv(grad.shape[2], form.keys)
    members = group if of_key else 1  # query heads that a block sums
    size = 2 * others.shape[2] * others.shape[3] * members
    section = _section(call, tile_table.SECTION_BYTES // 2, size, blocks * group // members, multiprocessors)
    return arguments.band(call) | dict(
        section=section * group // members * across,
        GradScores=descriptor(factor[..., :length], *((2 * EACH, EACH) if of_key else (EACH, 2 * EACH))),
        Others=descriptor(others, EACH, columns, call.cu_seqlens_q is not None),
        Product=_result(call, grad, columns),
        heads=grad.shape[1],
        scale=scale,
        form=hopper.products.Form(group, members, grad.shape[3], across, of_key, call.top_left, form.stages, REGISTERS),
    )


def _part(p, part):
    """Return p for a part of its call. part: slices from `hopper.parts_of`."""
    call, is_of_rows = p.call, _are_rows(p.call)
    rows, slices = part.get("Q"), part
    if rows is not None:
        slices = part | dict(q=slice(rows.start // blocks.BLOCK, cdiv(rows.stop, blocks.BLOCK)))
    some = with_tensors(call, [sliced(name, getattr(call, name), **slices) for name in TENSORS])
    if rows is not None:
        origin = origin_of(call)
        shift = origin.shift + (rows.start if call.top_left else rows.stop - call.query.shape[2])
        some = some._replace(origin=[*origin._replace(shift=shift, row=origin.row + rows.start)])
    statistics = p.launched["Rows"]
    statistics = sliced("query", statistics if is_of_rows else statistics.mT, **part)
    launched = p.launched | dict(rules=arguments.rules(some), Rows=statistics if is_of_rows else statistics.mT)
    return p._replace(call=some, grad_out=sliced("query", p.grad_out, **part), launched=launched)


def launch_stored(name, p, grads, form):
    """Compute the gradients of query, key and value from stored gradients of scores, a part of the call at a time."""
    call, parts = p.call, hopper.parts_of(p.call)
    device, kind = run.device_of(call.query), run.kind_of(name, call)
    with run.surroundings(device):
        words = blocks.words_by_keys(call, kind)
        call = call._replace(block_mask=None) if words is call.key_mask is None else call
        real = _with_real("key", call, p, device, kind)
        shown = call if hopper.buffers_of(call) == 1 else _with_real("value", real, p, device, kind)
        p, totals = p._replace(call=shown), {}
        if parts == [{}]:
            _launch_part(name, kind, p, real.key, words, grads, form)
            return
        for part in parts:
            found = {x: torch.empty_like(grads[x], dtype=torch.float32) for x in ("key", "value")}
            of_query = sliced("query", grads["query"], **part)
            _launch_part(name, kind, _part(p, part), real.key, words, found | dict(query=of_query), form)
            totals = {x: totals[x].add_(found.pop(x)) for x in totals} or found  # pop frees sums before the next part
        for x, total in totals.items():
            grads[x].copy_(total)


def _launch_part(name, kind, p, key, words, grads, form):
    """Launch the kernels of `launch_stored` for a call or a part of it, some heads at a time.

    kind: `run.kind_of` the whole call. key: its key, with 0 for hidden keys. words: from `blocks.words_by_keys`.
    """
    call, device = p.call, run.device_of(p.call.query)
    multiprocessors = run.multiprocessors(device)
    (scores, weights), tile, (batch, heads, *_) = new_scores(call), form._replace(rows=form.keys), call.key.shape
    at_a_time, several = heads_at_a_time(call), call.left is call.right is call.cu_seqlens_q is call.block_mask is None
    options = OPTIONS | dict(device=device, kind=kind)
    by_keys, by_rows = blocks.walks(call, tile, by_keys=True), blocks.walks(call, tile)
    first = _stored(p, words, scores, weights, grads["value"], form, multiprocessors)
    launches = [(name, first | by_keys, 1)]
    of_value = [] if weights is None else [("hopper_dk", weights, p.grad_out, grads["value"], 1.0)]
    of_key = "hopper_dk", scores, call.query, grads["key"], call.scale
    of_query = "hopper_dq", scores, key, grads["query"], call.scale
    for kernel, stored, others, grad, scale in (*of_value, of_key, of_query):
        is_of_key = kernel == "hopper_dk"
        walks, members = (by_keys, 1) if is_of_key else (by_rows, hopper.group_of(call))
        product = _product(call, stored, others, grad, is_of_key, scale, form, multiprocessors)
        launches.append((kernel, product | walks, members * product["form"].ACROSS))
    for before in range(0, batch * heads, at_a_time):
        for kernel, launched, members in launches:
            planes = min(at_a_time, batch * heads - before) * members
            programs = arguments.slots(call, form.keys, kernel != "hopper_dq") // batch * planes
            programs = min(programs, multiprocessors) if kernel != name and several else programs
            some = dict(planes=planes, section=min(planes, launched["section"]), before=before)
            run.run_kernel(kernel, programs, launched | some, **options)
