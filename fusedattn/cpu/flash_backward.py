"""Computes the backward of a Call by PyTorch's fused CPU kernel, one rectangle of scores at a time."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..call.layout import arrange
from ..call.options import Call
from ..call.private import flash_attention_for_cpu_backward
from ..naive import pairs
from ..naive.blocks import Block, spans
from ..naive.formula import grouped
from . import flash
from .small_k import by_weights, is_few, lse_of, scores_of, weights_of
from .tiling import Part, Rectangle, is_short, parts
from .value_mean import INFINITE

SCORES = 2**25  # bytes of scores that the formula computes at a time for the gradient of a bias


def _in_blocks(where: Rectangle, call: Call) -> list[Rectangle]:
    """Split a rectangle of scores into blocks of rows that take at most SCORES bytes each."""
    if where.causal:  # a block of later rows would not be a causal rectangle
        return [where]
    step = SCORES // (call.query.shape[:2].numel() * (where.end - where.begin) * call.query.element_size())
    rows = spans(where.last - where.first, step)
    return [where._replace(first=where.first + first, last=where.first + last) for first, last in rows]


def _by_kernel(call: Call, where: Rectangle, less: float, *tensors: Tensor) -> Sequence[Tensor]:
    """Return the gradients of query, key and value from the kernel. tensors: grad_out, query, key, value, out, lse."""
    (grad_out, query, *others), added = tensors, flash.mask(call, where, less)
    if is_short(query, others[0]):
        grad_out, query, *others = (x.float() for x in tensors)
    if where.masked and not bool(query.sum().isfinite()):  # a row that sees nothing has weights exp(NaN), not 0
        assert added is not None
        query = query.masked_fill((added == -INFINITE).all(-1, keepdim=True), 0.0)
    query, scale, factor = flash.by_power(query, call.scale)
    grads = flash_attention_for_cpu_backward(grad_out, query, *others, 0.0, where.causal, attn_mask=added, scale=scale)
    return grads if factor == 1 else (grads[0].mul_(factor), *grads[1:])


def _by_formula(call, where, less, tensors, grad_out, out, lse, of_bias) -> Sequence[Tensor]:
    """Return the gradients of query, key and value of a rectangle of scores, by the softmax formula."""
    # lse, out: over all keys of the rows; None if the rectangle has them all. of_bias: accumulates the bias's gradient.
    if lse is None:
        weights = flash.exact_weights(call, where, *tensors[:2])
    else:
        scores = scores_of(call, where, less, *tensors[:2])
        weights = weights_of(scores, where.masked)
        weights *= (lse_of(scores, weights) - lse).exp_()[..., None]
    return by_weights(weights, call.scale, tensors, grad_out, out, of_bias)


class Incoming(NamedTuple):
    """Inputs of a backward: gradients of output and lse, None for zero, and the results of the forward."""

    grad_out: Tensor | None
    grad_lse: Tensor | None
    out: Tensor
    kept: Tensor
    lse: Tensor


def _backward(part: Part, less: float, rows: Incoming, of_bias: Tensor | None) -> Sequence[Tensor]:
    """Return the gradients of query, key and value. less: offset of scores. of_bias: accumulates bias gradients."""
    grad_out, grad_lse, out, kept, lse = rows
    if is_short(*part.call[:2]) or (of_bias is not None and part.call.query.dtype == torch.bfloat16):
        # The saved output is rounded to bfloat16, so the output is computed again.
        part = part._replace(call=flash.to_wide(part.call, always=True))
        kept, again, *_ = flash.of_part(part, False, less)
        lse = again.masked_fill(lse == INFINITE, INFINITE)
        grad_out = None if grad_out is None else grad_out.float()
    call = part.call
    columns = max(call.query.shape[3], call.value.shape[3])
    tensors = flash.inputs_of(part, columns, grad_out)
    common = None if grad_out is None else flash.centre_of(part, tensors[2])
    if common is not None:
        same = grouped(kept == out.to(kept.dtype), common.shape[1]).all(2).all(1)  # heads that saved whole outputs
        tensors[2] = tensors[2] - common.masked_fill(same.view(*common.shape[:2], 1, 1), 0.0)
    some = flash.covering(part)
    complete = flash.are_complete(call._replace(sinks=None), some)
    some = some if of_bias is None else [block for where in some for block in _in_blocks(where, call)]
    whole = len(some) == 1 and some[0][:4] == (0, call.query.shape[2], 0, call.key.shape[2])
    totals = [] if whole else [x.new_zeros(x.shape, dtype=lse.dtype) for x in tensors]

    def add(grad_out, kept, tensors, wanted, by_output):
        grad_out, kept = flash.in_columns(grad_out, columns), flash.in_columns(kept, columns)
        for where in some:
            inputs = flash.cut(where, tensors)
            of_out, out, total = (x[:, :, where.first : where.last] for x in (grad_out, kept, lse))
            if of_bias is not None or flash.is_exact(call, where):
                out, total = out if by_output else None, None if complete else total
                bias = None if of_bias is None else pairs.cut(of_bias, Block(*where[:4]))
                grads = _by_formula(call, where, less, inputs, of_out, out, total, bias)
            else:
                grads = _by_kernel(call, where, less, of_out, *inputs, out, total)
            if not totals:
                totals.extend(grads)
                continue
            for total, grad in zip(flash.cut(where, totals)[:wanted], grads, strict=False):
                total += grad

    if grad_out is not None:
        add(grad_out, kept, tensors, 3, not complete)
    if grad_lse is not None:
        # A score's gradient is weight * (grad_out @ value - sum(grad_out * out) + grad_lse). The term of grad_lse
        # equals a second call with values 0 and sum(grad_out * out) = -grad_lse.
        one = pad(torch.ones_like(kept[..., :1]), (0, columns - 1))
        add(one, one * -grad_lse[..., None].to(one.dtype), [*tensors[:2], torch.zeros_like(tensors[2])], 2, True)
        if grad_out is None:
            totals[2] = torch.zeros_like(totals[2])
    grads = zip(totals, call[:3], strict=True)
    return [grad if grad.shape == x.shape else arrange(grad[..., : x.shape[3]], x) for grad, x in grads]


def from_weights(
    call: Call, weights: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None, grad_weights: Tensor,
    of_bias: Tensor | None,
) -> Sequence[Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, computed from all attention weights and their gradient."""
    empty = lse == -INFINITE  # rows that see nothing or that query_mask hides: their incoming gradients may be NaN
    if bool(empty.any()):
        grad_out, grad_weights = (x.masked_fill(empty[..., None], 0.0) for x in (grad_out, grad_weights))
        grad_lse = None if grad_lse is None else grad_lse.masked_fill(empty, 0.0)
    if call.key_mask is not None:
        grad_weights = grad_weights.masked_fill(flash.hidden_by(call.key_mask).mT, 0.0)
    tensors = flash.inputs_of(flash.whole(call), None, grad_out)

    return by_weights(weights, call.scale, tensors, grad_out, None, of_bias, grad_lse, grad_weights)


