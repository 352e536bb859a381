"""Launches of the forward kernel (Hopper's or the general one), and of those for tangents and attention weights."""

import functools

import torch
from triton import cdiv

from ..call.decode import capacity_of
from ..call.options import BY_HEAD, INPUTS, Call, sizes
from ..kernels.vocabulary.scores import Tangents
from . import arguments, blocks, decode, grids, hopper, run, tile_table
from .hopper import descriptor, of_bias, of_words


def run_by_rows(name, call, launched):
    """Run a kernel in which each program loops over the keys for one block of rows of one head."""
    walks = functools.partial(blocks.walks, call)
    run.run_tiled(name, call, functools.partial(arguments.programs, call), launched, walks)


def _forward(out, lse, stats, call):
    if call.query.shape[0] * call.key.shape[1] >= run.multiprocessors(run.device_of(call.query)):  # still fills the GPU
        call, out = arguments.pack_gqa(call, out, tile_table.FEW_ROWS)
    call = blocks.marked(call)
    common = arguments.common(call, BY_THREADS=arguments.by_threads(call.key))
    run_by_rows("forward", call, common | dict(Out=arguments.of(out), Lse=lse, Stats=stats))


def _visible(call, more):
    """Return the maximum number of keys that `more` + 1 neighbouring rows see."""
    keys = sizes(call)[3]
    return keys if call.left is None or call.right is None else min(keys, call.left + call.right + 1 + more)


def splits_on_hopper(call: Call, pipeline: tile_table.Pipeline, multiprocessors: int) -> int:
    """Return the number of splits of the keys. It depends on no values of tensors, so equal calls give equal bits."""
    if call.cu_seqlens_q is not None or call.sinks is not None or call.query_mask is not None:
        return 1
    batch, heads, rows, _ = sizes(call)
    blocks = cdiv(rows, pipeline.rows) * batch * heads * hopper.column_parts(call)
    steps = cdiv(_visible(call, pipeline.rows - 1), 64)
    merged = 8 * batch * heads * rows * call.value.shape[3] / tile_table.MERGED_BYTES_A_US
    return _fastest(blocks, steps, *tile_table.BLOCK_US[hopper.row_width(call)], merged, multiprocessors)


