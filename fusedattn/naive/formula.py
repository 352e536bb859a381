"""Attention by its definition in PyTorch, a block of rows at a time: what kernels are held to, and what a CPU runs."""

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..call.cached import Decode
from ..call.form import DIFFERENTIABLE, Call, autocasting, diagonal
from ..call.layout import arrange
from ..private import transforms_active
from . import cached, dropout
from .packed import joined, packed, padded, parts

# A larger cap no score feels, as in the kernels; by a smaller one a quotient, or its gradient, would be infinite.
LARGEST_CAP, SMALLEST_CAP = 2.0**60, 2.0**-60
BUDGET = 2**28  # bytes of scores held at a time; forward and backward keep a few buffers of this size


def formula(
    query, key, value, visible=None, scale=1.0, need_lse=True, *, softcap=None, added=(), sinks=None, factor=None
):
    """(output, lse or None, weights) by the definition, every step in the dtype of the inputs.

    Args:
        query, key, value: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv).
        visible: bool, broadcasts to (B, Hq, Sq, Sk); None is all. A row that sees nothing has output 0 and lse -inf, or
            the sink.
        added: tensors that broadcast to (B, Hq, Sq, Sk), added to the scores one after the other.
        sinks: (1 or B, Hq), what each head attends to besides the keys. factor: multiplies weights, as dropout does.
    Returns: (B, Hq, Sq, Dv), (B, Hq, Sq) and (B, Hq, Sq, Sk).
    """
    if key.shape[1] != query.shape[1]:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * scale
    if softcap is not None and softcap <= LARGEST_CAP:
        scores = softcap * torch.tanh(scores / max(softcap, SMALLEST_CAP))
    for term in added:
        scores = scores + term
    empty = None
    if visible is None and key.shape[2] == 0:
        visible = scores.new_zeros(1, 1, 1, 0, dtype=torch.bool)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
        empty = ~visible.any(-1, keepdim=True)
    if sinks is not None:
        sink = sinks[:, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
        empty = None if empty is None else empty & (sinks == float("-inf"))[:, :, None, None]
    if empty is not None:
        # A row of -inf would be NaN in the softmax and in its gradient: such a row is computed as zeros, then dropped.
        scores = scores.masked_fill(empty, 0.0)
    weights = scores.softmax(-1)
    lse = _logsumexp(scores) if need_lse else None
    if sinks is not None:
        weights = weights[..., :-1]
    if empty is not None:
        weights = weights.masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty.squeeze(-1), float("-inf")) if need_lse else None
    if factor is not None:
        weights = weights * factor
    return weights @ value, lse, weights


def _logsumexp(scores: Tensor) -> Tensor:
    """`scores.logsumexp(-1)`, whose gradient is right where a score of 1e38 hides the log of how many there are."""
    if scores.shape[-1] == 0:
        return scores.logsumexp(-1)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)
    return (scores - top).logsumexp(-1) + top.squeeze(-1)


def _rows_of(pairs: Tensor, first: int, last: int) -> Tensor:
    """Rows first .. last - 1 of what broadcasts to (B, Hq, Sq, Sk)."""
    return pairs if pairs.shape[-2] == 1 else pairs[:, :, first:last]


def _offsets(call: Call, first: int, last: int) -> Tensor:
    """(last - first, Sk), of a padded call (n, 1, ..): how far right of its row's own position each key stands."""
    device = call.query.device
    row = torch.arange(first, last, device=device)[:, None]
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None or call.top_left:
        row = row + diagonal(call)
    else:
        row = row + (call.cu_seqlens_k.diff() - call.cu_seqlens_q.diff())[:, None, None, None]
    return torch.arange(call.key.shape[2], device=device)[None, :] - row


def visible(call: Call, first: int, last: int) -> Tensor | None:
    """Which keys rows first .. last - 1 may attend, broadcastable to (B, Hq, last - first, Sk); None is all of them."""
    conditions = []
    if call.mask is not None:
        conditions.append(_rows_of(call.mask, first, last))
    if call.bias is not None:
        conditions.append(_rows_of(call.bias, first, last) > float("-inf"))
    if call.key_mask is not None:
        conditions.append(call.key_mask[:, None, None, :])
    if call.query_mask is not None:
        conditions.append(call.query_mask[:, None, first:last, None])
    if call.left is not None or call.right is not None:
        offset = _offsets(call, first, last)
        if call.left is not None:
            conditions.append(offset >= -call.left)
        if call.right is not None:
            conditions.append(offset <= call.right)
    return functools.reduce(torch.Tensor.logical_and, conditions) if conditions else None


def _added(call: Call, first: int, last: int) -> list[Tensor]:
    """What is added to the scores of rows first .. last - 1."""
    terms = []
    if call.alibi_slopes is not None:
        distance = _offsets(call, first, last).abs().to(call.query.dtype)
        terms.append(-call.alibi_slopes[:, :, None, None] * distance)
    if call.bias is not None:
        terms.append(_rows_of(call.bias, first, last))
    return terms


