"""Launches the kernels of forward-mode derivatives: output and lse, then weights."""

from triton import cdiv

from ..call.options import BY_HEAD, INPUTS, Call
from ..kernels.vocabulary.scores import Tangents
from . import arguments, blocks, run


def _views(call, tangents):
    batch, heads, rows, keys = arguments.sizes(call)
    bias = tangents["bias"]
    return Tangents(
        **{name[0]: arguments.of(tangents[name]) for name in ("query", "key", "value")},
        bias=None if bias is None else arguments.of(bias.expand(batch, heads, rows, keys)),
        **{name: arguments.each_head(tangents[name], batch, heads) for name in BY_HEAD},
    )


def passes(need_weights: bool) -> tuple[str, ...]:
    """Return the kernels that compute the tangents, in order."""
    return ("tangent", *["tangent_weights"] * need_weights)


def launch_tangent(tangent_out, tangent_lse, tangent_weights, tangents, out, stats, call: Call):
    """Fill the tangents of output, lse and, unless None, weights, from those of the INPUTS of a call."""
    tangents = dict(zip(INPUTS, tangents, strict=True))
    block_mask, heads = blocks.block_mask_of(call), call.query.shape[1]
    shared = arguments.common(call) | dict(Stats=stats, TangentLse=tangent_lse, tangents=_views(call, tangents))
    loaded = call.key, call.value, tangents["key"], tangents["value"]
    by_threads = any(arguments.by_threads(x) for x in loaded if x is not None)
    run.run_tiled(
        "tangent",
        call,
        lambda tile: blocks.slots(call, tile.rows) * heads,
        shared
        | dict(Out=arguments.of(out), TangentOut=arguments.of(tangent_out))
        | dict(spec=shared["spec"]._replace(BY_THREADS=by_threads)),
        lambda tile: blocks.walks(call, block_mask, tile),
    )
    if tangent_weights is None:
        return
    columns = tangent_weights.shape[3]
    shared.pop("V")
    run.run_tiled(
        "tangent_weights",
        call,
        lambda tile: blocks.slots(call, tile.rows) * cdiv(columns, tile.keys) * heads,
        shared | dict(TangentWeights=arguments.of(tangent_weights), columns=columns),
        lambda tile: dict(sequences=blocks.sequences_of(call, tile.rows)),
    )
