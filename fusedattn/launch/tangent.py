"""Launches the kernels of forward-mode derivatives: output and lse, then weights."""

from ..call.options import BY_HEAD, INPUTS, Call
from ..kernels.vocabulary.scores import Tangents
from . import arguments, blocks
from .forward import launch_weights


def launch_tangent(tangent_out, tangent_lse, tangent_weights, tangents, out, stats, call: Call):
    """Fill tangent_out, tangent_lse and, unless None, tangent_weights. tangents: of the INPUTS of the call."""
    tangents = dict(zip(INPUTS, tangents, strict=True))
    block_mask, (batch, heads, rows, keys), bias = blocks.block_mask_of(call), arguments.sizes(call), tangents["bias"]
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
    blocks.run_by_rows("tangent", call, launched, block_mask)
    if tangent_weights is not None:
        launched = shared | dict(TangentWeights=arguments.of(tangent_weights))
        launch_weights("tangent_weights", launched, tangent_weights.shape[3], call)