def _factor(call: Call, first: int, last: int) -> Tensor | None:
    """What dropout multiplies the weights of rows first .. last - 1 by: 0 or 1 / (1 - dropout_p)."""
    if call.seed is None:
        return None
    batch, heads, keys = *call.query.shape[:2], call.key.shape[2]
    planes = torch.arange(batch * heads, device=call.query.device)
    kept = dropout.keep(call.seed, planes, first, last, keys, call.dropout_p).view(batch, heads, last - first, keys)
    return kept.to(call.query.dtype) * (1 / (1 - call.dropout_p) if call.dropout_p < 1 else 0.0)


def _prepared(call: Call, dtype: torch.dtype) -> Call:
    """The call in `dtype`, with zeros where key_mask and query_mask say that anything may stand."""
    floating = (call.query, call.bias, call.alibi_slopes, call.sinks)
    if call.key_mask is None and call.query_mask is None and all(x is None or x.dtype == dtype for x in floating):
        return call
    query, key, value = call.query.to(dtype), call.key.to(dtype), call.value.to(dtype)
    if call.key_mask is not None:
        hidden = ~call.key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    if call.query_mask is not None:
        query = query.masked_fill(~call.query_mask[:, None, :, None], 0.0)
    bias, slopes, sinks = (None if x is None else cast(x, dtype) for x in (call.bias, call.alibi_slopes, call.sinks))
    return call._replace(query=query, key=key, value=value, bias=bias, alibi_slopes=slopes, sinks=sinks)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` in `dtype`, where what is finite stays so: float64's finfo.min is a number, not a mask."""
    lowest = torch.finfo(dtype).min
    if torch.finfo(tensor.dtype).min < lowest:
        hidden = tensor == float("-inf")
        finite = tensor.masked_fill(hidden, 0.0)
        clamped = tensor.detach().clamp(lowest, -lowest).masked_fill(hidden, float("-inf"))
        tensor = clamped + (finite - finite.detach())  # a clamp would have no gradient where it clamps
    return tensor.to(dtype)


def _compute(call: Call, first: int, last: int, need_lse: bool) -> tuple:
    """(output, lse or None, weights) of rows first .. last - 1."""
    return formula(
        call.query if last - first == call.query.shape[2] else call.query[:, :, first:last],
        call.key,
        call.value,
        visible(call, first, last),
        call.scale,
        need_lse,
        softcap=call.softcap,
        added=_added(call, first, last),
        sinks=call.sinks,
        factor=_factor(call, first, last),
    )


def _block(call: Call, first: int, last: int, need_lse: bool, need_weights: bool) -> tuple:
    """(output, lse or None, weights or None) of rows first .. last - 1."""
    out, lse, weights = _compute(call, first, last, need_lse)
    # Not for the values, which are these already, but for what comes back: gradients of what is hidden may be NaN.
    if call.key_mask is not None and need_weights:
        weights = weights.masked_fill(~call.key_mask[:, None, None, :], 0.0)
    if call.query_mask is not None:
        hidden = ~call.query_mask[:, None, first:last]
        out = out.masked_fill(hidden[..., None], 0.0)
        if need_weights:
            weights = weights.masked_fill(hidden[..., None], 0.0)
        if need_lse:
            nothing = lse.new_full((), float("-inf")) if call.sinks is None else call.sinks.detach()[:, :, None]
            lse = torch.where(hidden, nothing, lse)
    return out, lse, weights if need_weights else None


def _block_of(first: int, last: int, need_lse: bool, *fields) -> tuple:
    """`_block` of the fields of a Call, which torch's checkpoint tracks only as arguments of their own."""
    return _block(Call(*fields), first, last, need_lse, False)[:2]


def _spans(call: Call, copies: int = 1) -> list[tuple[int, int]]:
    """(first, last + 1) of blocks of rows of which so many copies of the scores stay within the budget."""
    batch, heads, rows, _ = call.query.shape
    row_bytes = batch * heads * call.key.shape[2] * call.query.element_size() * copies
    # To a compiler the budget would be a guard on every size, and another graph for each length.
    if torch.compiler.is_compiling() or rows * row_bytes <= BUDGET:
        return [(0, rows)]
    step = max(1, BUDGET // row_bytes)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _blocks(call: Call, need_lse: bool) -> tuple:
    """(output, lse or None), rows by the block where the scores of all of them would pass the budget."""
    spans = _spans(call)
    if len(spans) == 1:
        return _block(call, *spans[0], need_lse, False)[:2]
    tensors = (x for x in call if isinstance(x, Tensor))
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    # Recomputed in the backward, so that no block's weights outlive it. torch.func forbids the hooks this needs.
    if needs_grad and not transforms_active():
        parts = [
            checkpoint(_block_of, *span, need_lse, *call, use_reentrant=False, preserve_rng_state=False)
            for span in spans
        ]
    else:
        parts = [_block(call, *span, need_lse, False)[:2] for span in spans]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2) if need_lse else None


def _wide(call: Call) -> torch.dtype:
    return torch.promote_types(call.query.dtype, torch.float32)


def without_autocast(function):
    """`function` of a Call and more, with autocast off: what it should cast, `checked` has cast."""

    @functools.wraps(function)
    def run(call, *rest):
        if not autocasting(call.query):
            return function(call, *rest)
        with torch.autocast(call.query.device.type, enabled=False):
            return function(call, *rest)

    return run


@without_autocast
def run(call: Call, need_lse: bool, need_weights: bool) -> tuple:
    """(output, lse or None, weights or None) of a checked call: the backend "naive"."""
    if call.cu_seqlens_q is None:
        return _run(call, need_lse, need_weights)
    results = []
    for part in parts(call):
        made, rows = padded(part)
        results.append(packed(rows, *_run(made, need_lse, need_weights)))
    out, lse, weights = results[0] if len(results) == 1 else joined(results, call.max_seqlen_k)
    return arrange(out, call.query), lse, weights


def _run(call: Call, need_lse: bool, need_weights: bool) -> tuple:
    """`run` of a call that is not packed; it may be padded."""
    prepared = _prepared(call, _wide(call))
    out, lse = _blocks(prepared, need_lse)
    # All rows at once: they are what was asked for. The output stays what it is without them.
    weights = _block(prepared, 0, call.query.shape[2], False, True)[2].to(call.query.dtype) if need_weights else None
    return arrange(out, call.query), lse, weights


def run_eagerly(call: Call, need_lse: bool, need_weights: bool) -> tuple:
    """`run` with every step in the dtype of the inputs, and all rows at once."""
    return _block(_prepared(call, call.query.dtype), 0, call.query.shape[2], need_lse, need_weights)


def _whole(call: Call, first: int, last: int) -> tuple:
    """(output, lse, weights) of rows first .. last - 1 of a call; if it is packed, those must be all."""
    if call.cu_seqlens_q is None:
        return _block(_prepared(call, _wide(call)), first, last, True, True)
    made, rows = padded(call)
    return packed(rows, *_block(_prepared(made, _wide(call)), 0, made.query.shape[2], True, True))


@without_autocast
def second_derivative(call: Call, incoming, grad_grads) -> tuple:
    """Gradients of sum(<grad, grad_grad>), where the grads are those of a call's inputs: the formula, derived twice.

    It is a sum over rows, and is taken by the block of rows as the naive path is.

    Args:
        incoming: gradients of output, lse and weights, that the grads were made from. grad_grads: of the DIFFERENTIABLE
            fields of the call. Any of both may be None.
    Returns: gradients of the incoming and of the fields; None where one is None.
    """
    if call.cu_seqlens_q is not None and type(call.cu_seqlens_q) is not Tensor:
        # Inside a graph nobody knows the lengths; but none is longer than all together.
        most = ((call.max_seqlen_q, call.query), (call.max_seqlen_k, call.key))
        max_seqlen_q, max_seqlen_k = (x.shape[2] if length is None else length for length, x in most)
        call = call._replace(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    names = [name for name in Call._fields[:DIFFERENTIABLE] if getattr(call, name) is not None]
    wanted = [name for name, grad in zip(Call._fields, grad_grads, strict=False) if grad is not None]
    present = [number for number, grad in enumerate(incoming) if grad is not None]
    if not wanted or not present:
        return (None,) * (len(incoming) + DIFFERENTIABLE)
    fields, given = [getattr(call, name) for name in names], [incoming[number] for number in present]
    total: list[Tensor] = []
    # It holds three times what a first derivative does. The rows of a packed call are not those of its scores.
    for span in _spans(call, copies=3) if call.cu_seqlens_q is None else [(0, call.query.shape[2])]:

        def grads(fields, given, span=span):
            def outputs(*fields):
                out, lse, weights = _whole(call._replace(**dict(zip(names, fields, strict=True))), *span)
                results = out.to(call.query.dtype), lse, weights.to(call.query.dtype)
                return tuple(results[number] for number in present)

            _, pull = torch.func.vjp(outputs, *fields)
            gradients = dict(zip(names, pull(tuple(grad[:, :, slice(*span)] for grad in given)), strict=True))
            return tuple(gradients[name] for name in wanted)

        pull = torch.func.vjp(grads, fields, given)[1]
        parts = [part for group in pull(tuple(grad for grad in grad_grads if grad is not None)) for part in group]
        total = [a + b for a, b in zip(total, parts, strict=True)] if total else parts
    gradients = dict(zip([*names, *present], total, strict=True))
    return tuple(gradients.get(key) for key in (*range(len(incoming)), *Call._fields[:DIFFERENTIABLE]))


def run_decode(decode: Decode, need_lse: bool, need_weights: bool) -> tuple:
    """(output, lse or None, weights or None) of a checked call to a cache, written to first: the backend "naive"."""
    cached.append(decode)
    return run(cached.dense(decode), need_lse, need_weights)
