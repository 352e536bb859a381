"""What the ranks of a call agree on before anything is sent: one call, of which each has some rows."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from .. import backends
from ..api import attention
from ..call.form import INPUTS, TENSORS, Arguments, Call, Origin, Plan, inputs as inputs_of, rank4, with_tensors
from ..call.rules import Sizes, check_flags, check_options, checked, fail
from ..operators import dtensors, partial
from ..private import forward_level, transforms_active
from . import ranks as ranks_of
from .ranks import Ranks
from .shards import Chunk, check_balance, chunks, rows_of

ABSENT = -1  # the size of what is not there
NEEDS = len(INPUTS)  # how many inputs may want a gradient


class Pair(NamedTuple):
    """Rows and keys of the whole, as slices of two shards, and what a Call says of how they lie to each other."""

    rows: slice
    keys: slice
    band: dict[str, Any]


class Whole(NamedTuple):
    """A call of all ranks, whose parts a backend computes.

    call is that of this rank, of its own rows and keys, with its options, which are the same on all. rows and keys have
    the Chunks of each rank; shift is what the last row of the whole is further right than the last key of it would be
    without. needs says for each rank which inputs want a gradient.
    """

    backend: str
    ranks: Ranks
    call: Call
    rows: list[list[Chunk]]
    keys: list[list[Chunk]]
    shift: int
    needs: list[list[bool]]

    def wanted(self, number: int) -> bool:
        """Whether any rank wants the gradient of an input."""
        return any(need[number] for need in self.needs)

    def with_tensors(self, tensors: Sequence[Tensor | None] = (None,) * len(TENSORS)) -> "Whole":
        """The same of a call with these tensors, which autograd keeps for a backward; by default without any."""
        return self._replace(call=with_tensors(self.call, tensors))

    @property
    def total(self) -> int:
        """How many keys all ranks have."""
        return sum(map(rows_of, self.keys))

    @property
    def differentiated(self) -> bool:
        """Whether any rank wants any gradient."""
        return any(any(need) for need in self.needs)

    def sees(self, row: Chunk, key: Chunk) -> bool:
        """Whether any of some rows sees any of some keys, as far as causal and window say."""
        low, high = self.sides()
        return (
            row.first < row.last and key.first < key.last and key.first < row.last + high and key.last > row.first + low
        )

    def sees_all(self, row: Chunk, key: Chunk) -> bool:
        """Whether each of some rows sees all of some keys."""
        low, high = self.sides()
        return key.last <= row.first + high + 1 and key.first >= row.last - 1 + low

    def sides(self) -> tuple[float, float]:
        """Row i sees keys i + low .. i + high."""
        left, right = self.call.left, self.call.right
        return (
            -float("inf") if left is None else self.shift - left,
            float("inf") if right is None else self.shift + right,
        )

    def meet(self, rank: int, owner: int) -> bool:
        """Whether any row of a rank sees any key of an owner."""
        return any(self.sees(row, key) for row in self.rows[rank] for key in self.keys[owner])

    def pairs(self, owner: int) -> list[Pair]:
        """What this rank's rows see of the keys of an owner: in as few calls as that takes."""
        rows = [row for row in self.rows[self.ranks.rank] if row.first < row.last]
        keys = [key for key in self.keys[owner] if key.first < key.last]
        # What counts no positions may be computed together, where all is seen.
        together = self.call.seed is self.call.alibi_slopes is None
        found = []
        for key in list(keys) if together and len(rows) > 1 else ():
            if all(self.sees_all(row, key) for row in rows):
                found.append(Pair(slice(rows[0].here.start, rows[-1].here.stop), key.here, dict(left=None, right=None)))
                keys.remove(key)
        for row in rows:
            seen = [key for key in keys if self.sees(row, key)]
            if together and len(seen) > 1 and all(self.sees_all(row, key) for key in seen):
                found.append(Pair(row.here, slice(seen[0].here.start, seen[-1].here.stop), dict(left=None, right=None)))
            else:
                found += [Pair(row.here, key.here, self.band(row, key)) for key in seen]
        return found

    def band(self, row: Chunk, key: Chunk) -> dict[str, Any]:
        """Fields of the Call of some rows and keys: how they lie to each other."""
        heads = self.call.query.shape[1]
        free = dict(left=None, right=None) if self.sees_all(row, key) else {}
        return free | dict(origin=list(Origin(self.shift + row.first - key.first, row.first, key.first, 0, heads)))


