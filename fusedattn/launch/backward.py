"""Launches the backward: chooses its kernels, and launches each pass with what it needs."""

from typing import Any, NamedTuple

import torch
from triton import cdiv

from ..call.options import Call, lengths_of
from ..call.padding import padding
from ..kernels.vocabulary.gradient import Grads, Incoming
from . import arguments, blocks, failures, hopper, run, tile_table, tuned
from .tuned import SLOWER


class _Pass(NamedTuple):
    """Values that all passes over a call share: kernel arguments, the block mask and its size, sizes.

    batch, heads, rows and keys are `arguments.sizes`; `batches` of `length` rows are what lies in memory: of packed
    sequences one batch of all their rows.
    """

    call: Call
    grad_out: torch.Tensor
    launched: dict[str, Any]
    block_mask: Any
    mask_size: int | None
    batch: int
    heads: int
    rows: int
    keys: int
    batches: int
    length: int

    def blocks_of_rows(self, tile):
        return cdiv(self.length, tile.rows) * self.batches * self.heads

    def table(self, like, columns):
        """Return an uninitialised buffer (batches, heads, length, columns)."""
        return like.new_empty((self.batches, self.heads, self.length, columns))


def _bias_sum(call):
    """Return which loop sums the bias gradient: rows, keys, pairs or planes."""
    batch, heads, rows, keys = arguments.sizes(call)
    if call.bias.shape[3] == 1:
        return "rows"
    if call.bias.shape[2] == 1:
        return "keys"
    return "pairs" if call.bias.shape[:2] == (batch, heads) else "planes"


def _is_deterministic(call):
    return call.deterministic or torch.are_deterministic_algorithms_enabled()


def _lacks_on_hopper(call, need, kernel):
    """Return why a Hopper backward cannot take a call."""
    lacks = hopper.backward_limits(call) + hopper.unreachable(call)
    if not all(need[:3]):
        lacks.append("it makes the gradients of query, key and value together, not some of them")
    return lacks + (hopper.stored_limits(call) if kernel == "hopper_bwd_ds" else [])


def reasons_not_on_hopper(call: Call, need, backend: str) -> list[str]:
    """Return why a Hopper GPU does not run the backward by its own kernel; empty if it does."""
    kernel = run.backward_on_hopper(call, _is_deterministic(call))
    lacks = _lacks_on_hopper(call, need, kernel)
    if lacks or run.is_to_take(kernel, call, backend):
        return lacks
    device = run.device_of(call.query)
    if call.named:
        return [f"{backend!r} is named"] if backend != "hopper" else [str(run.none_is_right(kernel, device))]
    if (why := failures.known((kernel, device))) is not None:
        return [str(why)]
    if not tuned.prefers_hopper(kernel, call, device):
        return [SLOWER]
    return [str(run.none_is_right(kernel, device))]


def passes(call: Call, need, backend: str = "triton", reachable: bool = True) -> tuple[str, ...]:
    """The kernels that make the gradients of those of the first fields of a Call that need them, in their order.

    A kernel for Hopper has the place of one pass, or of both, where it is to take a call that it knows and can reach.

    One pass over the pairs where dq may be summed in any order, and nothing else is summed over whole rows. Otherwise
    one by rows and one by keys, whichever is needed: they give the same bits each time, as the call or torch may want.
    """
    query, key, value, bias, slopes, sinks = need
    where = _bias_sum(call) if bias else None
    by_rows, by_keys = where == "rows" or slopes or sinks, key or value or where == "keys"
    deterministic = _is_deterministic(call)
    in_one = query and by_keys and not by_rows and run.widest(call) <= tile_table.ONE_PASS and not deterministic
    special = run.backward_on_hopper(call, deterministic)
    taken = reachable and run.is_to_take(special, call, backend)
    if taken and not _lacks_on_hopper(call, need, special):
        names = ["preprocess", special, *["postprocess"] * (special != "hopper_bwd_ds")]
    elif in_one and not run.prefers_two_passes(call):
        names = ["preprocess", "one_pass", "postprocess"]
    else:
        by_rows = query or by_rows or (where == "pairs" and not by_keys)
        names = ["preprocess", *["dq"] * bool(by_rows), *["dkdv"] * bool(by_keys)]
    return (*names, *["dbias"] * (where == "planes"))


