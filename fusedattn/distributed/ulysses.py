"""All-to-all over heads: each rank computes some heads of the whole sequence, and gets its rows of all heads back.

A key head is sent to each rank that needs it. If several do, its gradients are summed in float32 (float64 for float64).
Source: DeepSpeed Ulysses, arXiv:2309.14509.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.checks import fail, overridable
from ..call.layout import arrange
from ..call.options import DIMS, INPUTS, WITH_DIM, Call, Origin, tensors as tensors_of, wide_dtype
from ..call.private import eager
from ..naive import pairs
from ..naive.formula import without_autocast
from ..operators import flops, partial
from ..operators.backward import gradients
from ..operators.namespace import OPERATORS
from . import ranks as ranks_of
from .global_call import GlobalCall, Method, attend
from .ranks import Ranks
from .shards import rows_of


@functools.lru_cache(maxsize=128)
def heads_of(heads: int, key_heads: int, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return two lists: the query and key heads of each rank. `size` divides `heads`; ranks may share key heads."""
    count, group = heads // size, heads // max(1, key_heads)
    queries, keys = [list(range(rank * count, (rank + 1) * count)) for rank in range(size)], []
    for some in queries:
        every = [head // group for head in some]
        own = sorted(set(every))
        # If each of these key heads serves the same number of this rank's query heads, in order, send it once.
        # Otherwise send a copy for each query head.
        each = count // max(1, len(own))
        keys.append(own if every == [head for head in own for _ in range(each)] else every)
    return queries, keys


@overridable
@eager
def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, *, group: Any = None,
    mask: Tensor | None = None, bias: Tensor | None = None,
    key_mask: Tensor | None = None, query_mask: Tensor | None = None,
    causal: bool = False, window: tuple[int | None, int | None] | None = None, align: str = "bottom_right",
    scale: float | None = None, softcap: float | None = None,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    dropout_p: float = 0.0, seed: int | Tensor | None = None,
    return_lse: bool = False, return_weights: bool = False, backend: str | None = None,
) -> Tensor | Any:  # fmt: skip
    """Compute `fusedattn.attention` over a sequence split among ranks, each of which computes some heads of all rows.

    Examples:
        >>> shards = (torch.randn(1, 8, 1000, 64) for _ in range(3))  # of this rank
        >>> fusedattn.distributed.ulysses_attention(*shards, causal=True).shape
        torch.Size([1, 8, 1000, 64])

    Args:
        query: (B, Hq, rows, D); Hq is a multiple of the number of ranks.
        key, value: (B, Hkv, rows, D or Dv), any Hkv. Rows as `shard` cuts them without balance.
        mask, bias: for this rank's rows and all keys. They broadcast to (B, Hq, rows, Sk). The gradient of a bias comes
            from this rank's rows only. If they broadcast over rows or keys on all ranks, they are sent as they are.
        return_weights: also return the weights (B, Hq, rows, Sk) of this rank's rows.
        All others: as in `gather_attention`.

    Returns:
        the results of `attention` for this rank's rows.

    Raises:
        TypeError, NotImplementedError, RuntimeError: as `ring_attention`.
        ValueError: as `ring_attention`, and on all ranks if their number does not divide Hq.
    """
    return attend(ulysses_attention, locals(), Method(_forward, _backward))


class _Route(NamedTuple):
    """Transfer of a tensor (B, H, rows, ...) from all heads of some rows to some heads of all rows, and back."""

    ranks: Ranks
    heads: list[list[int]]  # the heads that each rank computes
    total: int  # number of all heads
    rows: list[int]  # number of each rank's rows

    @property
    def own(self) -> list[int]:
        return self.heads[self.ranks.rank]

    @property
    def repeated(self) -> bool:
        """Return whether a head is sent to several ranks, or twice to one."""
        return sum(map(len, self.heads)) > self.total

    def to_heads(self, x: Tensor) -> Tensor:
        """Send all heads of this rank's rows. Return this rank's heads of all rows."""
        shapes = [(x.shape[0], len(self.own), rows, *x.shape[3:]) for rows in self.rows]
        return torch.cat(ranks_of.all_to_all(self.ranks, [x[:, some] for some in self.heads], shapes), 2)

    def to_rows(self, x: Tensor) -> Tensor:
        """Send this rank's heads of all rows. Return all heads of this rank's rows, summed if ranks share a head."""
        shapes = [(x.shape[0], len(some), self.rows[self.ranks.rank], *x.shape[3:]) for some in self.heads]
        parts = ranks_of.all_to_all(self.ranks, list(x.split(self.rows, 2)), shapes)
        if list(itertools.chain(*self.heads)) == list(range(self.total)):
            return torch.cat(parts, 1)
        whole = x.new_zeros(x.shape[0], self.total, *shapes[0][2:])
        for some, part in zip(self.heads, parts, strict=True):
            whole.index_add_(1, torch.tensor(some, dtype=torch.int64, device=x.device), part)
        return whole