def agreed(
    name: str,
    group: Any,
    balance: Any,
    arguments: Arguments,
    return_lse: Any,
    backend: Any,
    prepare: Callable[[Call, Ranks], tuple[Call, dict[str, Any]]] = lambda call, ranks: (call, {}),
    before: Callable[[], None] = lambda: None,
) -> Whole | None:
    """The Whole of arguments of which each rank has its own rows, and all keys in mask and bias; None without a group.

    Args:
        prepare: of the rank's Call: what else belongs to it, and options that all must say alike; it raises for what a
            function cannot take. before: raises for what `Arguments` cannot be checked with.
    Raises: on all ranks, for what is wrong on one of them or differs between two.
    """
    ranks = ranks_of.of(group)
    if ranks is None:
        check_balance(balance)
        return None
    problem, options, own, call = None, {}, _nothing(), None
    try:
        before()
        call = _checked(arguments, balance, return_lse, backend)
        call, more = prepare(call, ranks)
        if backends.named(backend) is not None:  # which may raise; the choice among all does not
            _backend(call, [False] * NEEDS, backend)
        options = _options(call, arguments, balance, return_lse, backend) | more
        own = _own(call)
    except (TypeError, ValueError, NotImplementedError) as error:
        problem = error
    table = ranks_of.agree(ranks, name, options, own, problem)
    assert call is not None
    rows, keys = ([entry[kind] for entry in table] for kind in ("rows", "keys"))
    every = chunks(sum(rows), ranks.size, balance), chunks(sum(keys), ranks.size, balance)
    ranks_of.check_rows("query", rows, every[0])
    ranks_of.check_rows("key", keys, every[1])
    for what in ("mask", "bias"):
        for rank, entry in enumerate(table):
            if entry[what] not in (ABSENT, 1, sum(keys)):
                fail(ValueError, what, f"all keys, {sum(keys)}, or 1 as its last size", f"{entry[what]} on rank {rank}")
    call = call._replace(seed=_common_seed(ranks, call, arguments, table))
    needs = [[bool(entry["needs"] >> n & 1) for n in range(NEEDS)] for entry in table]
    # Level where all rows and keys of the whole are: at the ends of both, or at their beginnings.
    shift = 0 if call.top_left else sum(keys) - sum(rows)
    taken = _backend(call, [any(each) for each in zip(*needs, strict=True)], backend)
    return Whole(taken, ranks, call._replace(top_left=True), *every, shift, needs)


def _checked(arguments: Arguments, balance: Any, return_lse: Any, backend: Any) -> Call:
    dtensors.refuse("fusedattn.distributed", arguments._asdict())
    refuse_tangents(arguments)
    check_balance(balance)
    check_flags(return_lse=return_lse)
    backends.check_name(backend)
    query = arguments.query
    if isinstance(query, Tensor) and query.dim() != 4:
        fail(ValueError, "query", "rank 4, (B, H, rows, D)", tuple(query.shape))
    call = checked(arguments._replace(mask=None, bias=None), named=backends.named(backend) is not None)
    pairs = {name: getattr(arguments, name) for name in ("mask", "bias")}
    for name, x in pairs.items():
        if isinstance(x, Plan):
            fail(TypeError, name, "a tensor: a plan is of one process", "a plan")
        # How many keys there are in all, a rank cannot know yet.
        keys = x.shape[-1] if isinstance(x, Tensor) and x.dim() else 1
        batch, heads, rows, _ = call.query.shape
        sizes = Sizes(call.query.device, call.query.dtype, batch, heads, rows, keys)
        check_options(Arguments(*call[:3], **{name: x}), sizes)
    return call._replace(**{name: rank4(x) for name, x in pairs.items()})


def _nothing() -> dict[str, int]:
    return dict.fromkeys(("rows", "keys", "needs", "seed"), 0) | dict(mask=ABSENT, bias=ABSENT)