def _spread(sums, offsets, most):
    """Pad sums by row of packed sequences to (n, H, most, 1); return others unchanged."""
    if offsets is None:
        return sums
    return padding(offsets, sums.shape[2], most).pad(sums[0].transpose(0, 1)).transpose(1, 2)


def _totals(sums, offsets, batch):
    """Sum over rows: return (B, H), or (n, H) for packed sequences."""
    if offsets is None or batch == 1:
        return sums.sum((2, 3))
    # Offsets that fall name nothing that they have passed. A scatter would sum in any order.
    offsets = offsets.long().clamp(0, sums.shape[2]).cummax(0).values
    return torch.segment_reduce(sums[0, :, :, 0].T.contiguous(), "sum", lengths=offsets.diff(), unsafe=True)


def _together(p, taken):
    return dict(zip(("UNIT", "WIDTH"), (None, None) if taken is None else hopper.unit(p.call, taken), strict=True))


def _preprocess(p, out, grad_lse, weights, stats, query_sums, turns, taken):
    """Rows for every pass: softmax statistics, delta and gradient of lse. Zeroes query_sums and turns, if any.

    taken: the form of the backward for Hopper that reads them, or None.
    """
    made, pitch = (p.table(stats, 4), None) if taken is None else hopper.new_rows(p.call, stats)
    names = "GradOut", "GradWeights", "heads", "q_len"
    launched = {name: p.launched[name] for name in names} | dict(
        spec=p.launched["spec"]._replace(GROUP=1, TOP_LEFT=False),  # one compiled kernel, whatever it does not read
        Out=arguments.of(out),
        GradLse=grad_lse,
        Weights=arguments.of(weights),
        Stats=stats,
        COLUMNS=stats.shape[3],
        Rows=made,
        pitch=pitch,
        scale=None if taken is None else arguments.scored(p.call).softmax_scale,
        **_together(p, taken),
        GradQ=arguments.of(query_sums),
        Turns=turns,
        k_len=p.keys,
    )
    run.run_tiled("preprocess", p.call, p.blocks_of_rows, launched)
    return made


def _dq(p, grad_query, grads):
    """Compute the gradient of queries, and the sums by row."""
    call, launched = p.call, p.launched | dict(GradQ=arguments.of(grad_query), grads=grads)

    def more(tile):
        described = arguments.described(tile.keys, call.key_mask, K=call.key, V=call.value) if tile.tma else {}
        return described | blocks.walks(call, p.block_mask, p.mask_size, tile)

    run.run_tiled("dq", call, lambda tile: blocks.slots(call, tile.rows) * p.heads, launched, more)


def _dkdv(name, p, query_sums, grads):
    """Compute the gradients of keys and values and the sums by key; in one pass also the sum that becomes dq."""
    call, packed = p.call, p.call.cu_seqlens_q is not None

    def programs(tile):
        blocks_of_keys = blocks.slots(call, tile.keys, by_keys=True) if packed else cdiv(p.keys, tile.keys) * p.batch
        return blocks_of_keys * call.key.shape[1]

    def more(tile):
        added = arguments.descriptor(query_sums, tile.rows) if tile.bulk else arguments.of(query_sums)
        rows = dict(Q=call.query, GradOut=p.grad_out)
        described = arguments.described(tile.rows, call.query_mask, **rows) if tile.tma else {}
        described["GradQ"] = added
        if p.block_mask is None and not packed:
            return described | dict(sequences=None, tile_lists=None)
        return described | blocks.walks(call, p.block_mask, p.mask_size, tile, by_keys=True)

    run.run_tiled(name, call, programs, p.launched | dict(grads=grads), more)


