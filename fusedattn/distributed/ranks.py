"""The processes that share a sequence: what they have to agree on, and how tensors go from one to another."""

import hashlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..call.rules import fail
from ..private import group_timeout, tell, told

WORDS = 192  # of int64: what a rank says of a call, of fixed size, so that ranks that disagree understand each other
TEXT = 512  # bytes of it are the message of an error
TOLD = timedelta(seconds=2)  # how long a rank that hears nothing more waits to be told who was lost


class Ranks(NamedTuple):
    """A process group, this process's rank in it, and how many there are."""

    group: Any
    rank: int
    size: int


def of(group: Any) -> Ranks | None:
    """The Ranks of a process group, or of a DeviceMesh of one dimension.

    None where no group is named and there is no default group: then this process is alone.
    """
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            fail(ValueError, "group", "a DeviceMesh of one dimension", f"one of {group.ndim}")
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        fail(ValueError, "group", "a group that this process is a member of", "one that it is not")
    if not isinstance(group, dist.ProcessGroup):
        fail(TypeError, "group", "a process group, a DeviceMesh of one dimension or None", type(group).__name__)
    rank = dist.get_rank(group)
    if rank < 0:
        fail(ValueError, "group", "a group that this process is a member of", "one that it is not")
    return Ranks(group, rank, dist.get_world_size(group))


def as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor as bytes: every backend of torch.distributed sends these."""
    return x.reshape(-1).view(torch.uint8)


def _digest(value: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _words(name: str, options: dict[str, Any], own: dict[str, int], problem: Exception | None) -> Tensor:
    """What a rank says of a call, as numbers: its own ones, a digest of each option, and its error."""
    # The name that users know: ours derive from it.
    kind = next(x.__name__ for x in type(problem).__mro__ if x.__module__ == "builtins")
    text = b"" if problem is None else f"{kind}: {problem}".encode()[:TEXT]
    words = [_digest(name), len(text), *own.values(), *map(_digest, options.values())]
    assert len(words) <= WORDS - TEXT // 8
    said = torch.zeros(WORDS, dtype=torch.int64, device="cpu")  # whatever the default device is
    said[: len(words)] = torch.tensor(words, dtype=torch.int64, device="cpu")
    if text:
        said[-TEXT // 8 :].view(torch.uint8)[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return said


def agree(
    ranks: Ranks,
    name: str,
    options: dict[str, Any],
    own: dict[str, int],
    problem: Exception | None,
) -> list[dict[str, int]]:
    """What each rank says as its own, after all have said the same of everything else.

    Rank 0 hears all of them, and tells all what it heard: so it knows who did not come.

    Args:
        name: of the function. options: must be equal, as their reprs are; of all ranks in this order.
        own: numbers that may differ. problem: why this rank cannot go on.
    Raises: on every rank the same kind of error: its own problem, or ValueError for that of another; ValueError that
        names the option and the rank that differs; RuntimeError for a rank that did not come within the time limit of
        the group, or has ended.
    """
    said = _words(name, options, own, problem)
    table = _heard(ranks, name, said.to(_device(ranks))).cpu()
    if problem is not None:
        raise problem
    values = table.tolist()
    for rank, words in enumerate(values):
        if words[0] != values[0][0]:
            raise ValueError(f"{name}: expected the same function on all ranks, rank {rank} and rank 0 called two")
    for rank, words in enumerate(values):
        if words[1]:
            text = table[rank, -TEXT // 8 :].contiguous().view(torch.uint8)[: words[1]]
            message = bytes(text.tolist()).decode(errors="replace")
            raise ValueError(f"{name}: rank {rank} raised {message}")
    for number, option in enumerate(options):
        for rank, words in enumerate(values):
            if words[2 + len(own) + number] != values[0][2 + len(own) + number]:
                mine = options[option]
                fail(ValueError, option, f"the same on rank {rank} as on rank 0", f"another (on this rank {mine!r})")
    return [dict(zip(own, words[2:], strict=False)) for words in values]


def _device(ranks: Ranks) -> torch.device:
    """Where numbers lie that a group sends: on the CPU if it can."""
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(ranks.group).split(",")]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def _heard(ranks: Ranks, name: str, said: Tensor) -> Tensor:
    """(ranks, WORDS): what every rank says."""
    table = said.new_zeros(ranks.size, WORDS)
    group, limit = ranks.group, group_timeout(ranks.group)
    if ranks.size == 1:
        table[0] = said
    elif ranks.rank == 0:
        table[0] = said
        others = range(1, ranks.size)
        works = _begun(dist.P2POp(dist.irecv, table[r], group=group, group_peer=r) for r in others)
        for r, work in zip(others, works, strict=False):  # NCCL has one for all
            try:
                work.wait()
            except RuntimeError as error:
                # Gloo closes all connections at a timeout, so the others hear it by the store.
                tell(_key(ranks), str(r))
                raise RuntimeError(_missing(name, r, limit)) from error
        works = _begun(dist.P2POp(dist.isend, table, group=group, group_peer=r) for r in others)
        for r, work in zip(others, works, strict=False):
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(_missing(name, r, limit)) from error
    else:
        try:
            for operation, words, least in ((dist.isend, said, limit), (dist.irecv, table, 2 * limit)):
                # Rank 0 may wait for another as long as it is allowed to.
                for work in _begun([dist.P2POp(operation, words, group=group, group_peer=0)]):
                    work.wait(least)
        except RuntimeError as error:
            lost = told(_key(ranks), TOLD)
            raise RuntimeError(_missing(name, 0 if lost is None else int(lost), limit)) from error
    return table


def _begun(operations: Iterable[Any]) -> list[Any]:
    """What is under way of some operations, which begin together: one by one NCCL would make a connection for each."""
    return list(dist.batch_isend_irecv(list(operations)))


def _key(ranks: Ranks) -> str:
    return f"fusedattn, lost of {dist.get_process_group_ranks(ranks.group)}"


def _missing(name: str, rank: int, limit: timedelta) -> str:
    return f"{name}: rank {rank} of the group did not call it within {limit.total_seconds():g} s, or has ended"


def check_rows(argument: str, rows: Sequence[int], every: Sequence[Sequence[Any]]) -> None:
    """Raise unless each rank has as many rows as its Chunks."""
    for rank, (count, some) in enumerate(zip(rows, every, strict=True)):
        wanted = sum(chunk.last - chunk.first for chunk in some)
        if count != wanted:
            fail(ValueError, argument, f"{wanted} rows on rank {rank}, as `shard` cuts {sum(rows)}", count)


def anchor(like: Tensor) -> Tensor:
    """What wants a gradient, on a rank whose tensors do not: it takes part in the backward of the others."""
    return torch.zeros((), device=like.device, requires_grad=True)


class Transfer(NamedTuple):
    """Tensors that are under way: what comes, and whom it is waited for from."""

    tensors: tuple[Tensor, ...]
    works: tuple[Any, ...]
    peer: int | None

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors that have come."""
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
    """What each rank sends this one, of these shapes, for what this one sends each, of one dtype."""
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
    """The sum of a tensor over all ranks, on each."""
    total = x.contiguous().clone()
    dist.all_reduce(total, group=ranks.group)
    return total
