"""Shardings of the operators forward and backward, for operators that are called by name on DTensors.

`fusedattn.attention` does not need them: each rank computes its part before any operator is called.
"""

import functools
from collections.abc import Iterator
from typing import Any

from ..call.options import INPUTS, TENSORS, Call
from ..operators.dtensors import BATCH, DIMS, HEADS
from ..operators.namespace import OPERATORS
from ..operators.schema import BACKWARD, FORWARD


@functools.cache
def register_sharding() -> None:
    """Register how torch.ops.fusedattn.forward and backward take DTensors: sharded on batch or heads, or replicated.

    Examples:
        >>> fusedattn.distributed.register_sharding()

    DTensor redistributes other placements to one of these. You call this yourself, because it imports
    torch.distributed.tensor. A second call does nothing.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding as register

    def cut_placement(dim: int | None) -> Any:
        return Replicate() if dim is None else Shard(dim)

    def place(call: Call) -> Iterator[tuple[int | None, dict[str, Any]]]:
        """Yield (dimension of the query that is cut or None, placements of the call's tensors), for each valid way."""
        tensors: dict[str, Any] = {name: getattr(call, name) for name in TENSORS}
        yield None, {name: None if x is None else Replicate() for name, x in tensors.items()}
        # Packed sequences lie in one batch. Dropout depends on the batch and the head of the whole.
        if any(x is not None for x in (call.cu_seqlens_q, call.seed, call.origin, call.block_mask)):
            return
        ranks = call.query.mesh.size()  # type: ignore[attr-defined]
        for dim in (BATCH, HEADS):
            size, key_size = call.query.shape[dim], call.key.shape[dim]
            # Each rank has equally many query heads for each key head, or all ranks share one key head.
            if size % ranks == 0 and (key_size == 1 or key_size % ranks == 0):
                cut = {name for name, x in tensors.items() if x is not None and dim in DIMS.get(name, ())}
                yield (
                    dim,
                    {
                        name: None if x is None else Shard(dim) if name in cut and x.shape[dim] != 1 else Replicate()
                        for name, x in tensors.items()
                    },
                )

    def forward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        _, call, (need_lse, need_weights, save, backend) = FORWARD.split(arguments)
        present = True, need_lse, need_weights, save or (need_weights and backend != "cpu")  # results
        return [
            ([cut_placement(dim) if result else Replicate() for result in present], [*FORWARD.named(tensors)])
            for dim, tensors in place(call)
        ]

    def backward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        incoming, call, (_, need) = BACKWARD.split(arguments)
        ways = []
        for dim, tensors in place(call):
            before = {
                name: None if x is None else Replicate() if len(x.shape) == 1 else cut_placement(dim)
                for name, x in zip(BACKWARD.names, incoming, strict=False)
            }
            inputs = [(tensors[name], needed) for name, needed in zip(INPUTS, need, strict=True)]
            grads = [
                Replicate() if dim is None or not needed else Partial() if x.is_replicate() else x
                for x, needed in inputs
            ]
            ways.append((grads, [*BACKWARD.named(before | tensors)]))
        return ways

    register(OPERATORS.forward.default)(forward)
    register(OPERATORS.backward.default)(backward)