@functools.lru_cache(maxsize=1024)  # sequences may have any length
def _fastest(blocks, steps, fixed, each, merged, multiprocessors):
    """Return the number of splits with the smallest estimated time; 1 if splits save less than a tenth.

    steps: 64 keys each. fixed, each, merged: us for a block of rows, for one of its steps, and for merging a split.
    """

    def estimate(count):
        rounds = cdiv(blocks * count, multiprocessors)
        return rounds * (fixed + each * cdiv(steps, count)) + (count > 1) * (tile_table.MERGE_US + merged * count)

    most = min(4 * multiprocessors // max(1, blocks), tile_table.MOST_SPLITS, steps)
    best = min(range(1, max(1, most) + 1), key=estimate)
    return best if estimate(best) < 0.9 * estimate(1) else 1


def programs_on_hopper(call: Call, pipeline: tile_table.Pipeline, count: int, multiprocessors: int) -> int:
    """Return the grid size. If it is below the number of blocks, a program computes several. count: key splits."""
    batch, heads, _, _ = sizes(call)
    count *= hopper.column_parts(call)
    planes, band, keys = batch * heads * count, hopper.band_of(call), _visible(call, 0)
    blocks = arguments.slots(call, pipeline.rows) * heads * count
    most = tile_table.SHARED_KEYS if band == "full" else tile_table.SHARED_KEYS_OF_BANDS
    if keys > most.get(hopper.row_width(call), keys):
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


def _arguments_on_hopper(call, out, lse, stats, pipeline, partials, count, cached):
    """Return arguments of the Hopper forward; `launch_on_hopper` adds the others. count: number of key splits."""
    query, key, value, packed = call.query, call.key, call.value, call.cu_seqlens_q is not None
    caches, page, by_rows = hopper.work.Caches(None, None, None), hopper.RAGGED_ROWS, packed
    if cached is not None:
        lengths, by_rows = cached.lengths.clamp(0, capacity_of(cached)) + cached.added, True
        key, value = hopper.rows_of_cache(cached.key_cache), hopper.rows_of_cache(cached.value_cache)
        caches = hopper.work.Caches(*map(arguments.of, (lengths, cached.table)), hopper.pitch_of(cached.key_cache))
        if cached.table is not None and cached.table.shape[1] > 1:
            page = cached.key_cache.shape[2]
    (batch, heads), keys, group = query.shape[:2], max(1, sizes(call)[3]), hopper.group_of(call)
    together = tile_table.L2_BYTES // (2 * keys * (query.shape[3] + value.shape[3]))
    by_tma = partials is None and out.dtype == query.dtype
    wide = None if partials is not None or by_tma else arguments.of(out)
    part, each, columns = hopper.part_of(call), tile_table.WARPGROUP_ROWS, hopper.value_columns(call)
    parts = 1 if part is None else cdiv(query.shape[3], part)
    planes = count * hopper.column_parts(call)  # key splits x parts of the output, for each head
    by_groups = tile_table.REGISTERS if call.key_mask is call.mask_bits is None else tile_table.CLEANING_REGISTERS
    _, *registers = by_groups[pipeline.warpgroups]
    form = pipeline.warpgroups, pipeline.stages, tuple(registers)
    return arguments.band(call) | dict(
        Q=descriptor(query, each, part, packed),
        K=descriptor(key, pipeline.keys, part, by_rows),
        V=descriptor(value, pipeline.keys, columns, by_rows),
        caches=caches,
        Bias=of_bias(call, pipeline.keys),
        Words=of_words(call.mask_bits),
        Out=descriptor(out, each, columns, packed) if by_tma else None,
        stored=hopper.forward.Stored(wide, partials, *((lse, stats) if partials is None else (None, None))),
        rules=arguments.rules(call),
        planes=batch * heads * planes,
        section=min(batch * heads, max(1, together) * group) * planes,
        splits=count,
        spec=hopper.forward.Spec(heads, group, value.shape[3], parts, call.top_left, page, *form),
    )


def launch_on_hopper(out, lse, stats, call, cached=None):
    """Run the Hopper forward. Tensors that TMA cannot read are copied first, except the caches of a Decode."""
    call, kind = arguments.bounded(call), run.kind_of("hopper", call, cached is not None)
    call = hopper.all_readable(call) if cached is None else hopper.all_readable(call, ("query",))
    # Never pack calls with masks or a bias. With gradients a block mask forbids it; without, bits must be the same.
    if not arguments.hides(call):
        call, out = arguments.pack_gqa(call, out, 2 * tile_table.WARPGROUP_ROWS)
    # Do not use the block mask of a bias, which only gradients need: making it reads the bias, and it reorders blocks.
    unmasked = call.mask is call.mask_bits is call.key_mask is None
    call = call._replace(block_mask=None) if unmasked else blocks.marked(call)
    pipeline, device = run.form_on_hopper("hopper", call), run.device_of(call.query)
    if pipeline is None:
        raise run.none_is_right("hopper", device)
    processors = run.multiprocessors(device)
    count = splits_on_hopper(call, pipeline, processors)
    partials = decode.new_partials(out, count, torch.float32) if count > 1 else None
    target = out if call.partial or count > 1 else hopper.writable(out)
    launched = _arguments_on_hopper(call, target, lse, stats, pipeline, partials, count, cached)
    with run.surroundings(device):
        used = None if call.cu_seqlens_q is None else run.full(call.cu_seqlens_q, (1,), 0)
        launched |= blocks.walks(call, pipeline, used=used) | dict(used=used)
        registers, *_ = tile_table.REGISTERS[pipeline.warpgroups]
        grid = programs_on_hopper(call, pipeline, count, processors)
        run.run_kernel("hopper", grid, launched, device, kind, num_warps=4, maxnreg=registers)
    if partials is not None:
        more = dict(Out=arguments.of(out), partials=partials, splits=count, Lse=lse, Stats=stats)
        decode.combine(call, more, launched["rules"].score.softmax_scale, out.shape)
    elif target is not out:
        out.copy_(target)


def _launch_weights(name, weights, launched, call: Call):
    """Launch the kernel that fills `weights` with attention weights or their tangents. launched: other arguments."""
    columns, launched = weights.shape[3], {key: x for key, x in launched.items() if key != "V"}
    launched |= dict(Weights=arguments.of(weights), width=columns)

    def programs(tile):
        return arguments.slots(call, tile.rows) * cdiv(columns, tile.keys) * call.query.shape[1]

    run.run_tiled(name, call, programs, launched, lambda tile: dict(sequences=blocks.sequences_of(call, tile.rows)))


def launch_forward(out, lse, weights, stats, call: Call, on_hopper: bool):
    """Compute the forward into `out` and, unless None, lse, weights and stats. Weights need stats."""
    grids.check(call)
    (launch_on_hopper if on_hopper else _forward)(out, lse, stats, call)
    if weights is not None:
        launched = arguments.common(call) | dict(Stats=stats, TangentLse=None, tangents=Tangents())
        _launch_weights("weights", weights, launched, call)


def launch_tangent(tangent_out, tangent_lse, tangent_weights, tangents, out, stats, call: Call):
    """Compute the tangents of output, lse and weights from `tangents` of the INPUTS. tangent_weights may be None."""
    grids.check(call)
    tangents, call = dict(zip(INPUTS, tangents, strict=True)), blocks.marked(call)
    (batch, heads, rows, keys), bias = sizes(call), tangents["bias"]
    views = Tangents(
        **{name[0]: arguments.of(tangents[name]) for name in ("query", "key", "value")},
        bias=None if bias is None else arguments.of(bias.expand(batch, heads, rows, keys)),
        **{name: arguments.each_head(tangents[name], batch, heads) for name in BY_HEAD},
    )
    shared = arguments.common(call) | dict(Stats=stats, TangentLse=tangent_lse, tangents=views)
    loaded = call.key, call.value, tangents["key"], tangents["value"]
    by_threads = any(arguments.by_threads(x) for x in loaded if x is not None)
    launched = shared | dict(Out=arguments.of(out), TangentOut=arguments.of(tangent_out))
    launched["spec"] = shared["spec"]._replace(BY_THREADS=by_threads)
    run_by_rows("tangent", call, launched)
    if tangent_weights is not None:
        _launch_weights("tangent_weights", tangent_weights, shared, call)
