"""Choice and launch of the kernels of a backward. form: the tile of the Hopper kernel; None if no such kernel runs."""

import functools
from typing import Any, NamedTuple

import torch
from triton import cdiv

from ..call.options import ATTENDED, INPUTS, Call, lengths_of, sizes, wide_dtype
from ..call.padding import padding
from ..kernels.preprocess import Shown
from ..kernels.vocabulary.gradient import Grads, Incoming
from ..kernels.vocabulary.masks import EMPTY
from ..kernels.vocabulary.row_sums import ByRow
from . import arguments, blocks, failures, grids, hopper, hopper_backward, run, tile_table, tuned
from .forward import run_by_rows


class _Pass(NamedTuple):
    """Values that all kernels of a backward share. launched: {name: kernel argument}."""

    call: Call
    grad_out: torch.Tensor
    launched: dict[str, Any]

    def blocks_of_rows(self, tile):
        batches, heads, length, _ = self.call.query.shape  # packed sequences are one batch of all rows
        return cdiv(length, tile.rows) * batches * heads

    def table(self, like, columns):
        """Return an uninitialised buffer (B, Hq, Sq, columns), with the dtype and device of `like`."""
        return like.new_empty((*self.call.query.shape[:3], columns))


def _bias_sum(call):
    """Return how to sum a bias gradient: by row ("rows"), key ("keys"), batch or head ("planes"), or not ("pairs")."""
    batch, heads, rows, keys = sizes(call)
    if call.bias.shape[3] == 1:
        return "rows"
    if call.bias.shape[2] == 1:
        return "keys"
    return "pairs" if call.bias.shape[:2] == (batch, heads) else "planes"


def _by_row(needed, where):
    """Return {field of ByRow: whether its buffer is needed}. needed: {input: bool}. where: result of `_bias_sum`."""
    return {name: where == "rows" if name == "bias" else needed[name] for name in ByRow._fields}


def _is_deterministic(call):
    return call.deterministic or torch.are_deterministic_algorithms_enabled()


def reasons_not_on_hopper(call: Call, need, backend: str) -> list[str]:
    """Return the reasons why the backward on a Hopper GPU does not run a Hopper kernel; [] if it does."""
    if hopper.missing is not None:
        return [hopper.missing]
    kernel, needed = run.backward_on_hopper(call, _is_deterministic(call)), dict(zip(INPUTS, need, strict=True))
    lacks = hopper.backward_limits(call) + hopper.unreachable(call)
    if not (needed["query"] and (needed["key"] or needed["value"])):
        lacks.append("it does not make the gradient of query alone, nor those of key and value alone")
    lacks += hopper.stored_limits(call) if kernel in tile_table.STORED else []
    if lacks:
        return lacks
    if call.named and backend != "hopper":
        return [f"{backend!r} is named"]
    device = run.device_of(call.query)
    if not call.named and (why := failures.known(run.kind_of(kernel, call))) is not None:
        return [str(why)]
    if not call.named and not tuned.prefers_hopper(kernel, call, device):
        return [tuned.SLOWER]
    return [] if run.form_on_hopper(kernel, call) else [str(run.none_is_right(kernel, device))]


def passes(call: Call, need, backend: str = "triton", of_weights: bool = False) -> tuple[str, ...]:
    """Return the names of a backward's kernels, in order. need: for each of INPUTS, whether its gradient is needed."""
    # of_weights: the weights have a gradient, which Hopper kernels do not support. A Hopper kernel runs if there is no
    # reason against it. Otherwise one_pass runs if heads are narrow, dq may be summed in any order, no other gradient
    # is summed by row, and tuning did not find two passes faster. Otherwise dq and dkdv run, which are deterministic.
    needed = dict(zip(INPUTS, need, strict=True))
    where = _bias_sum(call) if needed["bias"] else None
    by_rows = any(_by_row(needed, where).values())
    by_keys = needed["key"] or needed["value"] or where == "keys"
    deterministic = _is_deterministic(call)
    narrow = run.widest(call) <= tile_table.ONE_PASS
    if run.has_hopper(call.query) and not of_weights and not reasons_not_on_hopper(call, need, backend):
        # The Hopper kernels have no registers for gradients of slopes and of a bias. So other kernels compute the
        # gradients of scores again, and sum or store them. But `preprocess` computes sums for sinks and row biases from
        # row statistics, unless rows see keys of other calls, or packed sequences have different sinks.
        by_rows = where == "rows" or needed["sinks"]
        by_rows &= call.partial or arguments.sums_sinks_by_row(call)
        by_rows |= needed["alibi_slopes"] or where == "pairs"
        special = run.backward_on_hopper(call, deterministic)
        names = ["preprocess", special, *["postprocess"] * (special not in tile_table.STORED)]
        names += ["dq"] * by_rows + ["dkdv"] * (where == "keys")
    elif needed["query"] and by_keys and not by_rows and narrow and not (deterministic or run.prefers_two_passes(call)):
        names = ["preprocess", "one_pass", "postprocess"]
    else:
        by_rows = needed["query"] or by_rows or (where == "pairs" and not by_keys)
        names = ["preprocess", *["dq"] * bool(by_rows), *["dkdv"] * bool(by_keys)]
    return (*names, *["dbias"] * (where == "planes"))


