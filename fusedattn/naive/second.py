"""Second derivatives of attention: of its gradients, and of its tangents. Both are products with the same numbers."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..call.form import DIFFERENTIABLE, Call
from . import formula
from .blocks import sized, spans, uncut
from .formula import of_all, of_block, wide, without_autocast
from .inputs import prepared
from .packed import packed, padded


def _whole(call: Call, first: int, last: int) -> tuple:
    """(output, lse, weights) of rows first .. last - 1 of a call; if it is packed, those must be all."""
    if call.cu_seqlens_q is None:
        part = uncut(prepared(call, wide(call)))
        return of_block(part, part.blocks[0]._replace(first=first, last=last), True, True)
    made, rows = padded(call)
    return packed(rows, *of_all(prepared(made, wide(call)), True, True))


def _rows_again(call: Call) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of the rows that are differentiated twice at a time."""
    batch, heads, rows, _ = call.query.shape
    # It holds three times what a first derivative does. The rows of a packed call are not those of its scores.
    if not sized(call) or call.cu_seqlens_q is not None or not rows:
        return iter([(0, rows)])
    row_bytes = 3 * batch * heads * call.key.shape[2] * call.query.element_size()
    return spans(rows, formula.BUDGET // max(1, row_bytes))


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
    for span in _rows_again(call):

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


def second_tangent(call: Call, given, moved, need_weights: bool) -> tuple:
    """The second derivative of (output, lse, weights or None) in two directions, each of the DIFFERENTIABLE fields.

    Args: given, moved: the directions; None where they are zero. At least one field of each is not.
    """
    rows, columns = call.query.shape[:3], call.key.shape[2] if call.cu_seqlens_q is None else call.max_seqlen_k
    shapes = (*rows, call.value.shape[3]), rows, *[(*rows, columns)] * need_weights
    dtypes = call.query.dtype, wide(call), call.query.dtype
    zeros = [call.query.new_zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    number = [i for i, x in enumerate(moved) if x is not None]

    def of_fields(*incoming):
        gradients = second_derivative(call, (*incoming, *[None] * (3 - len(incoming))), given)[3:]
        return tuple(gradients[i] for i in number)

    # It is linear in the incoming gradients, so that its gradient with regard to these is what they are multiplied by.
    pull = torch.func.vjp(of_fields, *zeros)[1]
    found = pull(tuple(moved[i] for i in number))
    return found if need_weights else (*found, None)