def _own(call: Call) -> dict[str, int]:
    """What a rank says that may differ from rank to rank."""
    own = _nothing() | dict(rows=call.query.shape[2], keys=call.key.shape[2])
    if torch.is_grad_enabled():
        own["needs"] = sum(1 << n for n, x in enumerate(inputs_of(call)) if isinstance(x, Tensor) and x.requires_grad)
    if call.seed is not None and call.seed.device.type == "cpu":
        own["seed"] = int(call.seed)
    if call.cu_seqlens_q is None:
        own |= {name: x.shape[3] for name, x in (("mask", call.mask), ("bias", call.bias)) if x is not None}
    return own


def _options(call: Call, arguments: Arguments, balance: Any, return_lse: bool, backend: Any) -> dict[str, Any]:
    """What all ranks must say alike."""
    query, key, value = call[:3]

    def shape(x: Any) -> Any:
        return None if x is None else tuple(x.shape)

    def dtype(x: Any) -> Any:
        return None if x is None else x.dtype

    seed = arguments.seed if call.dropout_p else None
    if isinstance(seed, Tensor):
        seed = int(seed) if seed.device.type == "cpu" else "a tensor"  # which nobody fetches
    return dict(
        balance=balance,
        query=(query.shape[0], query.shape[1], query.shape[3], query.dtype, query.device.type),
        key=key.shape[1],
        value=value.shape[3],
        key_mask=None if call.key_mask is None else call.key_mask.shape[0],
        query_mask=None if call.query_mask is None else call.query_mask.shape[0],
        causal=arguments.causal,
        window=(call.left, call.right),
        align="top_left" if call.top_left else "bottom_right",
        scale=call.scale,
        softcap=call.softcap,
        alibi_slopes=(shape(call.alibi_slopes), dtype(call.alibi_slopes)),
        sinks=(shape(call.sinks), dtype(call.sinks)),
        mask=None if call.mask is None else tuple(call.mask.shape[:2]),
        bias=None if call.bias is None else (*call.bias.shape[:2], dtype(call.bias)),
        dropout_p=call.dropout_p,
        seed=seed,
        return_lse=return_lse,
        backend=backends.named(backend),
        grad_mode=torch.is_grad_enabled(),
    )


def _common_seed(ranks: Ranks, call: Call, arguments: Arguments, table: list[dict[str, int]]) -> Tensor | None:
    """The seed of all ranks: the one that was named, or what rank 0 has drawn."""
    if call.seed is None:
        return None
    if arguments.seed is not None:
        return call.seed.clone()  # the backward has it, whatever becomes of the caller's
    if call.seed.device.type == "cpu":
        return torch.full_like(call.seed, table[0]["seed"])
    seed = call.seed.clone()
    dist.broadcast(seed, group_src=0, group=ranks.group)
    return seed


def refuse_tangents(tensors: Iterable[Any]) -> None:
    """Raise inside torch.func, and for tensors of forward mode: what is sent would not take them along."""
    if transforms_active():
        raise NotImplementedError("fusedattn.distributed: torch.func cannot look into what ranks send each other")
    if forward_level() >= 0:
        for x in tensors:
            if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError("fusedattn.distributed: it has no derivative in forward mode")


def alone(arguments: Arguments, **more: Any) -> Any:
    """`fusedattn.attention` of arguments: what a process without a group gets."""
    options = arguments._asdict() | more
    return attention(options.pop("query"), options.pop("key"), options.pop("value"), **options)


def grad_of_out(grad: Tensor | None, rows: Tensor, like: Tensor) -> Tensor:
    """The gradient of an output, of the shape of `rows`; zeros where nothing has come."""
    return like.new_zeros(()).expand(rows.shape) if grad is None else grad


def _backend(call: Call, needs: Sequence[bool], backend: Any) -> str:
    """The name of the backend that computes the parts of a call, of which any rank needs these gradients."""
    call, named = call._replace(partial=True, sinks=None), backends.named(backend)
    if any(needs):
        pairs: Any = zip(inputs_of(call), needs, strict=True)
        wanted: Any = (None if x is None else x.detach().requires_grad_(asked) for x, asked in pairs)
        call = call._replace(**dict(zip(INPUTS, wanted, strict=True)))
    if call.query.device.type == "cpu" and named not in partial.KERNELS:
        call = partial.widened(call)
    return backends.choose(call, False, named).name
