"""A call split among ranks: each has some rows and some keys. All agree on the options before keys are sent."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..api import attention
from ..call import options as of_calls
from ..call.checks import check_flags, check_rank, fail, irregular
from ..call.options import DIMS, INPUTS, TENSORS, Arguments, Call, Origin, Plan, in_full
from ..call.rules import Sizes, check_options, checked
from ..dispatch import backends, replay
from ..naive import pairs
from ..operators import partial, schema
from . import ranks as ranks_of
from .ranks import Ranks
from .shards import Chunk, check_balance, chunks_of, rows_of


class Piece(NamedTuple):
    """Attention of some rows of this rank to some of the keys that it has received."""

    rows: slice
    keys: slice
    fields: dict[str, Any]  # the fields of its Call that depend on positions
    batch: slice = slice(None)  # batches of masks, biases and slopes: documents if packed
    pair_rows: slice | None = None  # rows of masks and biases, if they differ from `rows`
    pair_keys: slice | None = None  # keys of masks and biases, if they differ from `keys`


class GlobalCall(NamedTuple):
    """An attention call whose rows and keys are split among all ranks."""

    backend: str
    ranks: Ranks
    call: Call  # this rank's rows and keys, and options that are the same on all ranks
    rows: list[list[Chunk]]  # the Chunks of rows of each rank
    keys: list[list[Chunk]]  # the Chunks of keys of each rank
    shift: int  # the diagonal of row i is at key i + shift, both counted in the whole sequence
    table: list[dict[str, Any]]  # for each rank, the names of inputs that require a gradient, and its sizes of masks
    need_lse: bool
    need_weights: bool

    def wanted(self, rank: int | None = None) -> set[str]:
        """Return the names of the inputs that require a gradient on `rank`, or on any rank if it is None."""
        return set().union(*(entry["needs"] for entry in (self.table if rank is None else [self.table[rank]])))

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> "GlobalCall":
        """Return a copy whose call has these tensors, in the order of TENSORS."""
        return self._replace(call=of_calls.with_tensors(self.call, tensors))

    @property
    def query(self) -> Tensor:
        return self.call.query

    @property
    def total_keys(self) -> int:
        return sum(map(rows_of, self.keys))

    def seen(self, row: Chunk, key: Chunk) -> Chunk:
        """Return the part of the Chunk `key` from the first to the last key that any row of the Chunk `row` sees."""
        left, right = self.call.left, self.call.right
        first = key.first if left is None else max(key.first, row.first + self.shift - left)
        last = key.last if right is None else min(key.last, row.last + self.shift + right)
        return Chunk(first, max(first, last) if row.length else first, key.at + first - key.first)

    def sees_all(self, row: Chunk, key: Chunk) -> bool:
        left, right = self.call.left, self.call.right
        seen_from = left is None or key.first >= row.last - 1 + self.shift - left
        return seen_from and (right is None or key.last <= row.first + self.shift + right + 1)

    def rank_sees(self, rank: int, owner: int) -> bool:
        return any(self.seen(row, key).length for row in self.rows[rank] for key in self.keys[owner])

    def pieces(self, keys: list[Chunk]) -> list[Piece]:
        """Split attention of this rank's rows to Chunks of keys into as few Pieces as possible."""
        rows = [row for row in self.rows[self.ranks.rank] if row.length]
        keys = [key for key in keys if key.length]
        # Join Chunks if every row sees every key, without ALiBi and dropout, which depend on positions.
        joinable, unbounded = self.call.seed is self.call.alibi_slopes is None, dict(left=None, right=None)
        pieces = []
        for key in list(keys) if joinable and len(rows) > 1 else ():
            if all(self.sees_all(row, key) for row in rows):
                pieces.append(Piece(_joined(rows), key.in_shard, unbounded))
                keys.remove(key)
        for row in rows:
            seen = [self.seen(row, key) for key in keys if self.seen(row, key).length]
            if joinable and len(seen) > 1 and all(self.sees_all(row, key) for key in seen):
                pieces.append(Piece(row.in_shard, _joined(seen), unbounded))
                continue
            for key in seen:
                origin = Origin(self.shift + row.first - key.first, row.first, key.first, 0, self.query.shape[1])
                sides = unbounded if self.sees_all(row, key) else {}
                pieces.append(Piece(row.in_shard, key.in_shard, sides | dict(origin=list(origin))))
        return pieces


