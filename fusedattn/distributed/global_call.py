"""The call of all ranks: each rank has some of its rows and keys, and all agree on it before anything is sent."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from ..call.options import DIMS, INPUTS, TENSORS, Arguments, Call, Origin, Plan, add_head_dim
from ..call.private import forward_level, transforms_active
from ..call.rules import Sizes, check_flags, check_options, checked, fail
from ..dispatch import backends
from ..operators import dtensors, partial
from . import ranks as ranks_of
from .ranks import Ranks
from .shards import Chunk, check_balance, chunks_of, rows_of

# {tensor of a Call: dimensions that have the same size on all ranks}
_COMMON_DIMS = {
    name: [dim for dim, letter in enumerate(letters) if letter not in "QK"] for name, letters in DIMS.items() if letters
}


class Piece(NamedTuple):
    """Some rows of a rank, some of the keys at hand, and the fields of their Call that tell their positions.

    pair_rows and pair_keys slice masks and biases; None: as rows and keys. batch slices them and the slopes.
    """

    rows: slice
    keys: slice
    fields: dict[str, Any]
    batch: slice = slice(None)
    pair_rows: slice | None = None
    pair_keys: slice | None = None


class GlobalCall(NamedTuple):
    """A call of all ranks, computed in parts by one backend.

    call has this rank's rows and keys; its options are the same on all ranks. rows and keys are the Chunks of each
    rank. Row i of the whole is level with key i + shift. needs: the inputs that require a gradient, for each rank.
    """

    backend: str
    ranks: Ranks
    call: Call
    rows: list[list[Chunk]]
    keys: list[list[Chunk]]
    shift: int
    needs: list[list[str]]

    def wanted(self, rank: int | None = None) -> set[str]:
        """Return the inputs that require a gradient on a rank; None: on any rank."""
        return set().union(*(self.needs if rank is None else [self.needs[rank]]))

    def with_tensors(self, tensors: Iterable[Tensor | None]) -> "GlobalCall":
        """Return this with other TENSORS in its call. Autograd keeps the tensors; a context keeps the rest."""
        fields: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
        return self._replace(call=self.call._replace(**fields))

    @property
    def query(self) -> Tensor:
        return self.call.query

    @property
    def total_keys(self) -> int:
        return sum(map(rows_of, self.keys))

    def sides(self) -> tuple[float, float]:
        """Return (low, high): row i sees keys i + low .. i + high."""
        left, right = self.call.left, self.call.right
        low = -float("inf") if left is None else self.shift - left
        return low, float("inf") if right is None else self.shift + right

    def sees(self, row: Chunk, key: Chunk) -> bool:
        """Return whether any of the rows sees any of the keys."""
        low, high = self.sides()
        return row.length > 0 and key.length > 0 and key.first < row.last + high and key.last > row.first + low

    def sees_all(self, row: Chunk, key: Chunk) -> bool:
        """Return whether each of the rows sees all of the keys."""
        low, high = self.sides()
        return key.last <= row.first + high + 1 and key.first >= row.last - 1 + low

    def rank_sees(self, rank: int, owner: int) -> bool:
        """Return whether any row of a rank sees any key of an owner."""
        return any(self.sees(row, key) for row in self.rows[rank] for key in self.keys[owner])

    def pieces(self, owner: int) -> list[Piece]:
        """Split attention of this rank's rows to an owner's keys into as few Pieces, one Call each, as possible."""
        rows = [row for row in self.rows[self.ranks.rank] if row.length]
        keys = [key for key in self.keys[owner] if key.length]
        # Chunks are joined if each row sees each key and no position counts.
        joinable = self.call.seed is self.call.alibi_slopes is None
        pieces = []
        for key in list(keys) if joinable and len(rows) > 1 else ():
            if all(self.sees_all(row, key) for row in rows):
                pieces.append(Piece(_joined(rows), key.in_shard, dict(left=None, right=None)))
                keys.remove(key)
        for row in rows:
            seen = [key for key in keys if self.sees(row, key)]
            if joinable and len(seen) > 1 and all(self.sees_all(row, key) for key in seen):
                pieces.append(Piece(row.in_shard, _joined(seen), dict(left=None, right=None)))
            else:
                pieces += [Piece(row.in_shard, key.in_shard, self.band(row, key)) for key in seen]
        return pieces

    def band(self, row: Chunk, key: Chunk) -> dict[str, Any]:
        """Return the fields of a Call that tell the positions of rows and keys."""
        sides = dict(left=None, right=None) if self.sees_all(row, key) else {}
        shift = self.shift + row.first - key.first
        return sides | dict(origin=list(Origin(shift, row.first, key.first, 0, self.query.shape[1])))


def _joined(chunks: list[Chunk]) -> slice:
    return slice(chunks[0].in_shard.start, chunks[-1].in_shard.stop)


Prepare = Callable[[Arguments, Any, Ranks], tuple[Call, dict[str, Any]]]


def prepared(arguments: Arguments, backend: Any, ranks: Ranks) -> tuple[Call, dict[str, Any]]:
    """Return (the checked Call of a rank's arguments, options that must be equal on all ranks besides)."""
    query = arguments.query
    if isinstance(query, Tensor) and query.dim() != 4:
        fail(ValueError, "query", "rank 4, (B, H, rows, D)", query.shape)
    call = checked(arguments._replace(mask=None, bias=None), named=backends.named(backend) is not None)
    pairs: dict[str, Any] = dict(mask=arguments.mask, bias=arguments.bias)
    for name, x in pairs.items():
        if isinstance(x, Plan):
            fail(TypeError, name, "a tensor", "a plan, which one process cannot make for all: pass its mask")
        # The number of all keys is not known yet.
        keys = x.shape[-1] if isinstance(x, Tensor) and x.dim() else 1
        batch, heads, rows, _ = call.query.shape
        sizes = Sizes(call.query.device, call.query.dtype, batch, heads, rows, keys)
        check_options(Arguments(call.query, call.key, call.value, **{name: x}), sizes)
    return call._replace(**{name: add_head_dim(x) for name, x in pairs.items()}), {}


def agreed(function: str, given: dict[str, Any], prepare: Prepare = prepared) -> GlobalCall | None:
    """Return the GlobalCall of a rank's arguments; None without a process group.

    Args:
        given: the arguments of the public function, by name.

    Raises:
        TypeError, ValueError, NotImplementedError: on all ranks, if one is wrong or two differ.
    """
    ranks, balance, backend = ranks_of.of(given["group"]), given.get("balance"), given["backend"]
    if ranks is None:
        check_balance(balance)
        return None
    arguments = Arguments(**{name: given[name] for name in Arguments._fields if name in given})
    flags = {name: given.get(name, False) for name in ("return_lse", "return_weights")}
    problem, call = None, None
    options: dict[str, Any] = {}
    own: dict[str, Any] = dict(rows=0, keys=0)
    try:
        _check_transforms(arguments)
        check_balance(balance)
        backends.check_name(backend)
        check_flags(**flags)
        call, more = prepare(arguments, backend, ranks)
        named = backends.named(backend)
        if named is not None:  # only a named backend may raise
            _backend(call, set(), flags["return_weights"], named)
        options = _common(call, arguments) | more | dict(balance=balance, **flags, backend=named)
        own = _own(call)
    except (TypeError, ValueError, NotImplementedError) as error:
        problem = error
    table = ranks_of.agree(ranks, function, options, own, problem)
    assert call is not None
    rows, keys = (
        chunks_of(name, [entry[lengths] for entry in table], ranks.size, balance)
        for name, lengths in (("query", "rows"), ("key", "keys"))
    )
    total_rows, total_keys = (sum(map(rows_of, chunks)) for chunks in (rows, keys))
    for name in ("mask", "bias"):
        for rank, entry in enumerate(table):
            if entry.get(name) not in (None, 1, total_keys):
                got = f"{entry[name]} on rank {rank}"
                fail(ValueError, name, f"a last dimension of 1 or {total_keys}, the number of all keys", got)
    needs = [entry["needs"] for entry in table]
    chosen = _backend(call, set().union(*needs), flags["return_weights"], backends.named(backend))
    shift = 0 if call.top_left else total_keys - total_rows
    call = call._replace(seed=_common_seed(ranks, call, arguments, table), top_left=True)
    return GlobalCall(chosen, ranks, call, rows, keys, shift, needs)


def _check_transforms(arguments: Arguments) -> None:
    dtensors.refuse("fusedattn.distributed", arguments._asdict())
    if transforms_active():
        raise NotImplementedError("fusedattn.distributed: torch.func cannot transform communication between ranks")
    if forward_level() >= 0:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise NotImplementedError("fusedattn.distributed: it does not support forward mode, use backward()")


def _own(call: Call) -> dict[str, Any]:
    """Return the facts that may differ from rank to rank."""
    own: dict[str, Any] = dict(rows=call.query.shape[2], keys=call.key.shape[2], needs=[])
    if torch.is_grad_enabled():
        tensors = {name: getattr(call, name) for name in INPUTS}
        own["needs"] = [name for name, x in tensors.items() if x is not None and x.requires_grad]
    if call.seed is not None and call.seed.device.type == "cpu":
        own["seed"] = int(call.seed)
    if call.cu_seqlens_q is None:
        own |= {name: x.shape[3] for name, x in (("mask", call.mask), ("bias", call.bias)) if x is not None}
    return own


def _common(call: Call, arguments: Arguments) -> dict[str, Any]:
    """Return the options that must be equal on all ranks."""
    tensors = {name: getattr(call, name) for name in _COMMON_DIMS}
    common: dict[str, Any] = {
        name: None if x is None else (x.device.type, x.dtype, *(x.shape[dim] for dim in _COMMON_DIMS[name]))
        for name, x in tensors.items()
    }
    seed = arguments.seed if call.dropout_p else None
    if isinstance(seed, Tensor):
        seed = int(seed) if seed.device.type == "cpu" else "a tensor"  # reading it would wait for the GPU
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


def _common_seed(ranks: Ranks, call: Call, arguments: Arguments, table: list[dict[str, Any]]) -> Tensor | None:
    """Return the given seed, or the one that rank 0 drew."""
    if call.seed is None:
        return None
    if arguments.seed is None and call.seed.device.type == "cpu":
        return torch.full_like(call.seed, table[0]["seed"])
    seed = call.seed.clone()  # the caller may change its tensor before the backward
    if arguments.seed is None:
        dist.broadcast(seed, group_src=0, group=ranks.group)
    return seed


def _backend(call: Call, needs: set[str], need_weights: bool, named: str | None) -> str:
    """Return the backend for the parts of a call. needs: the inputs whose gradient a rank requires."""
    call = call._replace(partial=True, sinks=None)
    if needs:
        tensors = {name: getattr(call, name) for name in INPUTS}
        leaves = {name: x.detach().requires_grad_(name in needs) for name, x in tensors.items() if x is not None}
        call = call._replace(**leaves)
    if call.query.device.type == "cpu" and named not in partial.KERNELS:
        call = partial.widened(call)
    return backends.choose(call, need_weights, named).name


def gradients_of(call: Call, grads: dict[str, Tensor | None]) -> list[Tensor | None]:
    """Return a gradient for each of TENSORS, in its dtype; None for one without."""
    pairs = ((getattr(call, name), grads.get(name)) for name in TENSORS)
    return [None if x is None or grad is None else grad.to(x.dtype) for x, grad in pairs]
