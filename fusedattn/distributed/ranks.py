"""The processes that share a sequence: what they have to agree on, and how tensors go from one to another."""

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

STATEMENT = 4096  # bytes that a rank says of a call, always as many, so that ranks that disagree understand each other
MESSAGE = 300  # characters of an error in it
PATIENCE = timedelta(seconds=2)  # how long a rank that hears nothing more waits to read who was lost


class Ranks(NamedTuple):
    """A process group, this process's rank in it, and how many there are."""

    group: Any
    rank: int
    size: int


def of(group: Any) -> Ranks | None:
    """Return the Ranks of a process group or a DeviceMesh of one dimension; None without a default group."""
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
        fail(ValueError, "group", "a group that this process is a member of", "one that it is not")
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group))


def as_bytes(x: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes, which every backend of torch.distributed sends."""
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def agree(
    ranks: Ranks, function: str, options: dict[str, Any], own: dict[str, int], problem: Exception | None
) -> list[dict[str, int]]:
    """Return each rank's own numbers, after all have said the same function and options.

    Rank 0 hears all of them, and tells all what it heard: so it knows who did not come.

    Args:
        options: must be equal, as their reprs are. problem: why this rank cannot go on.
    Raises: on every rank the same kind of error: its own problem, or ValueError for that of another; ValueError that
        names the option and the rank that differs; RuntimeError for a rank that did not come within the time limit of
        the group, or has ended.
    """
    digests = {name: hashlib.sha256(repr(value).encode()).hexdigest()[:14] for name, value in options.items()}
    table = _exchange_statements(
        ranks, function, dict(function=function, error=_text(problem), options=digests, own=own)
    )
    if problem is not None:
        raise problem
    for rank, other in enumerate(table):
        if other["function"] != table[0]["function"]:
            raise ValueError(f"{function}: expected the same function on all ranks, rank {rank} and rank 0 called two")
    for rank, other in enumerate(table):
        if other["error"] is not None:
            raise ValueError(f"{function}: rank {rank} raised {other['error']}")
    for name, value in options.items():
        for rank, other in enumerate(table):
            if other["options"][name] != table[0]["options"][name]:
                fail(ValueError, name, f"the same on rank {rank} as on rank 0", f"another (on this rank {value!r})")
    return [other["own"] for other in table]


def _text(problem: Exception | None) -> str | None:
    if problem is None:
        return None
    kind = next(x.__name__ for x in type(problem).__mro__ if x.__module__ == "builtins")  # ours derive from it
    return f"{kind}: {problem}"[:MESSAGE]


def _exchange_statements(ranks: Ranks, function: str, said: dict[str, Any]) -> list[dict[str, Any]]:
    text = json.dumps(said, ensure_ascii=False).encode(errors="replace")
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
    """Fill in what the other ranks say; each row is what this rank says."""
    limit, key = group_timeout(ranks.group), f"fusedattn, lost of {dist.get_process_group_ranks(ranks.group)}"

    def missing(rank: int) -> RuntimeError:
        return RuntimeError(
            f"{function}: rank {rank} of the group did not call it within {limit.total_seconds():g} s, or has ended"
        )

    def begin(operation: Any, pairs: Iterable[tuple[int, Tensor]]) -> list[Any]:
        """Begin all at once: one by one NCCL would make a connection for each."""
        return dist.batch_isend_irecv([dist.P2POp(operation, x, group=ranks.group, group_peer=r) for r, x in pairs])

    if ranks.rank == 0:
        others = range(1, ranks.size)
        for operation, tensors in ((dist.irecv, list(table)), (dist.isend, [table] * ranks.size)):
            works = begin(operation, [(r, tensors[r]) for r in others])
            for r, work in zip(others, works, strict=False):  # NCCL has one for all
                try:
                    work.wait()
                except RuntimeError as error:
                    # Gloo closes all connections at a timeout, so the others read it from the store.
                    write_store(key, str(r))
                    raise missing(r) from error
        return
    try:
        for operation, x, least in ((dist.isend, table[0].clone(), limit), (dist.irecv, table, 2 * limit)):
            # Rank 0 may wait for another as long as it is allowed to.
            for work in begin(operation, [(0, x)]):
                work.wait(least)
    except RuntimeError as error:
        lost = read_store(key, PATIENCE)
        raise missing(0 if lost is None else int(lost)) from error


def check_rows(argument: str, rows: Sequence[int], every: Sequence[Sequence[Any]]) -> None:
    """Raise unless each rank has as many rows as its Chunks."""
    for rank, (count, some) in enumerate(zip(rows, every, strict=True)):
        wanted = sum(chunk.last - chunk.first for chunk in some)
        if count != wanted:
            fail(ValueError, argument, f"{wanted} rows on rank {rank}, as `shard` cuts {sum(rows)}", count)


def anchor(like: Tensor) -> Tensor:
    """Return a leaf that requires a gradient, so that a rank whose tensors do not takes part in the backward."""
    return torch.zeros((), device=like.device, requires_grad=True)


class Transfer(NamedTuple):
    """Tensors under way: those that come, and the rank that they are waited for from."""

    tensors: tuple[Tensor, ...]
    works: tuple[Any, ...]
    peer: int | None

    def wait(self) -> tuple[Tensor, ...]:
        """Return the tensors that have come."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"fusedattn.distributed: no answer of rank {self.peer} of the group: {error}") from error
        return self.tensors


def exchange(
    ranks: Ranks, sent: Iterable[Tensor], to: int | None, received: Iterable[Tensor], of: int | None
) -> Transfer:
    """Begin to send tensors to one rank, and to fill others with what another sends; None is nobody.

    They are contiguous, and must not change before the Transfer has been waited for.
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
    """Send each rank a tensor, all of one dtype, and return what each sends this one, of these shapes."""
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