def _joined(chunks: list[Chunk]) -> slice:
    return slice(chunks[0].in_shard.start, chunks[-1].in_shard.stop)


class Method(NamedTuple):
    """Forward and backward of a distributed method: they compute this rank's results and gradients of a GlobalCall."""

    # Returns ([output, lse or None, weights or None], a GlobalCall to save, further tensors and numbers to save).
    forward: Callable[[GlobalCall], tuple[list[Tensor | None], GlobalCall, Sequence[Any]]]
    # Takes the saved GlobalCall, what was saved with it, and the gradients of the results. Returns {input: gradient}.
    backward: Callable[[GlobalCall, Sequence[Any], Sequence[Any]], dict[str, Tensor | None]]


def prepared(
    arguments: Arguments, backend: Any, separate: Sequence[str] = ("mask", "bias"), sizes: Sizes | None = None
) -> Call:
    """Check this rank's arguments, and return them as a Call. separate: options to check with `sizes`."""
    query = arguments.query
    if isinstance(query, Tensor):
        check_rank("query", query, "(B, H, rows, D)")
    call = checked(arguments._replace(**dict.fromkeys(separate)), named=backends.named(backend) is not None)
    options: dict[str, Any] = {name: getattr(arguments, name) for name in separate}
    for name, x in options.items():
        if isinstance(x, Plan):
            fail(TypeError, name, "a tensor", "a plan, which one process cannot make for all: pass a bool tensor")
        # The number of keys on all ranks is not known yet.
        keys = x.shape[-1] if isinstance(x, Tensor) and irregular(x) is None and x.dim() else 1
        batch, heads, rows, _ = call.query.shape
        its_sizes = sizes or Sizes(call.query.device, call.query.dtype, batch, heads, rows, keys)
        check_options(Arguments(call.query, call.key, call.value, **{name: x}), its_sizes)
    return call._replace(**{name: in_full(name, x) for name, x in options.items()})


def attend(function: Callable[..., Any], given: dict[str, Any], method: Method) -> Any:
    """Run a distributed function by its Method; without a process group, run `attention`."""
    if (whole := agreed(function.__name__, given)) is None:
        return attention(**{name: x for name, x in given.items() if name not in ("group", "balance")})
    return replay.results(4, *attend_globally(whole, method))


def attend_globally(whole: GlobalCall, method: Method) -> Sequence[Tensor | None]:
    """Run a GlobalCall by a Method: return [output, lse or None, weights or None] of this rank's rows."""
    if not whole.wanted():
        return method.forward(whole)[0]
    tensors = of_calls.tensors(whole.call)
    return _Attend.apply(whole.with_tensors([None] * len(tensors)), method, ranks_of.anchor(whole.query), *tensors)


class _Attend(torch.autograd.Function):
    """Autograd node of a GlobalCall. All ranks take part in the transfers of the backward, if only with zeros."""

    @staticmethod
    def forward(ctx, whole, method, _, *tensors):
        results, kept, more = method.forward(whole.with_tensors(tensors))
        schema.save(ctx, (*of_calls.tensors(kept.call), *more))
        ctx.whole, ctx.method = whole, method
        ctx.set_materialize_grads(True)
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *incoming):
        ranks_of.refuse_batched(*incoming)
        kept, _ = schema.saved(ctx)  # read once: a checkpoint recomputes the tensors for each access
        grads = ctx.method.backward(ctx.whole.with_tensors(kept[: len(TENSORS)]), kept[len(TENSORS) :], incoming)
        return None, None, None, *[grads.get(name) for name in TENSORS]