def _on_hopper(name, p, query_sums, turns, grads, taken):
    """Compute the gradients of keys and values, and the sum that becomes dq, by a Hopper kernel."""
    call, device = p.call, run.device_of(p.call.query)
    rows = p.launched["Rows"]
    launched = hopper.backward_arguments(call, p.grad_out, rows, query_sums, turns, grads[1:3], taken)
    registers, *_ = tile_table.REGISTERS[2]
    with run.surroundings(device):
        programs = cdiv(p.keys, taken.keys) * p.batch * call.key.shape[1]
        run.run_kernel(name, programs, launched, device, num_warps=4, maxnreg=registers)


def _stored_on_hopper(name, p, grads, taken):
    """Compute all three gradients from stored gradients of scores, some heads at a time."""
    call, device = p.call, run.device_of(p.call.query)
    registers, *_ = tile_table.REGISTERS[2]
    scores = hopper.new_scores(call)
    multiprocessors = run.multiprocessors(device)
    first = hopper.stored_arguments(call, p.grad_out, p.launched["Rows"], scores, grads[2], taken, multiprocessors)
    of_query = hopper.product_arguments(call, scores, grads[0], False, taken, multiprocessors)
    of_key = hopper.product_arguments(call, scores, grads[1], True, taken, multiprocessors)
    heads, group, at_a_time = p.batch * call.key.shape[1], first["GROUP"], hopper.heads_at_a_time(call)
    launches = (name, first, 1, p.keys), ("hopper_dk", of_key, 1, p.keys), ("hopper_dq", of_query, group, p.rows)
    options = dict(device=device, kind=(name, device), num_warps=4, maxnreg=registers)
    with run.surroundings(device):
        for before in range(0, heads, at_a_time):
            some = min(at_a_time, heads - before)
            for kernel, launched, members, length in launches:
                planes = some * members
                programs = cdiv(length, taken.keys) * planes
                if kernel != name:
                    programs = hopper.product_programs(call, programs, multiprocessors)
                section = min(planes, launched["section"])
                launched = launched | dict(planes=planes, section=section, before=before)
                run.run_kernel(kernel, programs, launched, **options)


def _postprocess(p, query_sums, grad_query, taken):
    """Convert the summed dq to the gradient of queries."""
    launched = {name: p.launched[name] for name in ("heads", "q_len")}
    launched |= dict(
        score=p.launched["rules"].score,
        D=p.launched["spec"].D,
        Sums=arguments.of(query_sums),
        GradQ=arguments.of(grad_query),
    )
    launched |= _together(p, taken)
    run.run_tiled("postprocess", p.call, p.blocks_of_rows, launched)


