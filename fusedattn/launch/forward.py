"""Launches of the forward kernel (Hopper's or the general one), and of those for tangents and attention weights."""

import functools

from triton import cdiv

from ..call.options import BY_HEAD, INPUTS, Call, sizes
from ..kernels.vocabulary.scores import Tangents
from . import arguments, blocks, grids, hopper, run, tile_table

if hopper.missing is None:
    from .hopper_forward import launch_on_hopper


def run_by_rows(name, call, launched):
    """Run a kernel in which each program loops over the keys for one block of rows of one head."""

    def more(tile):
        described = arguments.described(tile, tile.keys, call.key_mask, K=call.key, V=call.value)
        return described | blocks.walks(call, tile)

    run.run_tiled(name, call, functools.partial(arguments.programs, call), launched, more)


def _forward(out, lse, stats, call):
    if call.query.shape[0] * call.key.shape[1] >= run.multiprocessors(run.device_of(call.query)):  # still fills the GPU
        call, out = arguments.pack_gqa(call, out, tile_table.FEW_ROWS)
    call = blocks.marked(call)
    common = arguments.common(call, BY_THREADS=arguments.by_threads(call.key))
    run_by_rows("forward", call, common | dict(Out=arguments.of(out), Lse=lse, Stats=stats))


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
