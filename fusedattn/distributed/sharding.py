"""The shardings of the operators forward and backward, for DTensors that are given to them by name.

`fusedattn.attention` needs none of it: there each rank computes its part before any operator is called.
"""

import functools
from collections.abc import Iterator
from typing import Any

from ..call.options import INPUTS, TENSORS, Call, tensors as tensors_of
from ..operators.dtensors import BATCH, DIMS, HEADS
from ..operators.namespace import OPERATORS

_INCOMING = 6  # tensors of backward that come before the fields of the Call
_NUMBERS = len(Call._fields) - len(TENSORS)  # fields of the Call that are no tensors


@functools.cache
def register_sharding() -> None:
    """Have torch.ops.fusedattn.forward and backward take DTensors: sharded on batch or heads alike, or replicated.

    Examples:
        >>> fusedattn.distributed.register_sharding()

    Other placements DTensor redistributes to one of these. It imports torch.distributed.tensor, and so nobody calls it
    for you; a second call does nothing.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding as register

    def place(call: Call) -> Iterator[tuple[int | None, list[Any]]]:
        """Yield (the dimension of the query that is cut, placements of the call's tensors), for each right way."""
        tensors: dict[str, Any] = dict(zip(TENSORS, tensors_of(call), strict=True))
        yield None, [None if x is None else Replicate() for x in tensors.values()]
        # Sequences lie in one batch; dropout depends on the batch and the head of the whole.
        if any(x is not None for x in (call.cu_seqlens_q, call.seed, call.origin, call.block_mask)):
            return
        ranks = call.query.mesh.size()  # type: ignore[attr-defined]
        for dim in (BATCH, HEADS):
            size, key_size = call.query.shape[dim], call.key.shape[dim]
            # Each rank has equally many query heads for each key head, or all ranks have one key head.
            if size % ranks == 0 and (key_size == 1 or key_size % ranks == 0):
                cut = {name for name, x in tensors.items() if x is not None and dim in DIMS.get(name, ())}
                placements: list[Any] = [
                    None if x is None else Shard(dim) if name in cut and x.shape[dim] != 1 else Replicate()
                    for name, x in tensors.items()
                ]
                yield dim, placements

    def forward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        call, others = Call(*arguments[: len(Call._fields)]), arguments[len(Call._fields) :]
        need_lse, need_weights, save, backend = others
        there = True, need_lse, need_weights, save or (need_weights and backend != "cpu")
        rest = [None] * (_NUMBERS + len(others))
        return [
            ([Replicate() if dim is None or not needed else Shard(dim) for needed in there], [*tensors, *rest])
            for dim, tensors in place(call)
        ]

    def backward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        incoming, fields, need = arguments[:_INCOMING], arguments[_INCOMING:-2], arguments[-1]
        made = []
        for dim, tensors in place(Call(*fields)):
            before = [
                None if x is None else Replicate() if dim is None or len(x.shape) == 1 else Shard(dim) for x in incoming
            ]
            grads = [
                Replicate() if dim is None or not needed else Partial() if x.is_replicate() else x
                for x, needed in zip(tensors[: len(INPUTS)], need, strict=True)
            ]
            made.append((grads, [*before, *tensors, *[None] * (_NUMBERS + 2)]))
        return made

    register(OPERATORS.forward.default)(forward)
    register(OPERATORS.backward.default)(backward)
