"""Launches the derivative in one direction: the kernel of its output and lse, and that of its weights."""

from triton import cdiv

from ..call.options import Call
from ..kernels.tangent import Tangents
from . import arguments, blocks, run


def _tangents(call, given):
    query, key, value, bias, slopes, sinks = given
    batch, heads, rows, keys = arguments.sizes(call)
    bias = None if bias is None else bias.expand(batch, heads, rows, keys)
    each_head = (arguments.each_head(x, batch, heads) for x in (slopes, sinks))
    return Tangents(*map(arguments.of, (query, key, value, bias)), *each_head)


def passes(need_weights: bool) -> tuple[str, ...]:
    """Return the kernels that compute the tangents, in order."""
    return ("tangent", *["tangent_weights"] * need_weights)


def launch_tangent(tangent_out, tangent_lse, tangent_weights, given, out, stats, call: Call):
    """Fill the tangents of output, lse and, unless None, weights, from those of the INPUTS of a call."""
    block_mask, mask_size = blocks.block_mask_of(call)
    shared = arguments.common(call) | dict(Stats=stats, TangentLse=tangent_lse, tangents=_tangents(call, given))
    heads, columns = call.query.shape[1], None if tangent_weights is None else tangent_weights.shape[3]
    loaded = call.key, call.value, given[1], given[2]
    by_threads = any(arguments.by_threads(x) for x in loaded if x is not None)
    run.run_tiled(
        "tangent",
        call,
        lambda tile: blocks.slots(call, tile.rows) * heads,
        shared
        | dict(Out=arguments.of(out), TangentOut=arguments.of(tangent_out))
        | dict(spec=shared["spec"]._replace(BY_THREADS=by_threads)),
        lambda tile: blocks.walks(call, block_mask, mask_size, tile),
    )
    if tangent_weights is None:
        return
    shared.pop("V")
    run.run_tiled(
        "tangent_weights",
        call,
        lambda tile: blocks.slots(call, tile.rows) * cdiv(columns, tile.keys) * heads,
        shared | dict(TangentWeights=arguments.of(tangent_weights), columns=columns),
        lambda tile: dict(sequences=blocks.sequences_of(call, tile.rows)),
    )