def agreed(
    function: str, given: dict[str, Any], prepare: Callable[[Arguments, Any], Call] = prepared
) -> GlobalCall | None:
    """Agree with all ranks on a call {name: argument}, and return the GlobalCall; None without a process group."""
    # All ranks raise if an argument is wrong on one rank, or differs between ranks.
    ranks, balance, backend = ranks_of.of(given["group"]), given.get("balance"), given["backend"]
    if ranks is None:
        check_balance(balance)
        return None
    arguments = Arguments(**{name: given[name] for name in Arguments._fields if name in given})
    flags = {name: given.get(name, False) for name in ("return_lse", "return_weights")}

    def facts() -> tuple[Call, dict[str, Any], dict[str, Any]]:
        check_balance(balance)
        backends.check_name(backend)
        check_flags(**flags)
        call = prepare(arguments, backend)
        if (named := backends.named(backend)) is not None:  # all ranks raise if the caller's backend cannot run
            _backend(call, set(), flags["return_weights"], named)
        return call, _common(call, arguments) | dict(balance=balance, **flags, backend=named), _own(call)

    call, table = ranks_of.agree(ranks, function, arguments._asdict(), facts)
    rows, keys = (chunks_of(name, [entry[name] for entry in table], ranks.size, balance) for name in ("query", "key"))
    total_rows, total_keys = (sum(map(rows_of, chunks)) for chunks in (rows, keys))
    for name in ("mask", "bias"):
        for rank, entry in enumerate(table):
            if name in entry and entry[name][1] not in (1, total_keys):
                fail(ValueError, name, f"a last dimension of 1 or {total_keys}", f"{entry[name][1]} on rank {rank}")
    needs = set().union(*(entry["needs"] for entry in table))
    chosen = _backend(call, needs, flags["return_weights"], backends.named(backend))
    shift = 0 if call.top_left else total_keys - total_rows
    call = call._replace(top_left=True)
    if call.seed is not None:
        seed = call.seed.clone()  # the caller may change its tensor before the backward
        if arguments.seed is None and seed.device.type == "cpu":
            seed.fill_(table[0]["seed"])
        elif arguments.seed is None:
            dist.broadcast(seed, group_src=0, group=ranks.group)
        call = call._replace(seed=seed)
    return GlobalCall(chosen, ranks, call, rows, keys, shift, table, *flags.values())


def _own(call: Call) -> dict[str, Any]:
    """Return properties that may differ between ranks: lengths, a seed drawn here, inputs that require a gradient."""
    tensors = {name: getattr(call, name) for name in INPUTS if torch.is_grad_enabled()}
    needs = [name for name, x in tensors.items() if x is not None and x.requires_grad]
    own: dict[str, Any] = dict(query=call.query.shape[2], key=call.key.shape[2], needs=needs)
    if call.seed is not None and call.seed.device.type == "cpu":
        own["seed"] = int(call.seed)
    if call.cu_seqlens_q is None:
        own |= {name: x.shape[2:] for name, x in (("mask", call.mask), ("bias", call.bias)) if x is not None}
    return own


def _common(call: Call, arguments: Arguments) -> dict[str, Any]:
    """Return the options that must be equal on all ranks; for tensors, their devices, dtypes and sizes."""
    common: dict[str, Any] = {}
    for name in of_calls.WITH_DIM["B"]:
        common[name] = x = getattr(call, name)
        if x is not None:
            sizes = [size for letter, size in zip(DIMS[name], x.shape, strict=True) if letter not in "QK"]
            common[name] = x.device.type, x.dtype, sizes
    seed = arguments.seed if call.dropout_p else None
    if isinstance(seed, Tensor):
        seed = int(seed) if seed.device.type == "cpu" else "a tensor"  # reading it would wait for the GPU
    common |= dict(causal=arguments.causal, window=(call.left, call.right), scale=call.scale, softcap=call.softcap)
    common |= dict(dropout_p=call.dropout_p, seed=seed, grad_mode=torch.is_grad_enabled())
    offsets = None if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    return common | dict(align="top_left" if call.top_left else "bottom_right", cu_seqlens=offsets)


def _backend(call: Call, needs: set[str], need_weights: bool, named: str | None) -> str:
    """Return the backend's name for the partial calls of a rank. needs: inputs that require a gradient on any rank."""
    call = call._replace(partial=True, sinks=None)
    if needs:
        tensors = {name: getattr(call, name) for name in INPUTS}
        leaves = {name: x.detach().requires_grad_(name in needs) for name, x in tensors.items() if x is not None}
        call = call._replace(**leaves)
    if call.query.device.type == "cpu" and named not in partial.KERNELS:
        call = pairs.prepared(call)
    return backends.choose(call, need_weights, named).name
