"""How the operators forward and backward may be sharded, for DTensors that are given to them by name.

`fusedattn.attention` needs none of it: there each rank computes its part before any operator is called.
"""

from collections.abc import Iterator
from typing import Any

from ..call.form import INPUTS, TENSORS, Call, tensors as tensors_of
from ..operators.dtensors import BATCH, DIMS, HEADS
from ..operators.namespace import OPERATORS

_INCOMING = 6  # tensors of backward that come before the fields of the Call, which has them as the query
_AFTER = len(Call._fields) - len(TENSORS)  # fields of the Call that are no tensors
_registered: list[bool] = []


def register_sharding() -> None:
    """Have torch.ops.fusedattn.forward and backward take DTensors: sharded on batch or heads alike, or replicated.

    Examples:
        >>> fusedattn.distributed.register_sharding()

    Other placements DTensor redistributes to one of these. It imports torch.distributed.tensor, and so nobody calls it
    for you; a second call does nothing.
    """
    if _registered:
        return
    from torch.distributed.tensor.experimental import register_sharding as register

    register(OPERATORS.forward.default)(_forward)
    register(OPERATORS.backward.default)(_backward)
    _registered.append(True)


def _forward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """The placements of forward: (results, arguments), for one dimension of the mesh."""
    call, others = Call(*arguments[: len(Call._fields)]), arguments[len(Call._fields) :]
    need_lse, need_weights, save, backend = others
    there = True, need_lse, need_weights, save or (need_weights and backend != "cpu")
    made = []
    for dim, tensors in _placed(call):
        results = [_replicate() if dim is None or not asked else _shard(dim) for asked in there]
        made.append((results, [*tensors, *[None] * (_AFTER + len(others))]))
    return made


def _backward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """The placements of backward."""
    incoming, rest = arguments[:_INCOMING], arguments[_INCOMING:]
    call, (_, need) = Call(*rest[:-2]), rest[-2:]
    made = []
    for dim, tensors in _placed(call):
        before = [
            None if x is None else _replicate() if dim is None or len(x.shape) == 1 else _shard(dim) for x in incoming
        ]
        pairs = zip(tensors[: len(INPUTS)], need, strict=True)
        grads = [_replicate() if dim is None or not needed else _gradient(x) for x, needed in pairs]
        made.append((grads, [*before, *tensors, *[None] * (_AFTER + 2)]))
    return made


def _placed(call: Call) -> Iterator[tuple[int | None, list[Any]]]:
    """(dimension of the query that is cut, placements of the tensors of a call), for each way that is right."""
    tensors: dict[str, Any] = dict(zip(TENSORS, tensors_of(call), strict=True))
    yield None, [None if x is None else _replicate() for x in tensors.values()]
    # Sequences lie in one batch; what dropout drops depends on the batch and the head of the whole.
    if call.cu_seqlens_q is not None or call.seed is not None or call.origin is not None or call.block_mask is not None:
        return
    for dim in (BATCH, HEADS):
        size, served = call.query.shape[dim], call.key.shape[dim]
        # As many heads of the query for each head of keys on each rank, or one head of keys for all.
        if size % call.query.mesh.size() or (served != 1 and served % call.query.mesh.size()):  # type: ignore[attr-defined]
            continue
        yield (
            dim,
            [
                None if x is None else _shard(dim) if dim in DIMS.get(name, ()) and x.shape[dim] != 1 else _replicate()
                for name, x in tensors.items()
            ],
        )


def _gradient(placement: Any) -> Any:
    """Of a gradient: what all ranks have, each gets a part of the gradient of."""
    from torch.distributed.tensor import Partial

    return Partial() if placement.is_replicate() else placement


def _shard(dim: int) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(dim)


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()
