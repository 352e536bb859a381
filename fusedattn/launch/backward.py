"""Gradients, from tensors to kernels: which of these run, and what each is given."""

import torch
from triton import cdiv

from ..call.form import Call
from ..call.packing import packing
from . import arguments, blocks, run, tiles


def _bias_sum(call):
    """What the gradient of the bias is a sum by: where it is broadcast decides whose loops it is taken in."""
    batch, heads, rows, keys = arguments.sizes(call)
    if call.bias.shape[3] == 1:
        return "rows"
    if call.bias.shape[2] == 1:
        return "keys"
    return "pairs" if call.bias.shape[:2] == (batch, heads) else "planes"


def passes(call: Call, need) -> tuple[str, ...]:
    """The kernels that make the gradients of those of the first fields of a Call that need them, in their order.

    One pass over the pairs where dq may be summed in any order, and nothing else is summed over whole rows. Otherwise
    one by rows and one by keys, whichever is needed: they give the same bits each time, as the call or torch may want.
    """
    query, key, value, bias, slopes, sinks = need
    where = _bias_sum(call) if bias else None
    by_rows, by_keys = where == "rows" or slopes or sinks, key or value or where == "keys"
    in_order = call.in_order or torch.are_deterministic_algorithms_enabled()
    in_any_order = run.widest(call) <= tiles.ONE_PASS and not in_order
    if query and by_keys and not by_rows and in_any_order:
        found = ["prepare", "one_pass", "convert"]
    else:
        by_rows = query or by_rows or (where == "pairs" and not by_keys)
        found = ["prepare", *["dq"] * bool(by_rows), *["dkdv"] * bool(by_keys)]
    return (*found, *["dbias"] * (where == "planes"))


def _view(tensor):
    return None if tensor is None else arguments.of(tensor)


def _spread(sums, offsets, most):
    """(n, H, most, 1) of sums by row (1, H, T, 1) of packed sequences, padded with zeros; others as they are."""
    if offsets is None:
        return sums
    return packing(offsets, sums.shape[2], most).pad(sums[0].transpose(0, 1)).transpose(1, 2)


def _totals(sums, offsets, batch):
    """(B, H) of sums by row (B, H, S, 1); of packed sequences (n, H), or, if a batch of 1 is enough, (1, H)."""
    if offsets is None or batch == 1:
        return sums.sum((2, 3))
    # Offsets that fall name nothing that they have passed. A scatter would sum in any order.
    offsets = offsets.long().clamp(0, sums.shape[2]).cummax(0).values
    return torch.segment_reduce(sums[0, :, :, 0].T.contiguous(), "sum", lengths=offsets.diff(), unsafe=True)