def _of_sinks(call: Call, less: float, rows: Incoming, out: Tensor) -> Tensor:
    """Return the gradient of the sinks: the sum over rows of the sink's weight * (grad_lse - sum(grad_out * out))."""
    missing = torch.zeros_like(rows.lse) if rows.grad_lse is None else rows.grad_lse
    missing = missing if rows.grad_out is None else missing - (rows.grad_out.to(rows.lse.dtype) * out).sum(-1)
    assert call.sinks is not None
    weight = (flash.sinks_less(call, rows.lse.dtype, less) - rows.lse).exp_()
    return (weight * missing).sum(2).sum_to_size(call.sinks.shape).to(call.sinks.dtype)


def backward(
    call: Call, grad_out: Tensor | None, grad_lse: Tensor | None, out: Tensor, kept: Tensor, lse: Tensor,
    of_bias: Tensor | None,
) -> tuple[Sequence[Tensor], Tensor | None]:  # fmt: skip
    """Return (gradients of query, key and value; that of sinks), each contiguous and in its input's dtype."""
    # out, kept, lse: from the Result of the forward, over all keys. of_bias: accumulates the gradient of the bias.
    everything = flash.at_once(call) if grad_lse is None and not is_short(*call[:2]) else None
    if (
        everything is not None
        and grad_out is not None
        and (kept is out or flash.centre_of(flash.whole(call), call.value) is None)
    ):
        if is_few(call):
            return _by_formula(call, everything, 0.0, call[:3], grad_out, None, None, None), None
        grad_out = flash.in_columns(grad_out, call.value.shape[3])
        return _by_kernel(call, everything, flash.offset(call), grad_out, *call[:3], out, lse), None
    inputs, call = call[:3], flash.to_wide(call)
    grad_out = None if grad_out is None else grad_out.to(kept.dtype)
    empty = lse == -INFINITE  # all weights are 0, so there is no gradient
    if call.query_mask is not None:
        hidden = flash.hidden_by(call.query_mask)
        grad_out = None if grad_out is None else grad_out.masked_fill(hidden, 0.0)
        empty = empty | hidden[..., 0]  # the lse of a hidden row is its sink, so exp(score - lse) may overflow
    grad_lse = None if grad_lse is None else grad_lse.masked_fill(empty, 0.0)
    rows = Incoming(grad_out, grad_lse, out, kept, lse.masked_fill(empty, INFINITE))
    split, less = [] if grad_out is grad_lse is None else parts(call), flash.offset(call)
    if len(split) == 1 and split[0].call is call:
        grads = _backward(split[0], less, rows, of_bias)
    else:
        grads = [x.new_zeros(x.shape, dtype=lse.dtype) for x in call[:3]]
        for part in split:
            present = {name: part.view(x, part.rows) for name, x in rows._asdict().items() if x is not None}
            of_part = rows._replace(**present)
            views = [part.view(x, here) for x, here in zip(grads, (part.rows, part.keys, part.keys), strict=True)]
            for view, grad in zip(views, _backward(part, less, of_part, None), strict=True):
                view.copy_(grad)
    exact = kept if kept.dtype == lse.dtype else out  # the output may be rounded to 16 bits
    of_sinks = None if call.sinks is None else _of_sinks(call, less, rows, exact)
    return [grad.to(x.dtype) for grad, x in zip(grads, inputs, strict=True)], of_sinks