def _spread(sums, offsets, most):
    """Pad sums by row or key of packed sequences to (n, H, maximum length, 1); return other sums unchanged."""
    if offsets is None:
        return sums
    return padding(offsets, sums.shape[2], most).pad(sums[0].transpose(0, 1)).transpose(1, 2)


def _totals(sums, offsets, batch, most):
    """Add up sums by row (B, H, S, 1): return (B, H), or if packed (batch, H). batch: 1 or the number of sequences.

    most: the maximum length. Rows past it, and rows outside of all sequences, hold anything.
    """
    if offsets is None:
        return sums.sum((2, 3))
    # Decreasing offsets describe empty sequences.
    offsets, row = (
        offsets.long().clamp(0, sums.shape[2]).cummax(0).values,
        torch.arange(sums.shape[2], device=sums.device),
    )
    number = torch.searchsorted(offsets, row, right=True) - 1  # of each row's sequence: -1 before the first
    inside = (number >= 0) & (number < len(offsets) - 1) & (row - offsets[number] < most)
    sums = sums.where(inside[:, None], 0.0)
    if batch == 1:
        return sums.sum((2, 3))
    # A scatter would sum in no fixed order.
    return torch.segment_reduce(sums[0, :, :, 0].T.contiguous(), "sum", offsets=offsets, unsafe=True)


def _preprocess(p, out, grad_lse, weights, stats, query_sums, turns, by_row, shown, form):
    """Return the row statistics (softmax, delta) that later kernels read, and zero the buffers query_sums and turns."""
    score = p.launched["rules"].score
    rows, pitch = (p.table(stats, 4), None) if form is None else hopper_backward.new_rows(p.call, stats, score)
    unit, width = (None, None) if form is None else hopper_backward.unit(p.call)
    small = None if form is None or not score.slopes is score.bias is None else score.rough
    # The kernel does not read GROUP and TOP_LEFT. Fix them, so that it is compiled only once.
    spec = p.launched["spec"]._replace(GROUP=1, TOP_LEFT=False)
    launched = dict(Out=arguments.of(out), GradLse=grad_lse, Weights=arguments.of(weights), Stats=stats, Turns=turns)
    launched |= dict(incoming=Incoming(p.launched["GradOut"], p.launched["GradWeights"], rows))
    launched |= dict(GradQ=arguments.of(query_sums), by_row=by_row, shown=shown, pitch=pitch, small=small)
    launched |= dict(heads=p.launched["heads"], q_len=p.launched["q_len"], k_len=sizes(p.call)[3])
    launched |= dict(score=None if form is None else score, spec=spec, COLUMNS=stats.shape[3], UNIT=unit, WIDTH=width)
    run.run_tiled("preprocess", p.call, p.blocks_of_rows, launched)
    return rows


def _dkdv(name, p, query_sums, grads):
    """Compute dk, dv, and the bias gradient by key or pair. The kernel "one_pass" also adds dq to query_sums."""
    call = p.call

    def more(tile):
        sums = arguments.descriptor(query_sums, tile.rows) if tile.bulk else arguments.of(query_sums)
        return dict(GradQ=sums) | blocks.walks(call, tile, by_keys=True)

    programs = functools.partial(arguments.programs, call, by_keys=True)
    run.run_tiled(name, call, programs, p.launched | dict(grads=grads), more)


