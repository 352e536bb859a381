"""Communication between the ranks of a process group: they agree on a call, and send each other tensors."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..call.checks import fail
from ..call.options import differentiated
from ..call.private import fake_mode, group_timeout, has_storage, read_store, transforms_active, write_store
from ..operators import dtensors

STATEMENT = 2048  # bytes of a rank's statement about a call: a fixed size, so that ranks that disagree can read it
MESSAGE = 300  # characters of an error message in a statement, which has to fit
PATIENCE = timedelta(seconds=2)  # how long to wait for rank 0 to name the lost rank after a broken connection


class Ranks(NamedTuple):
    """A process group, the rank of this process in it, and the number of ranks."""

    group: Any
    rank: int
    size: int


def of(group: Any) -> Ranks | None:
    """Return the Ranks of a process group or DeviceMesh of one dimension; None if there is no default group."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        group = dist.group.WORLD
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            fail(ValueError, "group", "a DeviceMesh of one dimension", f"one of {group.ndim}")
        group = dist.GroupMember.NON_GROUP_MEMBER if group.get_coordinate() is None else group.get_group()
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
    ranks: Ranks,
    function: str,
    arguments: Mapping[str, Any],
    facts: Callable[[], tuple[Any, dict[str, Any], dict[str, Any]]],
) -> tuple[Any, list[dict[str, Any]]]:
    """Wait until all ranks call the same function with equal options; return (value of this rank, [`own` of all]).

    `facts` checks the arguments of this rank, and returns (value, options, own). The reprs of options must be equal on
    all ranks; `own` is data that JSON can hold, and may differ. Rank 0 collects the statements of all ranks and sends
    them to all, so it knows which rank is missing.

    Raises:
        ValueError: if an option differs, or `facts` raises on another rank. This rank raises what its own `facts` does.
        NotImplementedError: on all ranks, if an argument {name: value} is a DTensor or has a tangent, or inside
            torch.func. On this rank alone, under FakeTensorMode.
        RuntimeError: if a rank has ended, or did not call this within the time limit of the group.
    """
    if fake_mode([*arguments.values()]) is not None:  # a fake tensor cannot send a statement
        raise NotImplementedError(f"{function}: expected tensors with data, got FakeTensorMode")
    value, problem, text = None, None, None
    options: dict[str, Any] = {}
    own: dict[str, Any] = {}
    try:
        _refuse(arguments)
        value, options, own = facts()
    except Exception as error:  # of any type: the other ranks wait for this statement
        kind = next(x.__name__ for x in type(error).__mro__ if x.__module__ == "builtins")  # our errors derive from it
        problem, text = error, f"{kind}: {error}"[:MESSAGE]
    digests = {name: hashlib.sha256(repr(x).encode()).hexdigest()[:14] for name, x in options.items()}
    statement = dict(function=function, error=text, options=digests, own=own)
    table = _exchange_statements(ranks, statement, arguments.values())
    if problem is not None:
        raise problem
    for rank, other in enumerate(table):
        if other["function"] != table[0]["function"]:
            fail(ValueError, function, "the same function on all ranks", f"different ones on rank {rank} and rank 0")
        if other["error"] is not None:
            raise ValueError(f"{function}: rank {rank} raised {other['error']}")
    for name, x in options.items():
        for rank, other in enumerate(table):
            if other["options"][name] != table[0]["options"][name]:
                fail(ValueError, name, f"the same on rank {rank} as on rank 0", f"another ({x!r} on this rank)")
    return value, [other["own"] for other in table]


def _refuse(arguments: Mapping[str, Any]) -> None:
    dtensors.refuse("fusedattn.distributed", arguments)
    if transforms_active():
        raise NotImplementedError("fusedattn.distributed: torch.func cannot transform it, use backward()")
    with torch.no_grad():  # so that `differentiated` sees only tangents
        if differentiated(arguments.values()):
            raise NotImplementedError("fusedattn.distributed: it does not support forward mode, use backward()")


