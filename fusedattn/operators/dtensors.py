"""Attention of DTensors: each rank computes its own batches and heads, without communication."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..call.checks import CLASSES, fail
from ..call.layout import in_order, order
from ..call.options import ATTENDED, DIMS as LETTERS, INPUTS, TENSORS, Call, Origin, tensors as tensors_of
from .namespace import OPERATORS
from .schema import BACKWARD, FORWARD, KERNELS

_CLASSES = CLASSES | {type(None)}
BATCH, HEADS = 0, 1  # the dimensions that may be sharded
# {tensor of a Call: which of these dimensions it has}
DIMS: dict[str, tuple[int, ...]] = {
    name: (BATCH, HEADS) if {"H", "G"} & set(letters) else (BATCH,) for name, letters in LETTERS.items() if letters
}


def is_dtensor(x: Any) -> bool:
    """Return whether x is a DTensor, without importing that class, which takes a second."""
    if type(x) in _CLASSES or not isinstance(x, Tensor):
        return False
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def refuse(function: str, arguments: Mapping[str, Any]) -> None:
    """Raise if one of the arguments of a function, {name: argument}, is a DTensor."""
    for name, x in arguments.items():
        if is_dtensor(x):
            raise NotImplementedError(f"{name}: expected a tensor, got a DTensor: pass its to_local() to {function}")


class LocalCall(NamedTuple):
    """This rank's part of a call of DTensors, with the mesh, the placements of the results, and the global query."""

    call: Call
    mesh: Any
    placements: list[Any]
    query: Tensor

    def whole(self, x: Tensor | None, like_query: bool = False) -> Tensor | None:
        """Wrap this rank's result in a DTensor. like_query: its dimensions have the query's order in memory."""
        from torch.distributed.tensor import DTensor

        if x is None:
            return None
        shape = torch.Size([*self.query.shape[:2], *x.shape[2:]])
        strides, step = [0] * x.dim(), 1
        for axis in reversed(order(self.query) if like_query else range(x.dim())):
            strides[axis], step = step, step * max(shape[axis], 1)
        return DTensor.from_local(x, self.mesh, self.placements, run_check=False, shape=shape, stride=tuple(strides))


