"""Second derivatives of attention: the derivatives of its gradients and of its tangents."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.options import INPUTS, Call, sizes, wide_dtype
from . import formula
from .blocks import Block, sized, spans
from .formula import of_all, of_block, without_autocast
from .pairs import prepared
from .varlen import join, packed, padded


def _whole(call: Call, first: int, last: int) -> tuple:
    """Return (output, lse, weights) of rows first .. last - 1, which must be all rows of a packed call."""
    if call.cu_seqlens_q is None:
        return of_block(prepared(call), Block(first, last, 0, call.key.shape[2]), True, True)
    batch, rows = padded(call)
    return packed(rows, *of_all(prepared(batch), True, True))


def _row_spans(call: Call) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of each span of rows to differentiate at a time."""
    batch, heads, rows, _ = call.query.shape
    # A second derivative needs three times the memory of a first. Packed calls are not cut: rows belong to sequences.
    if not sized(call) or call.cu_seqlens_q is not None or not rows:
        return iter([(0, rows)])
    row_bytes = 3 * batch * heads * call.key.shape[2] * wide_dtype(call.query.dtype).itemsize
    return spans(rows, formula.BUDGET // max(1, row_bytes))


def _bounded(call: Call) -> Call:
    """Set unknown max_seqlen_q and max_seqlen_k to the total lengths, if the call is packed and traced."""
    if call.cu_seqlens_q is None or type(call.cu_seqlens_q) is Tensor:
        return call
    _, _, max_seqlen_q, max_seqlen_k = sizes(call)
    return call._replace(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)


def _of_rows(call: Call, span: tuple[int, int], incoming: Sequence, grad_grads: Sequence) -> dict[Any, Tensor]:
    """Return `second_derivative` of rows in `span`, as {index in `incoming` or name of an input: gradient}."""
    names = [name for name in INPUTS if getattr(call, name) is not None]
    wanted = [name for name, grad in zip(INPUTS, grad_grads, strict=True) if grad is not None]
    present = [number for number, grad in enumerate(incoming) if grad is not None]

    def grads(fields, incoming):
        def outputs(*fields):
            out, lse, weights = _whole(call._replace(**dict(zip(names, fields, strict=True))), *span)
            results = out.to(call.query.dtype), lse, weights.to(call.query.dtype)
            return tuple(results[number] for number in present)

        _, pull = torch.func.vjp(outputs, *fields)
        gradients = dict(zip(names, pull(tuple(incoming)), strict=True))
        return tuple(gradients[name] for name in wanted)

    fields = [getattr(call, name) for name in names]
    pull = torch.func.vjp(grads, fields, [incoming[number] for number in present])[1]
    of_fields, of_incoming = pull(tuple(grad for grad in grad_grads if grad is not None))
    return dict(zip((*present, *names), (*of_incoming, *of_fields), strict=True))


@without_autocast
def second_derivative(call: Call, incoming: Sequence, grad_grads: Sequence) -> tuple:
    """Return the gradients of sum(grad * grad_grad), where grad are the gradients of a call's INPUTS."""
    # incoming: gradients of output, lse and weights, from which grad was computed. Returned: gradients with respect to
    # `incoming`, then to INPUTS (at least in float32), None where the argument is None. Rows are computed a block at a
    # time.
    call, of_incoming = _bounded(call), []
    totals: dict[str, Tensor] = {}
    for span in _row_spans(call):
        rows = [None if grad is None else grad[:, :, slice(*span)] for grad in incoming]
        of_rows = _of_rows(call, span, rows, grad_grads)
        of_incoming.append([of_rows.pop(number, None) for number in range(len(incoming))])
        for name, x in of_rows.items():
            totals[name] = x + totals[name] if name in totals else x.to(wide_dtype(x.dtype))
    return *(join(x, 2) for x in zip(*of_incoming, strict=True)), *map(totals.get, INPUTS)


@without_autocast
def second_tangent(call: Call, directions: Sequence, moved: Sequence, need_weights: bool) -> tuple:
    """Return the second derivative of (output, lse, weights or None) along two tangents of INPUTS, None for zero."""
    call, parts = _bounded(call), []
    names = [name for name, x in zip(INPUTS, moved, strict=True) if x is not None]
    for first, last in _row_spans(call):
        rows = *call.query.shape[:2], last - first
        zeros = [call.query.new_zeros((*rows, call.value.shape[3]))]
        zeros.append(call.query.new_zeros(rows, dtype=wide_dtype(call.query.dtype)))
        if need_weights:
            zeros.append(call.query.new_zeros((*rows, sizes(call)[3])))

        def of_fields(*incoming, span=(first, last)):
            gradients = _of_rows(call, span, incoming, directions)
            return tuple(gradients[name] for name in names)

        # `of_fields` is linear in the incoming gradients, so its VJP with respect to them is the second derivative.
        pull = torch.func.vjp(of_fields, *zeros)[1]
        parts.append(pull(tuple(x for x in moved if x is not None)))
    results = [join(x, 2) for x in zip(*parts, strict=True)]
    return (*results, *[None] * (3 - len(results)))