def _route(whole: GlobalCall, name: str) -> _Route:
    """Return the _Route of the Call's tensor `name`: each rank's rows before the transfer, and its heads afterwards."""
    ranks, letters, x = whole.ranks, DIMS[name], getattr(whole.call, name)
    rows = [rows_of(some) for some in (whole.rows if "Q" in letters else whole.keys)]
    if letters == "BHQK" and all(entry[name][0] == 1 for entry in whole.table):
        rows = [1] * ranks.size
    if "G" not in letters and ("H" not in letters or x.shape[1] == 1):  # equal for all heads: each rank needs it
        return _Route(ranks, [[0]] * ranks.size, 1, rows)
    queries, keys = heads_of(whole.query.shape[1], whole.call.key.shape[1], ranks.size)
    return _Route(ranks, keys if "G" in letters else queries, x.shape[1], rows)


def _local(whole: GlobalCall) -> Call:
    """Return a Call with this rank's heads only, but with all rows and all keys."""
    tensors: dict[str, Any] = {name: getattr(whole.call, name) for name in WITH_DIM["B"]}
    heads = _route(whole, "query")
    for name, x in tensors.items():
        letters = DIMS[name]
        if x is None:
            continue
        if letters == "BH":  # equal on all ranks, so nothing is sent
            tensors[name] = x[:, heads.own]
        elif letters in ("BQ", "BK"):
            tensors[name] = _route(whole, name).to_heads(x[:, None])[:, 0]
        elif letters == "BHQK":
            route, one_column = _route(whole, name), all(entry[name][1] == 1 for entry in whole.table)
            x = x.expand(-1, -1, route.rows[route.ranks.rank], 1 if one_column else whole.total_keys)
            tensors[name] = x = route.to_heads(x)
            if route.rows != heads.rows:  # one row of each rank; a gradient is of the rows of one rank
                rows = [row.expand(-1, -1, n, -1) for row, n in zip(x.split(1, 2), heads.rows, strict=True)]
                equal = name not in whole.wanted() and bool((x == x[:, :, :1]).all())
                tensors[name] = x[:, :, :1] if equal else torch.cat(rows, 2)
        else:
            tensors[name] = _route(whole, name).to_heads(x)
    origin = list(Origin(whole.shift, 0, 0, whole.ranks.rank * len(heads.own), heads.total))
    return whole.call._replace(**tensors, origin=origin)


@without_autocast
def _forward(whole: GlobalCall) -> tuple[list[Tensor | None], GlobalCall, Sequence[Any]]:
    query, size = whole.query, whole.ranks.size
    if query.shape[1] % size:
        fail(ValueError, "query", f"heads that {size} ranks can share equally", f"{query.shape[1]} heads")
    call = _local(whole)
    if _route(whole, "key").repeated:  # sum gradients of shared key heads before rounding them
        kernels = whole.backend in partial.KERNELS and not whole.need_weights
        call = call._replace(partial=True) if kernels else pairs.prepared(call)
    flops.offer(OPERATORS.forward)
    needs = whole.need_lse, whole.need_weights, bool(whole.wanted())
    out, lse, weights, stats = OPERATORS.forward(*call, *needs, whole.backend)
    route = _route(whole, "query")
    results = [arrange(route.to_rows(out.to(query.dtype)), query), route.to_rows(lse) if whole.need_lse else None]
    results.append(route.to_rows(weights.to(query.dtype)) if whole.need_weights else None)
    # The backward needs the shapes of this rank's tensors, but not their values.
    like = [None if x is None else x.new_empty(()).expand(x.shape) for x in tensors_of(whole.call)]
    return results, whole.with_tensors(like), (*call, out, weights, stats)


@without_autocast
def _backward(whole: GlobalCall, saved: Sequence[Any], incoming: Sequence[Any]) -> dict[str, Tensor | None]:
    *fields, out, weights, stats = saved
    call, wanted, route = Call(*fields), whole.wanted(), _route(whole, "query")
    dtype, wide = whole.query.dtype, wide_dtype(call.query.dtype)
    out_grad, lse_grad, weights_grad = (None if x is None else route.to_heads(x) for x in incoming)
    out_grad, weights_grad = (None if x is None else x.to(call.query.dtype) for x in (out_grad, weights_grad))
    need = [name in wanted and getattr(call, name) is not None for name in INPUTS]
    kept_weights = weights if weights.dim() == 4 else None
    found = gradients((out_grad, lse_grad, weights_grad), out, kept_weights, stats, tuple(call), whole.backend, need)
    grads: dict[str, Tensor | None] = {}
    for name, grad in zip(INPUTS, found, strict=True):
        if grad is None:
            continue
        route_of = _route(whole, name)
        if DIMS[name] == "BH":
            every = grad.new_zeros((grad.shape[0], route.total), dtype=wide)
            every[:, route.own] = grad.to(wide)
            grads[name] = ranks_of.sum_of(whole.ranks, every)
        elif DIMS[name] == "BHQK":
            if route_of.rows != route.rows:
                grad = torch.cat([part.sum(2, True, dtype=wide) for part in grad.split(route.rows, 2)], 2)
            grads[name] = route_of.to_rows(grad.to(wide)).sum_to_size(getattr(whole.call, name).shape)
        else:  # round the gradients, except those that are yet to be summed over ranks
            grads[name] = route_of.to_rows(grad if route_of.repeated else grad.to(dtype))
    return grads