def _laid_out(axes: Sequence[int], gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else in_order(gradient, axes)


def local_call(call: Call, seed: Any) -> LocalCall | None:
    """Return this rank's LocalCall of a checked call; None without DTensors. seed: as the caller wrote it."""
    # A replicated tensor beside sharded ones is cut here, and its gradient is Partial. Options that are not DTensors
    # must be equal on all ranks. Raise on all ranks if the call would need communication.
    tensors: dict[str, Any] = dict(zip(TENSORS, tensors_of(call), strict=True))
    if not [x for x in tensors.values() if is_dtensor(x)]:
        return None
    from torch.distributed.tensor import Partial, Replicate, Shard

    (mesh, cut), query = _checked(tensors), call.query
    if call.seed is not None and seed is None and None in [dim for n, dim in enumerate(cut) if mesh.size(n) > 1]:
        # Ranks draw their own seeds, and the results of replicas must be equal.
        raise NotImplementedError("dropout_p: expected a seed with replicated DTensors: pass the same on all ranks")
    if (coordinate := mesh.get_coordinate()) is None:
        fail(ValueError, "query", "a DTensor of a mesh that this rank is in", "another")
    # The compiler of torch 2.10 takes no tuple of mesh.shape.
    place = tuple([mesh.size(number) for number in range(mesh.ndim)]), tuple(coordinate)
    of_query = _by_dim(cut)
    fields: dict[str, Any] = {}
    for name, x in tensors.items():
        if name not in DIMS or x is None:
            continue
        local, placements = x, [Replicate()] * mesh.ndim
        if is_dtensor(x):
            placements = list(x.placements)
            pairs = zip(placements, cut, strict=True)
            grads = [Partial() if p.is_replicate() and dim is not None else p for p, dim in pairs]
            local = x.to_local(grad_placements=grads)
            if not is_compiling() and local.grad_fn is not None:
                # Otherwise autograd copies the gradient to the strides of x, and torch 2.10 gathers x to find them.
                local.register_hook(functools.partial(_laid_out, order(local)))
        for dim in DIMS[name]:
            whole, size = query.shape[dim], x.shape[dim]
            if size == 1 and whole != 1 and name not in ("key", "value"):
                continue  # it is broadcast
            wanted, had = of_query[dim], _by_dim(getattr(p, "dim", None) for p in placements)[dim]
            span = (_span if is_compiling() else _kept_span)(whole, size, *place, wanted, had)
            if span is None:
                what = ("batches", "heads")[dim]
                got = f"{size} {what}, {tuple(placements)} on a mesh of {tuple(mesh.shape)}"
                fail(ValueError, name, f"the {what} that the query of each rank needs, on that rank", got)
            local = local if span == (0, local.shape[dim]) else local.narrow(dim, *span)
        fields[name] = local
    if call.seed is not None:
        batch, heads = query.shape[:2]
        first, head = (_place(size, *place, some)[0] for size, some in zip((batch, heads), of_query, strict=True))
        fields["seed"] = call.seed.to_local() if is_dtensor(call.seed) else call.seed  # type: ignore[attr-defined]
        fields["origin"] = list(Origin(plane=first * heads + head, heads=heads))
    return LocalCall(call._replace(**fields), mesh, [Replicate() if dim is None else Shard(dim) for dim in cut], query)


def _by_dim(cut: Iterable[int | None]) -> tuple[tuple[int, ...], ...]:
    """Return (mesh dimensions that shard the batch, mesh dimensions that shard the heads)."""
    numbered = list(enumerate(cut))
    return tuple(tuple(number for number, cuts in numbered if cuts == dim) for dim in (BATCH, HEADS))


def _checked(tensors: Mapping[str, Any]) -> tuple[Any, list[int | None]]:
    """Check the placements. Return (mesh, [dimension of the query that each mesh dimension shards, or None])."""
    first = next(name for name, x in tensors.items() if is_dtensor(x))
    mesh = tensors[first].device_mesh
    cut: list[int | None] = [None] * mesh.ndim
    by = [""] * mesh.ndim
    for name, x in tensors.items():
        if not is_dtensor(x):
            # The ranks would get different gradients of one plain tensor.
            if name in ATTENDED or (name in INPUTS and x is not None and x.requires_grad):
                fail(TypeError, name, f"a DTensor, as {first} is", "a tensor")
            continue
        if x.device_mesh != mesh:
            fail(ValueError, name, f"the mesh of {first}, {mesh}", x.device_mesh)
        for number, placement in enumerate(x.placements):
            if placement.is_replicate():
                continue
            dims = DIMS.get(name, ())
            # By name: the compilers of torch 2.10 to 2.12 take the class of an intermediate result for another one.
            is_shard = type(placement).__name__ == "Shard"
            if not is_shard or placement.dim not in dims:
                kinds = " or ".join(["Replicate", *("sharded on batch", "on heads")[: len(dims)]])
                more = ""
                if name in ATTENDED and is_shard:
                    columns = f", which cuts head_dim: redistribute it, to Shard({HEADS}) for heads"
                    more = columns if placement.dim == 3 else ": fusedattn.distributed takes sequences in shards"
                fail(ValueError, name, kinds, f"{placement}{more}")
            dim = placement.dim
            if x.shape[dim] == 1 and tensors["query"].shape[dim] != 1:
                fail(ValueError, name, "Replicate for a dimension of 1, which is broadcast", placement)
            if cut[number] not in (None, dim):
                expected = f"Shard({cut[number]}) or Replicate, as {by[number]} is on dimension {number} of the mesh"
                fail(ValueError, name, expected, placement)
            cut[number], by[number] = dim, name
    return mesh, cut


def _place(size: int, shape: Sequence[int], coordinate: Sequence[int], cut: Sequence[int]) -> tuple[int, int]:
    """Return (first, count) of a rank's elements after `torch.chunk` along the mesh dimensions `cut`."""
    first = 0
    for number in cut:
        chunk = -(-size // shape[number])
        begin = min(chunk * coordinate[number], size)
        first, size = first + begin, min(chunk, size - begin)
    return first, size


def _span(
    of_query: int, size: int, shape: tuple[int, ...], coordinate: tuple[int, ...],
    wanted: tuple[int, ...], had: tuple[int, ...],
) -> tuple[int, int] | None:  # fmt: skip
    """Return (first, count), in a tensor's shard, of the batches or heads that a rank's shard of the query needs."""
    # Return None if a rank lacks any of them, or if its key heads serve unequal numbers of query heads. of_query, size:
    # sizes of the whole query and tensor. wanted, had: the mesh dimensions that shard the query, and the tensor.
    span, cut = None, (*wanted, *had)
    places = [range(count) if n in cut else (at,) for n, (count, at) in enumerate(zip(shape, coordinate, strict=True))]
    # With equal sizes, in equal shards or whole, each rank has what it needs. The compiler unrolls this loop.
    for other in [coordinate] if size == of_query and (not had or had == wanted) else itertools.product(*places):
        first, count = _place(of_query, shape, other, wanted)
        start, size_there = _place(size, shape, other, had)
        share = max(of_query // max(size, 1), 1)  # number of query heads of a key head
        begin, end = first // share, -(-(first + count) // share)
        even = end - begin <= 1 or (first % share == 0 and count % share == 0)
        if count == 0:
            begin = end = start
        if not (even and start <= begin and end <= start + size_there):
            return None
        if other == coordinate:
            span = begin - start, end - begin
    return span


_kept_span = functools.lru_cache(maxsize=1024)(_span)  # torch.compile would warn about the cache


@functools.cache
def register_sharding() -> None:
    """Register DTensor shardings for torch.ops.fusedattn.forward and backward: on batch, on heads, or replicated.

    Examples:
        >>> fusedattn.distributed.register_sharding()

    Call it before you call operators by name, or use torch.func with DTensors. A plain `fusedattn.attention` takes
    DTensors without it. It imports torch.distributed.tensor, and redistributes DTensors with other placements.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding as register

    def ways(call: Call) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield (placement of results, placements of the call's tensors) for each way to shard a call."""
        present: dict[str, Any] = {name: x for name in TENSORS if (x := getattr(call, name)) is not None}
        yield Replicate(), dict.fromkeys(present, Replicate())
        # Packed sequences lie in one batch. Dropout depends on the batch and the head in the whole call.
        if present.keys() & {"cu_seqlens_q", "seed", "block_mask"} or call.origin is not None:
            return
        ranks = call.query.mesh.size()  # type: ignore[attr-defined]
        for dim in (BATCH, HEADS):
            size, key_size = call.query.shape[dim], call.key.shape[dim]
            # Each rank has equally many query heads for each key head, or all ranks share one key head.
            if size % ranks == 0 and (key_size == 1 or key_size % ranks == 0):
                cut = {name for name, x in present.items() if dim in DIMS.get(name, ()) and x.shape[dim] != 1}
                yield Shard(dim), {name: Shard(dim) if name in cut else Replicate() for name in present}

    def forward(*arguments: Any) -> Iterator[tuple[list[Any], list[Any]]]:
        _, call, (need_lse, need_weights, save, backend) = FORWARD.split(arguments)
        present = True, need_lse, need_weights, save or (need_weights and backend in KERNELS)  # which results exist
        for whole, tensors in ways(call):
            yield [whole if result else Replicate() for result in present], [*FORWARD.named(tensors)]

    def backward(*arguments: Any) -> Iterator[tuple[list[Any], list[Any]]]:
        incoming, call, (_, need) = BACKWARD.split(arguments)
        for whole, tensors in ways(call):
            # Absent results are empty tensors of one dimension.
            before = [None if x is None else Replicate() if len(x.shape) == 1 else whole for x in incoming]
            # The gradient of a replicated input beside sharded results is a sum over ranks.
            shared = Replicate() if whole.is_replicate() else Partial()
            inputs = [tensors[name] if needed else None for name, needed in zip(INPUTS, need, strict=True)]
            grads = [Replicate() if x is None else shared if x.is_replicate() else x for x in inputs]
            yield grads, [*BACKWARD.named(dict(zip(BACKWARD.names, before, strict=False)) | tensors)]

    register(OPERATORS.forward.default)(lambda *arguments: list(forward(*arguments)))
    register(OPERATORS.backward.default)(lambda *arguments: list(backward(*arguments)))