def _postprocess(p, query_sums, grad_query, form):
    launched = dict(Sums=arguments.of(query_sums), GradQ=arguments.of(grad_query), score=p.launched["rules"].score)
    launched |= dict(heads=p.launched["heads"], q_len=p.launched["q_len"], D=p.launched["spec"].D)
    unit, width = (None, None) if form is None else hopper_backward.unit(p.call)
    launched |= dict(BLOCK=None if form is None else form.rows, UNIT=unit, WIDTH=width)

    def more(tile):  # Hopper's sums of dq have whole blocks of each sequence
        return dict(sequences=None if form is None else blocks.sequences_of(p.call, tile.rows))

    programs = p.blocks_of_rows if form is None else functools.partial(arguments.programs, p.call)
    run.run_tiled("postprocess", p.call, programs, launched, more)


def _dbias(p, grad_bias):
    (batches, query_heads, rows, keys), (batch, heads), size = sizes(p.call), grad_bias.shape[:2], blocks.BLOCK
    # If all batches share a bias of few tiles, sum parts of them, so that there are programs for the whole GPU.
    tiles = max(1, batch * heads * cdiv(rows, size) * cdiv(keys, size))
    few = 1 if batch > 1 else cdiv(run.multiprocessors(run.device_of(p.call.query)), tiles)
    parts = next(n for n in range(max(1, min(few, batches)), 0, -1) if batches % n == 0)
    shape = max(batch, parts), heads, rows, keys
    sums = grad_bias if parts == 1 else grad_bias.new_empty(shape, dtype=wide_dtype(p.call.query.dtype))
    some = (p.call.block_mask != EMPTY.value).to(torch.int32)
    some = some if batch == batches else some.amax(0, keepdim=True)
    some = some if heads == query_heads else some.amax(1, keepdim=True)
    some = some.expand(*shape[:2], cdiv(rows, size), cdiv(keys, size))
    launched = dict(p.launched)
    incoming = Incoming(*(launched.pop(name) for name in ("GradOut", "GradWeights", "Rows")))
    launched |= dict(incoming=incoming, GradBias=arguments.of(sums), block_mask=arguments.of(some))
    launched |= dict(batches=batches // shape[0], bias_heads=heads, max_seqlen_q=rows, max_seqlen_k=keys)

    def programs(tile):
        return cdiv(rows, tile.rows) * cdiv(keys, tile.keys) * shape[0] * heads

    run.run_tiled("dbias", p.call, programs, launched, lambda tile: dict(extents=blocks.extents(lengths_of(p.call))))
    if parts > 1:
        grad_bias.copy_(sums.sum(0, keepdim=True))


def _add_up(p, by_row, by_key, grads):
    """Add up the row sums and key sums that kernels stored, into the gradients of bias, slopes and sinks."""
    # The totals are float64, which costs nothing here. In float32 the error would grow with the number of rows.
    call, (_, _, rows, keys) = p.call, sizes(p.call)
    sums = {name: x.double() for name, x in by_row.items() if x is not None}
    if "bias" in sums:
        total = _spread(sums.pop("bias"), call.cu_seqlens_q, rows)
        grads["bias"].copy_(total.sum_to_size(grads["bias"].shape))
    if by_key is not None:
        total = _spread(by_key.double().sum(3, keepdim=True), call.cu_seqlens_k, keys).mT
        grads["bias"].copy_(total.sum_to_size(grads["bias"].shape))
    for name, x in sums.items():
        total = _totals(x, call.cu_seqlens_q, grads[name].shape[0], rows)
        grads[name].copy_(total.sum_to_size(grads[name].shape))


def launch_backward(grads, grad_out, grad_lse, grad_weights, out, weights, stats, call: Call, backend: str):
    """Write the gradients of a Call into `grads`: for each of INPUTS a tensor, or None if not needed."""
    grids.check(call)
    grads = dict(zip(INPUTS, grads, strict=True))
    names = passes(call, [x is not None for x in grads.values()], backend, grad_weights is not None)
    special = next((name for name in names if name in tile_table.ON_HOPPER), None)
    original = dict(grads)
    if special is not None:
        call, grad_out = hopper.all_readable(call), hopper.readable(grad_out)
        wide = torch.float32 if call.partial else call.query.dtype
        for name in ATTENDED:  # Hopper's kernels always write all three
            grad = torch.empty_like(getattr(call, name), dtype=wide) if grads[name] is None else grads[name]
            grads[name] = hopper.writable(grad)
    bulk = "one_pass" in names and any(tile.bulk for tile in run.candidates("one_pass", call))
    call = blocks.marked(call if special is None else arguments.bounded(call))
    launched = arguments.common(call) | dict(GradOut=arguments.of(grad_out), GradWeights=arguments.of(grad_weights))
    p = _Pass(call, grad_out, launched)

    where = None if grads["bias"] is None else _bias_sum(call)
    of_scores = arguments.of(grads["bias"].zero_()) if where == "pairs" else None
    summed = _by_row({name: grad is not None for name, grad in grads.items()}, where)
    by_row = {name: p.table(stats, 1) if wanted else None for name, wanted in summed.items()}
    by_key = stats.new_zeros((*call.query.shape[:2], call.key.shape[2], 3)) if where == "keys" else None
    query_sums = None
    form = None if special is None else run.form_on_hopper(special, call)
    if "postprocess" in names and form is not None:
        (batch, heads, length, _), (rows, columns) = call.query.shape, hopper_backward.unit(call)
        if call.cu_seqlens_q is None:
            query_sums = stats.new_empty((batch, heads, cdiv(length, rows) * rows, columns))
        else:  # each sequence starts a new block (`span.padded`)
            query_sums = run.full(stats, (batch, heads, arguments.slots(call, form.rows) * form.rows, columns), 0.0)
    elif "postprocess" in names:
        # Sum dq in the gradient itself if it has the dtype of sums. But `bulk` adds by TMA, which needs aligned rows.
        width = call.query.shape[3]
        in_place = grads["query"].dtype == stats.dtype and not bulk
        query_sums = grads["query"] if in_place else p.table(stats, cdiv(width, 4) * 4)[..., :width]

    only_value = all(grad is None for name, grad in grads.items() if name != "value")
    turns = None
    if special == "hopper_bwd_deterministic":  # counters that order the additions to dq
        turns = call.query.new_empty(1 + 2 * call.query.shape[:3].numel(), dtype=torch.int32)
    saved = None if only_value else out  # without gradients of scores there is no delta
    used_weights = None if grad_weights is None else weights
    to_clear = query_sums if form is None or call.cu_seqlens_q is None else None
    shown, of_shown = None, p
    if special and call.query_mask is not None:
        query, incoming = (hopper.writable(torch.empty_like(x)) for x in (call.query, grad_out))
        of_shown = p._replace(call=call._replace(query=query), grad_out=incoming)
        shown = Shown(*map(arguments.of, (query, incoming)), launched["rules"].masks.rows, launched["Q"])
    of_rows = ByRow(**by_row)
    by_preprocess = of_rows if special and "dq" not in names else ByRow(None, None, None)
    launched["Rows"] = _preprocess(p, saved, grad_lse, used_weights, stats, to_clear, turns, by_preprocess, shown, form)
    partial = 1 if call.partial else None
    if "dq" in names:
        of_rows = Grads(None, None, of_scores, None, of_rows, partial)
        more = dict(GradQ=None if special else arguments.of(grads["query"]), grads=of_rows)
        run_by_rows("dq", call, p.launched | more)
        of_scores = None
    if special in tile_table.STORED:
        hopper_backward.launch_stored(special, of_shown, grads, form)
    elif special:
        hopper_backward.launch_sums(special, of_shown, query_sums, turns, grads, form)
    if "dkdv" in names or "one_pass" in names:
        made = (None, None) if special else map(arguments.of, (grads["key"], grads["value"]))
        of_keys = Grads(*made, of_scores, by_key, None, partial)
        _dkdv("one_pass" if "one_pass" in names else "dkdv", p, None if special else query_sums, of_keys)
    if query_sums is not None:
        _postprocess(p, query_sums, grads["query"], form)
    if "dbias" in names:
        _dbias(p, grads["bias"])
    _add_up(p, by_row, by_key, grads)
    for name, grad in original.items():
        if grad is not None and grad is not grads[name]:
            grad.copy_(grads[name])
