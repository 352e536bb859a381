"""Ranks of a process group: they agree on a call, and send each other tensors."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..call.private import group_timeout, read_store, write_store
from ..call.rules import fail

STATEMENT = 4096  # bytes of a rank's statement about a call: a fixed size, so ranks that disagree can read it
MESSAGE = 300  # characters of an error message, cut to fit in a statement
PATIENCE = timedelta(seconds=2)  # time to wait, after a connection broke, for the number of the lost rank in the store


class Ranks(NamedTuple):
    """A process group, the rank of this process in it, and the number of ranks."""

    group: Any
    rank: int
    size: int


def of(group: Any) -> Ranks | None:
    """Return the Ranks of a process group or of a DeviceMesh of one dimension; None without a default group."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            fail(ValueError, "group", "a DeviceMesh of one dimension", f"one of {group.ndim}")
        group = group.get_group()
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not (outside or isinstance(group, dist.ProcessGroup)):
        fail(TypeError, "group", "a process group, a DeviceMesh of one dimension or None", type(group).__name__)
    if outside or dist.get_rank(group) < 0:
        fail(ValueError, "group", "a group that this process is a member of", "one that it is not in")
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group))


def as_bytes(x: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, which every backend of torch.distributed can send."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


def agree(
    ranks: Ranks, function: str, options: dict[str, Any], own: dict[str, Any], problem: Exception | None
) -> list[dict[str, Any]]:
    """Return `own` of each rank, once all ranks have called the same function with equal options.

    Rank 0 collects the statements of all ranks and sends them to all, so it knows which rank is missing.

    Args:
        options: must have equal reprs on all ranks.
        own: facts as JSON can hold them, which may differ.
        problem: the error of this rank.

    Raises:
        Exception: on all ranks. This rank's problem, or ValueError for the problem of another rank.
        ValueError: on all ranks, with the name of an option that differs, and the rank.
        RuntimeError: if a rank has ended, or did not call this within the time limit of the group.
    """
    digests = {name: hashlib.sha256(repr(value).encode()).hexdigest()[:14] for name, value in options.items()}
    table = _exchange_statements(
        ranks, function, dict(function=function, error=_text(problem), options=digests, own=own)
    )
    if problem is not None:
        raise problem
    for rank, other in enumerate(table):
        if other["function"] != table[0]["function"]:
            raise ValueError(
                f"{function}: expected the same function on all ranks, got different ones on rank {rank} and rank 0"
            )
    for rank, other in enumerate(table):
        if other["error"] is not None:
            raise ValueError(f"{function}: rank {rank} raised {other['error']}")
    for name, value in options.items():
        for rank, other in enumerate(table):
            if other["options"][name] != table[0]["options"][name]:
                fail(ValueError, name, f"the same on rank {rank} as on rank 0", f"another ({value!r} on this rank)")
    return [other["own"] for other in table]


def _text(problem: Exception | None) -> str | None:
    if problem is None:
        return None
    kind = next(x.__name__ for x in type(problem).__mro__ if x.__module__ == "builtins")  # our errors derive from it
    return f"{kind}: {problem}"[:MESSAGE]


def _exchange_statements(ranks: Ranks, function: str, statement: dict[str, Any]) -> list[dict[str, Any]]:
    text = json.dumps(statement, ensure_ascii=False).encode(errors="replace")
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(ranks.group).split(",")]
    device = torch.device("cpu")
    if "cpu" not in kinds:
        device = torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
    mine = torch.frombuffer(bytearray(text.ljust(STATEMENT)), dtype=torch.uint8).to(device)
    table = mine.expand(ranks.size, STATEMENT).clone()
    if ranks.size > 1:
        _fill(table, ranks, function)
    return [json.loads(bytes(row.tolist())) for row in table.cpu()]


def _fill(table: Tensor, ranks: Ranks, function: str) -> None:
    """Fill in the statements of the other ranks, over copies of this rank's."""
    limit, key = group_timeout(ranks.group), f"fusedattn, lost of {dist.get_process_group_ranks(ranks.group)}"

    def missing(rank: int) -> RuntimeError:
        return RuntimeError(
            f"{function}: rank {rank} of the group has ended, or did not call it within {limit.total_seconds():g} s"
        )

    def begin(operation: Any, pairs: Iterable[tuple[int, Tensor]]) -> list[Any]:
        """Begin all transfers at once. One by one, NCCL would open a connection for each."""
        return dist.batch_isend_irecv([dist.P2POp(operation, x, group=ranks.group, group_peer=r) for r, x in pairs])

    if ranks.rank == 0:
        others = range(1, ranks.size)
        for operation, tensors in ((dist.irecv, list(table)), (dist.isend, [table] * ranks.size)):
            works = begin(operation, [(r, tensors[r]) for r in others])
            for r, work in zip(others, works, strict=False):  # NCCL returns one for all
                try:
                    work.wait()
                except RuntimeError as error:
                    # Gloo closes all connections at a timeout, so the others read it from the store.
                    write_store(key, str(r))
                    raise missing(r) from error
        return
    try:
        for operation, x, least in ((dist.isend, table[0].clone(), limit), (dist.irecv, table, 2 * limit)):
            # Twice the limit to receive: rank 0 may itself wait for another rank that long.
            for work in begin(operation, [(0, x)]):
                work.wait(least)
    except RuntimeError as error:
        lost = read_store(key, PATIENCE)
        raise missing(0 if lost is None else int(lost)) from error


def anchor(like: Tensor) -> Tensor:
    """Return a leaf that requires a gradient. It makes each rank take part in the backward."""
    return torch.zeros((), device=like.device, requires_grad=True)


class Transfer(NamedTuple):
    """A transfer that has begun. peer: the rank to name in an error."""

    tensors: tuple[Tensor, ...]
    works: tuple[Any, ...]
    peer: int | None

    def wait(self) -> tuple[Tensor, ...]:
        """Return the received tensors."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"fusedattn.distributed: no answer from rank {self.peer} of the group: {error}"
            ) from error
        return self.tensors


def exchange(
    ranks: Ranks, sent: Iterable[Tensor], to: int | None, received: Iterable[Tensor], of: int | None
) -> Transfer:
    """Begin to send tensors to rank `to`, and to receive others from rank `of`; None for no rank.

    The tensors are contiguous, and must not change before `wait` has returned.
    """
    operations, received = [], tuple(received)
    for tensors, peer, operation in ((sent, to, dist.isend), (received, of, dist.irecv)):
        if peer is not None:
            operations += [
                dist.P2POp(operation, as_bytes(x), group=ranks.group, group_peer=peer) for x in tensors if x.numel()
            ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return Transfer(received, tuple(works), to if of is None else of)


def all_to_all(ranks: Ranks, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Send a tensor to each rank, and return the tensors from each rank, of these shapes. All have one dtype."""
    like = sent[0]
    made = [like.new_empty(tuple(shape)) for shape in shapes]
    size = like.element_size()
    out = torch.empty(size * sum(x.numel() for x in made), dtype=torch.uint8, device=like.device)
    flat = torch.cat([as_bytes(x.contiguous()) for x in sent])
    came, went = ([size * x.numel() for x in some] for some in (made, sent))
    dist.all_to_all_single(out, flat, came, went, group=ranks.group)
    pieces = out.split(came)
    return [piece.view(like.dtype).view(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def sum_of(ranks: Ranks, x: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, on each."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=ranks.group)
    return total