def _exchange_statements(ranks: Ranks, statement: dict[str, Any], arguments: Iterable[Any]) -> list[dict[str, Any]]:
    text = json.dumps(statement, ensure_ascii=False).encode(errors="replace")
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(ranks.group).split(",")]
    device = torch.device("cpu")
    if "cpu" not in kinds:
        own = [x.device for x in arguments if isinstance(x, Tensor) and x.device.type in kinds]
        device = own[0] if own else torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
    mine = torch.frombuffer(bytearray(text.ljust(STATEMENT)), dtype=torch.uint8).to(device)
    table = mine.expand(ranks.size, STATEMENT).clone()
    if ranks.size > 1:
        _fill(table, ranks, statement["function"])
    table = table.cpu()
    longest = int((table != ord(" ")).any(0).nonzero().max()) + 1
    return [json.loads(bytes(row.tolist())) for row in table[:, :longest]]


def _fill(table: Tensor, ranks: Ranks, function: str) -> None:
    """Receive each rank's statement (JSON) into its row of `table`; at first every row holds this rank's."""
    limit, key = group_timeout(ranks.group), f"fusedattn, lost of {dist.get_process_group_ranks(ranks.group)}"
    peers, steps, patience = [*range(1, ranks.size)], [dist.irecv, dist.isend], []
    if ranks.rank != 0:  # wait twice as long to receive: rank 0 may itself wait for another rank until the limit
        peers, steps, patience = [0], [dist.isend, dist.irecv], [2 * limit]
    lost = peers[0]
    try:
        for operation, tensors in zip(steps, ([table[r] for r in peers], [table] * len(peers)), strict=True):
            # Begin all transfers at once. One by one, NCCL would open a connection for each.
            pairs = zip(peers, tensors, strict=True)
            operations = [dist.P2POp(operation, x, group=ranks.group, group_peer=r) for r, x in pairs]
            for r, work in zip(peers, dist.batch_isend_irecv(operations), strict=False):  # NCCL returns one for all
                lost = r
                work.wait(*patience)
    except RuntimeError as error:
        # Gloo closes all connections at a timeout, so the others read from the store which rank is lost.
        if ranks.rank == 0:
            write_store(key, str(lost))
        else:
            lost = int(read_store(key, PATIENCE) or 0)
        late = f"did not call it within {limit.total_seconds():g} s"
        text = f"{function}: rank {lost} of the group has ended, or {late}: see what that rank printed"
        raise RuntimeError(text) from error


def refuse_batched(*incoming: Tensor | None) -> None:
    """Raise, before a backward sends anything, if torch maps it over several incoming gradients."""
    if not all(x is None or has_storage(x) for x in incoming):
        got = "torch.vmap or is_grads_batched"
        raise NotImplementedError(f"fusedattn.distributed: expected one gradient at a time, got {got}: call backward()")


def anchor(like: Tensor) -> Tensor:
    """Return a leaf tensor that requires grad, so that the backward runs on a rank whose inputs do not require grad."""
    return torch.zeros((), device=like.device, requires_grad=True)


class Transfer(NamedTuple):
    """A transfer between ranks that has begun. peer: the rank to name in an error."""

    tensors: tuple[Tensor, ...]
    works: Sequence[Any]
    peer: int

    def wait(self) -> tuple[Tensor, ...]:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"fusedattn.distributed: no answer from rank {self.peer}: {error}") from error
        return self.tensors


def exchange(ranks: Ranks, sent: Iterable[Tensor], to: int, received: Iterable[Tensor], of: int) -> Transfer:
    """Start to send the tensors `sent` to rank `to`, and to receive into the tensors `received` from rank `of`."""
    # The tensors are contiguous, and must not change before `wait` returns.
    received = tuple(received)
    operations = [
        dist.P2POp(operation, as_bytes(x), group=ranks.group, group_peer=peer)
        for tensors, peer, operation in ((sent, to, dist.isend), (received, of, dist.irecv))
        for x in tensors
        if x.numel()
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return Transfer(received, works, of if received else to)


def all_to_all(ranks: Ranks, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Send sent[r] to each rank r, and return [tensor of shape shapes[r] received from rank r]. All have one dtype."""
    dtype = sent[0].dtype
    flat = torch.cat([as_bytes(x.contiguous()) for x in sent])
    came = [dtype.itemsize * math.prod(shape) for shape in shapes]
    received = flat.new_empty(sum(came))
    dist.all_to_all_single(received, flat, came, [x.nbytes for x in sent], group=ranks.group)
    return [x.view(dtype).view(tuple(shape)) for x, shape in zip(received.split(came), shapes, strict=True)]


def sum_of(ranks: Ranks, x: Tensor) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=ranks.group)
    return total