def fill(grads, grad_out, grad_lse, grad_weights, out, weights, stats, call: Call):
    """Fill grads, of the first fields of a Call; None for what is not needed.

    grad_lse and grad_weights may be None; weights are those of the forward, if there are gradients of them.
    """
    batch, heads, rows, keys = arguments.sizes(call)
    count, length = call.query.shape[0], call.query.shape[2]  # of packed sequences, all their rows are one batch's
    grad_query, grad_key, grad_value, grad_bias, grad_slopes, grad_sinks = grads
    names = passes(call, [x is not None for x in grads])
    common, (marks, grain) = arguments.common(call), blocks.marked(call)
    common |= dict(GradOut=arguments.of(grad_out), GradWeights=_view(grad_weights))

    def table(columns, length=length, new=stats.new_empty):
        return new((count, heads, length, columns))

    def blocks_of_rows(tile):
        return cdiv(length, tile.rows) * count * heads

    where = None if grad_bias is None else _bias_sum(call)
    by_rows = table(1) if where == "rows" else None
    by_keys = table(3, call.key.shape[2], stats.new_zeros) if where == "keys" else None
    whole = arguments.of(grad_bias.zero_()) if where == "pairs" else None
    slope_sums, sink_sums = (None if x is None else table(1) for x in (grad_slopes, grad_sinks))
    sums = None
    if "one_pass" in names:
        # In the dtype of sums: what the caller gets, where that is the same, and lies as the copy engine wants it.
        width, bulk = call.query.shape[3], any(tile.bulk for tile in run.candidates("one_pass", call))
        sums = table(cdiv(width, 4) * 4)[..., :width] if bulk or grad_query.dtype != stats.dtype else grad_query

    kept = table(4)
    taken = "GradOut", "GradWeights", "q_len", "k_len", "HEADS", "D", "DV", "PRECISION"
    own = dict(GradLse=grad_lse, Weights=_view(None if grad_weights is None else weights))
    of_scores = any(x is not None for x in (grad_query, grad_key, grad_bias, grad_slopes, grad_sinks))
    own |= dict(Out=arguments.of(out) if of_scores else None)
    own |= dict(Stats=stats, COLUMNS=stats.shape[3], Rows=kept, GradQ=_view(sums), k_len=keys)
    run.run_tiled("prepare", call, blocks_of_rows, {name: common[name] for name in taken} | own)
    common |= dict(Rows=kept)
    if "dq" in names:
        own = dict(GradQ=_view(grad_query), GradBias=whole)
        own |= dict(BiasSums=by_rows, SlopeSums=slope_sums, SinkSums=sink_sums)
        run.run_tiled(
            "dq",
            call,
            lambda tile: blocks.turns(call, tile.rows) * heads,
            common | own,
            lambda tile: blocks.walks(call, marks, grain, tile),
        )
        whole = None
    for name in {"one_pass", "dkdv"}.intersection(names):
        own = dict(GradK=_view(grad_key), GradV=_view(grad_value), GradBias=whole, BiasSums=by_keys)

        def more(tile):
            added = arguments.descriptor(sums, tile.rows) if tile.bulk else _view(sums)
            return blocks.walks(call, marks, grain, tile, by_keys=True) | dict(GradQ=added)

        def blocks_of_keys(tile):
            return blocks.turns(call, tile.keys, by_keys=True) * call.key.shape[1]

        run.run_tiled(name, call, blocks_of_keys, common | own, more)
    if sums is not None:
        own = dict(Sums=arguments.of(sums), GradQ=arguments.of(grad_query))
        own |= {name: common[name] for name in ("q_len", "score", "HEADS", "D")}
        run.run_tiled("convert", call, blocks_of_rows, own)
    if "dbias" in names:
        own_batch, own_heads = grad_bias.shape[:2]
        met = marks & 1
        met = met if own_batch == batch else met.amax(0, keepdim=True)
        met = met if own_heads == heads else met.amax(1, keepdim=True)
        met = met.expand(own_batch, own_heads, cdiv(rows, grain), cdiv(keys, grain))
        own = dict(GradBias=arguments.of(grad_bias), marks=arguments.of(met), GRAIN=grain)
        own |= dict(batches=batch // own_batch, BIAS_HEADS=own_heads, most_q=rows, most_k=keys)
        run.run_tiled(
            "dbias",
            call,
            lambda tile: cdiv(rows, tile.rows) * cdiv(keys, tile.keys) * own_batch * own_heads,
            common | own,
            lambda tile: dict(extents=blocks.extents(call.lengths)),
        )

    # In float64: it costs nothing here, and a sum over all rows of a head would else be as rough as their number.
    if by_rows is not None:
        grad_bias.copy_(_spread(by_rows.double(), call.offsets_q, rows).sum_to_size(grad_bias.shape))
    if by_keys is not None:
        total = _spread(by_keys.double().sum(3, keepdim=True), call.offsets_k, keys)
        grad_bias.copy_(total.mT.sum_to_size(grad_bias.shape))
    for each, grad in ((sink_sums, grad_sinks), (slope_sums, grad_slopes)):
        if each is not None:
            grad.copy_(_totals(each.double(), call.offsets_q, grad.shape[0]).sum_to_size(grad.shape))
