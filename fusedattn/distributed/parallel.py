"""Modules on several processes: context_parallel= splits the sequence, tensor parallelism splits the heads."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..call.checks import fail, value
from ..operators.dtensors import is_dtensor
from .gather import gather_attention
from .ring import ring_attention
from .shards import check_balance
from .ulysses import ulysses_attention

METHODS: dict[str, Callable[..., Any]] = dict(ring=ring_attention, gather=gather_attention, ulysses=ulysses_attention)
LACKS = dict(ring=("mask", "bias", "query_mask", "need_weights"), gather=("need_weights",), ulysses=())


class ContextParallel(NamedTuple):
    """Value of context_parallel= for a `fusedattn.MultiHeadAttention` whose inputs are this rank's rows of a sequence.

    Examples:
        >>> parallel = fusedattn.distributed.ContextParallel("ring", balance="zigzag")
        >>> layer = fusedattn.MultiHeadAttention(512, 8, causal=True, context_parallel=parallel)

    Args:
        method: "ring", "gather" or "ulysses".
        group, balance: as in `fusedattn.distributed.shard`; "ulysses" takes no balance.
    """

    method: str = "ring"
    group: Any = None
    balance: str | None = None

    def __deepcopy__(self, memo: Any) -> "ContextParallel":
        """Return itself: a process group cannot be copied, so a copy of a module belongs to the same group."""
        return self


def check_parallel(parallel: Any) -> None:
    if parallel is None:
        return
    if not isinstance(parallel, ContextParallel):
        fail(TypeError, "context_parallel", "a ContextParallel or None", type(parallel).__name__)
    if not isinstance(parallel.method, str) or parallel.method not in METHODS:
        fail(ValueError, "context_parallel", f"a method of {', '.join(map(repr, METHODS))}", value(parallel.method))
    check_balance(parallel.balance)
    if parallel.method == "ulysses" and parallel.balance is not None:
        fail(ValueError, "context_parallel", "balance=None, because method is 'ulysses'", repr(parallel.balance))


def attend(parallel: ContextParallel, q: Tensor, k: Tensor, v: Tensor, need_weights: bool, **options: Any) -> Any:
    """Run a context-parallel method: return (output, weights or None). Raise for an option that the method lacks."""
    check_parallel(parallel)  # the caller may have set the attribute of the module
    options = {name: x for name, x in options.items() if x is not None}
    for name in LACKS[parallel.method]:
        if name in options or (need_weights and name == "need_weights"):
            methods = " or ".join(repr(method) for method, lacks in LACKS.items() if name not in lacks)
            fail(NotImplementedError, name, f"none, or method {methods} of context_parallel", repr(parallel.method))
    options |= dict(return_weights=need_weights) if parallel.method == "ulysses" else dict(balance=parallel.balance)
    results = METHODS[parallel.method](q, k, v, group=parallel.group, **options)
    return results if need_weights else (results, None)


def by_heads(projected: Tensor, name: str, heads: int, columns: int) -> Tensor:
    """Reshape a projection (B, S, H * D) to (B, H, S, D). H is this process's share of `heads`, and D is `columns`."""
    width, cut = projected.shape[-1], 1
    if is_dtensor(projected):
        mesh, last = projected.device_mesh, projected.dim() - 1  # type: ignore[attr-defined]
        # The compiler takes no generator here.
        cut = math.prod([mesh.size(n) for n, p in enumerate(projected.placements) if p.is_shard(last)])  # type: ignore[attr-defined]
    if width % columns or heads % cut:
        got = f"{heads} heads of {columns} columns, and {width} columns on each process"
        fail(ValueError, name, "a multiple of the number of processes that share the heads", got)
    by_head: Tensor = projected.unflatten(-1, (width // columns, columns))
    return by_head.transpose(1, 2)
