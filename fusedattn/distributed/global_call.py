"""The call of all ranks, which they agree on before anything is sent: each has some of its rows and keys."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from ..api import attention
from ..call.options import (
    DIMS,
    INPUTS,
    TENSORS,
    Arguments,
    Call,
    Origin,
    Plan,
    add_head_dim,
    inputs as inputs_of,
    with_tensors,
)
from ..call.private import forward_level, transforms_active
from ..call.rules import Sizes, check_flags, check_options, checked, fail
from ..dispatch import backends
from ..operators import dtensors, partial
from . import ranks as ranks_of
from .ranks import Ranks
from .shards import Chunk, check_balance, chunks, rows_of

ABSENT = -1  # the size of what is not there
# The dimensions in which the tensors of all ranks have the same sizes.
ALIKE = {
    name: tuple(n for n, letter in enumerate(letters) if letter in "BH") for name, letters in DIMS.items() if letters
}
ALIKE |= dict(query=(0, 1, 3), key=(1,), value=(3,))


class Piece(NamedTuple):
    """Some rows of a rank and some of the keys at hand, with the fields of their Call that say how both lie.

    pair_rows and pair_keys: where both are in masks and biases, by default at the same places. batch: of these and of
    slopes.
    """

    rows: slice
    keys: slice
    fields: dict[str, Any]
    batch: slice = slice(None)
    pair_rows: slice | None = None
    pair_keys: slice | None = None


class GlobalCall(NamedTuple):
    """A call of all ranks, whose parts a backend computes.

    call is that of this rank, with its own rows and keys; its options are the same on all ranks. rows and keys are the
    Chunks of each rank. Row i of the whole is level with key i + shift. needs says for each rank which inputs require
    a gradient.
    """

    backend: str
    ranks: Ranks
    call: Call
    rows: list[list[Chunk]]
    keys: list[list[Chunk]]
    shift: int
    needs: list[set[str]]

    def wanted(self, name: str) -> bool:
        """Return whether any rank wants the gradient of an input."""
        return any(name in need for need in self.needs)

    def with_tensors(self, tensors: Sequence[Tensor | None] = (None,) * len(TENSORS)) -> "GlobalCall":
        """Return the same with these tensors of the call, which autograd keeps; by default without any."""
        return self._replace(call=with_tensors(self.call, tensors))

    @property
    def query(self) -> Tensor:
        return self.call.query

    @property
    def total(self) -> int:
        """The number of keys on all ranks."""
        return sum(map(rows_of, self.keys))

    @property
    def differentiated(self) -> bool:
        """Return whether any rank wants any gradient."""
        return any(self.needs)

    def sides(self) -> tuple[float, float]:
        """Return (low, high): row i sees keys i + low .. i + high."""
        left, right = self.call.left, self.call.right
        low = -float("inf") if left is None else self.shift - left
        return low, float("inf") if right is None else self.shift + right

    def sees(self, row: Chunk, key: Chunk) -> bool:
        """Return whether causal and window let any of the rows see any of the keys."""
        low, high = self.sides()
        return row.length > 0 and key.length > 0 and key.first < row.last + high and key.last > row.first + low

    def sees_all(self, row: Chunk, key: Chunk) -> bool:
        """Return whether causal and window let each of the rows see all of the keys."""
        low, high = self.sides()
        return key.last <= row.first + high + 1 and key.first >= row.last - 1 + low

    def meet(self, rank: int, owner: int) -> bool:
        """Return whether any row of a rank sees any key of an owner."""
        return any(self.sees(row, key) for row in self.rows[rank] for key in self.keys[owner])

    def pieces(self, owner: int) -> list[Piece]:
        """Return what this rank's rows see of an owner's keys, in as few Pieces as possible."""
        rows = [row for row in self.rows[self.ranks.rank] if row.length]
        keys = [key for key in self.keys[owner] if key.length]
        # Where every pair is seen and no position counts, Chunks may be computed together.
        together = self.call.seed is self.call.alibi_slopes is None
        pieces = []
        for key in list(keys) if together and len(rows) > 1 else ():
            if all(self.sees_all(row, key) for row in rows):
                pieces.append(Piece(_joined(rows), key.here, dict(left=None, right=None)))
                keys.remove(key)
        for row in rows:
            seen = [key for key in keys if self.sees(row, key)]
            if together and len(seen) > 1 and all(self.sees_all(row, key) for key in seen):
                pieces.append(Piece(row.here, _joined(seen), dict(left=None, right=None)))
            else:
                pieces += [Piece(row.here, key.here, self.band(row, key)) for key in seen]
        return pieces

    def band(self, row: Chunk, key: Chunk) -> dict[str, Any]:
        """Return the fields of a Call of some rows and keys that say how they lie to each other."""
        free = dict(left=None, right=None) if self.sees_all(row, key) else {}
        shift = self.shift + row.first - key.first
        return free | dict(origin=list(Origin(shift, row.first, key.first, 0, self.call.query.shape[1])))


def _joined(some: list[Chunk]) -> slice:
    return slice(some[0].here.start, some[-1].here.stop)


def arguments_of(given: dict[str, Any]) -> Arguments:
    """Return the Arguments among the arguments of a public function."""
    return Arguments(**{name: given[name] for name in Arguments._fields if name in given})


def agreed(
    function: str,
    group: Any,
    balance: Any,
    arguments: Arguments,
    backend: Any,
    return_lse: Any,
    return_weights: Any = False,
    prepare: Callable[[Call, Ranks], tuple[Call, dict[str, Any]]] = lambda call, ranks: (call, {}),
    before: Callable[[], None] = lambda: None,
) -> GlobalCall | None:
    """Return the GlobalCall of a rank's own rows, with all keys in mask and bias; None without a group.

    Args:
        prepare: adds to the rank's Call, and returns options that all must say alike; it raises for what a function
            cannot take. before: raises for what `Arguments` cannot be checked with.
    Raises: on all ranks, for what is wrong on one of them or differs between two.
    """
    ranks = ranks_of.of(group)
    if ranks is None:
        check_balance(balance)
        return None
    problem, call = None, None
    options: dict[str, Any] = {}
    own = dict(rows=0, keys=0, needs=0, seed=0, mask=ABSENT, bias=ABSENT)
    try:
        before()
        check_flags(return_lse=return_lse, return_weights=return_weights)
        call, more = prepare(_checked(arguments, balance, backend), ranks)
        if backends.named(backend) is not None:  # which may raise; the choice among all does not
            _backend(call, (), return_weights, backend)
        more |= dict(balance=balance, return_lse=return_lse, return_weights=return_weights)
        options = _alike(call, arguments) | more | dict(backend=backends.named(backend))
        own |= _own(call)
    except (TypeError, ValueError, NotImplementedError) as error:
        problem = error
    table = ranks_of.agree(ranks, function, options, own, problem)
    assert call is not None
    rows, keys = ([entry[kind] for entry in table] for kind in ("rows", "keys"))
    chunks_of_rows, chunks_of_keys = (chunks(sum(lengths), ranks.size, balance) for lengths in (rows, keys))
    ranks_of.check_rows("query", rows, chunks_of_rows)
    ranks_of.check_rows("key", keys, chunks_of_keys)
    for name in ("mask", "bias"):
        for rank, entry in enumerate(table):
            if entry[name] not in (ABSENT, 1, sum(keys)):
                fail(ValueError, name, f"all keys, {sum(keys)}, or 1 as its last size", f"{entry[name]} on rank {rank}")
    needs = [{name for n, name in enumerate(INPUTS) if entry["needs"] >> n & 1} for entry in table]
    taken = _backend(call, set().union(*needs), return_weights, backend)
    # The diagonal ends, or begins, where all rows and keys of the whole do.
    shift = 0 if call.top_left else sum(keys) - sum(rows)
    call = call._replace(seed=_common_seed(ranks, call, arguments, table), top_left=True)
    return GlobalCall(taken, ranks, call, chunks_of_rows, chunks_of_keys, shift, needs)


def _checked(arguments: Arguments, balance: Any, backend: Any) -> Call:
    dtensors.refuse("fusedattn.distributed", arguments._asdict())
    if transforms_active():
        raise NotImplementedError("fusedattn.distributed: torch.func cannot look into what ranks send each other")
    if forward_level() >= 0:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise NotImplementedError("fusedattn.distributed: it has no derivative in forward mode")
    check_balance(balance)
    backends.check_name(backend)
    query = arguments.query
    if isinstance(query, Tensor) and query.dim() != 4:
        fail(ValueError, "query", "rank 4, (B, H, rows, D)", tuple(query.shape))
    call = checked(arguments._replace(mask=None, bias=None), named=backends.named(backend) is not None)
    pairs = {name: getattr(arguments, name) for name in ("mask", "bias")}
    for name, x in pairs.items():
        if isinstance(x, Plan):
            fail(TypeError, name, "a tensor: a plan is of one process", "a plan")
        # A rank does not know yet how many keys there are in all.
        keys = x.shape[-1] if isinstance(x, Tensor) and x.dim() else 1
        batch, heads, rows, _ = call.query.shape
        sizes = Sizes(call.query.device, call.query.dtype, batch, heads, rows, keys)
        check_options(Arguments(*call[:3], **{name: x}), sizes)
    return call._replace(**{name: add_head_dim(x) for name, x in pairs.items()})


def _own(call: Call) -> dict[str, int]:
    """Return the numbers that may differ from rank to rank."""
    own = dict(rows=call.query.shape[2], keys=call.key.shape[2])
    if torch.is_grad_enabled():
        own["needs"] = sum(1 << n for n, x in enumerate(inputs_of(call)) if x is not None and x.requires_grad)
    if call.seed is not None and call.seed.device.type == "cpu":
        own["seed"] = int(call.seed)
    if call.cu_seqlens_q is None:
        own |= {name: x.shape[3] for name, x in (("mask", call.mask), ("bias", call.bias)) if x is not None}
    return own


def _alike(call: Call, arguments: Arguments) -> dict[str, Any]:
    """Return what the arguments of all ranks must have in common, by their names."""
    tensors = {name: getattr(call, name) for name in ALIKE}
    common: dict[str, Any] = {
        name: None if x is None else (x.device.type, x.dtype, *(x.shape[dim] for dim in ALIKE[name]))
        for name, x in tensors.items()
    }
    seed = arguments.seed if call.dropout_p else None
    if isinstance(seed, Tensor):
        seed = int(seed) if seed.device.type == "cpu" else "a tensor"  # which nobody fetches
    return common | dict(
        causal=arguments.causal,
        window=(call.left, call.right),
        align="top_left" if call.top_left else "bottom_right",
        scale=call.scale,
        softcap=call.softcap,
        dropout_p=call.dropout_p,
        seed=seed,
        grad_mode=torch.is_grad_enabled(),
    )


def _common_seed(ranks: Ranks, call: Call, arguments: Arguments, table: list[dict[str, int]]) -> Tensor | None:
    """Return the seed of all ranks: the named one, or rank 0's draw."""
    if call.seed is None:
        return None
    if arguments.seed is not None:
        return call.seed.clone()  # the backward has it, whatever becomes of the caller's
    if call.seed.device.type == "cpu":
        return torch.full_like(call.seed, table[0]["seed"])
    seed = call.seed.clone()
    dist.broadcast(seed, group_src=0, group=ranks.group)
    return seed


def attend_alone(arguments: Arguments, **more: Any) -> Any:
    """Return `fusedattn.attention` of arguments: the answer to a process without a group."""
    options = arguments._asdict() | more
    return attention(options.pop("query"), options.pop("key"), options.pop("value"), **options)


def _backend(call: Call, needs: Collection[str], need_weights: bool, backend: Any) -> str:
    """Return the name of the backend that computes the parts of a call, of which any rank needs these gradients."""
    call, named = call._replace(partial=True, sinks=None), backends.named(backend)
    if needs:
        present: Any = {name: x for name, x in zip(INPUTS, inputs_of(call), strict=True) if x is not None}
        call = call._replace(**{name: x.detach().requires_grad_(name in needs) for name, x in present.items()})
    if call.query.device.type == "cpu" and named not in partial.KERNELS:
        call = partial.widened(call)
    return backends.choose(call, need_weights, named).name


def in_dtypes_of(inputs: Iterable[Tensor | None], grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Return gradients in the dtypes of the inputs; None stays."""
    pairs = zip(inputs, grads, strict=True)
    return [None if x is None or grad is None else grad.to(x.dtype) for x, grad in pairs]