def _dbias(p, grad_bias):
    """Compute the gradient of a bias that batches or heads share."""
    batch, heads = grad_bias.shape[:2]
    some = p.block_mask & 1
    some = some if batch == p.batch else some.amax(0, keepdim=True)
    some = some if heads == p.heads else some.amax(1, keepdim=True)
    some = some.expand(batch, heads, cdiv(p.rows, p.mask_size), cdiv(p.keys, p.mask_size))
    launched = dict(p.launched)
    launched |= dict(
        incoming=Incoming(*(launched.pop(name) for name in ("GradOut", "GradWeights", "Rows"))),
        GradBias=arguments.of(grad_bias),
        block_mask=arguments.of(some),
        spec=p.launched["spec"]._replace(BLOCK_MASK_SIZE=p.mask_size),
    )
    launched |= dict(batches=p.batch // batch, bias_heads=heads, max_seqlen_q=p.rows, max_seqlen_k=p.keys)
    run.run_tiled(
        "dbias",
        p.call,
        lambda tile: cdiv(p.rows, tile.rows) * cdiv(p.keys, tile.keys) * batch * heads,
        launched,
        lambda tile: dict(extents=blocks.extents(lengths_of(p.call))),
    )


def _add_up(p, grads, grad_bias, grad_slopes, grad_sinks):
    """The gradients that are sums of sums by row or by key.

    In float64: it costs nothing here, and a sum over all rows of a head would else be as rough as their number.
    """
    if grads.bias_sums is not None and grads.bias_sums.shape[3] == 1:
        total = _spread(grads.bias_sums.double(), p.call.cu_seqlens_q, p.rows)
        grad_bias.copy_(total.sum_to_size(grad_bias.shape))
    elif grads.bias_sums is not None:
        total = _spread(grads.bias_sums.double().sum(3, keepdim=True), p.call.cu_seqlens_k, p.keys)
        grad_bias.copy_(total.mT.sum_to_size(grad_bias.shape))
    for sums, grad in ((grads.sink_sums, grad_sinks), (grads.slope_sums, grad_slopes)):
        if sums is not None:
            grad.copy_(_totals(sums.double(), p.call.cu_seqlens_q, grad.shape[0]).sum_to_size(grad.shape))


def launch_backward(grads, grad_out, grad_lse, grad_weights, out, weights, stats, call: Call, backend: str):
    """Fill the gradients of the INPUTS of a Call; None for those not needed."""
    grad_query, grad_key, grad_value, grad_bias, grad_slopes, grad_sinks = grads
    gradients = [grad_out, *(x for x in grads[:3] if x is not None)]
    reachable = grad_weights is None and hopper.reachable(*gradients)
    names = passes(call, [x is not None for x in grads], backend, reachable)
    special = next((name for name in names if name in tile_table.ON_HOPPER), None)
    call = call if special is None else arguments.bounded(call)
    block_mask, mask_size = blocks.block_mask_of(call) if arguments.hides(call) else (None, None)
    launched = arguments.common(call) | dict(GradOut=arguments.of(grad_out), GradWeights=arguments.of(grad_weights))
    (batch, heads, rows, keys), (batches, _, length, _) = arguments.sizes(call), call.query.shape
    p = _Pass(call, grad_out, launched, block_mask, mask_size, batch, heads, rows, keys, batches, length)

    where = None if grad_bias is None else _bias_sum(call)
    of_scores = arguments.of(grad_bias.zero_()) if where == "pairs" else None
    summed = where == "rows", grad_slopes is not None, grad_sinks is not None
    by_row = [p.table(stats, 1) if wanted else None for wanted in summed]
    by_key = stats.new_zeros((p.batches, p.heads, call.key.shape[2], 3)) if where == "keys" else None
    query_sums = None
    taken = None if special is None else run.form_on_hopper(special, call)
    if "postprocess" in names and taken is not None:
        query_sums = hopper.new_sums(call, stats, taken)
    elif "postprocess" in names:
        # In the dtype of sums: what the caller gets, where that is the same, and lies as the copy engine wants it.
        width = call.query.shape[3]
        bulk = any(tile.bulk for tile in run.candidates("one_pass", call))
        alike = grad_query.dtype == stats.dtype and not bulk
        query_sums = grad_query if alike else p.table(stats, cdiv(width, 4) * 4)[..., :width]

    only_value = all(x is None for x in (grad_query, grad_key, *grads[3:]))
    lost = None if only_value else out  # then no gradient of scores is wanted, and there is no delta
    turns = hopper.new_turns(call) if special == "hopper_bwd_deterministic" else None
    given = None if grad_weights is None else weights
    launched["Rows"] = _preprocess(p, lost, grad_lse, given, stats, query_sums, turns, taken)
    partial = 1 if call.partial else None
    of_rows = Grads(None, None, of_scores, *by_row, partial)
    grad_key, grad_value = map(arguments.of, (grad_key, grad_value))
    of_keys = Grads(grad_key, grad_value, None if "dq" in names else of_scores, by_key, None, None, partial)
    if "dq" in names:
        _dq(p, grad_query, of_rows)
    if special == "hopper_bwd_ds":
        _stored_on_hopper(special, p, grads, taken)
    elif special:
        _on_hopper(special, p, query_sums, turns, grads, taken)
    elif "dkdv" in names or "one_pass" in names:
        _dkdv("one_pass" if "one_pass" in names else "dkdv", p, query_sums, of_keys)
    if query_sums is not None:
        _postprocess(p, query_sums, grad_query, taken)
    if "dbias" in names:
        _dbias(p, grad_bias)
    _add_up(p, of_rows, grad_bias, grad_slopes, grad_sinks)
    _add_up(p, of_keys, grad_bias, None, None)
