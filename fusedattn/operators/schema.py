"""Signatures of the operators, the tensors that they save, and functions that run them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..call.checks import fail, plain
from ..call.layout import dense
from ..call.options import ATTENDED, CACHED, INPUTS, TYPES, Call, wide_dtype
from ..call.private import below_autograd, forward_level, transforms_active
from ..cpu import run as cpu
from ..launch.failures import KernelUnavailable, fall_back
from ..launch.tile_table import FEW_ROWS, ONE_PASS
from . import flops

RESULTS = "out", "lse", "weights"  # results with derivatives
KERNELS = "hopper", "triton"  # backends that launch kernels
_TYPES: dict[Any, str] = {Tensor: "Tensor", Tensor | None: "Tensor?", bool: "bool", int | None: "SymInt?"}
_TYPES |= {float: "float", float | None: "float?", Sequence[int] | None: "SymInt[]?"}


class Signature:
    """Arguments of an operator: its own in `before`, then fields of a Call, then its own in `after`."""

    def __init__(self, before: str, after: str, fields: Sequence[str] = Call._fields):
        declared = ", ".join(f"{_TYPES[TYPES[name]]} {name}" for name in fields)
        self.fields = fields
        self.schema = ", ".join(filter(None, (before, declared, after)))  # in the syntax of torch.library
        self.names = tuple(one.split()[1] for one in self.schema.split(", "))
        self.first, self.last = before.count(",") + bool(before), -(after.count(",") + 1)

    def parts(self, arguments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        return arguments[: self.first], arguments[self.first : self.last], arguments[self.last :]

    def split(self, arguments: Sequence[Any]) -> tuple[Sequence[Any], Call, Sequence[Any]]:
        """Return (arguments before, the Call, arguments after)."""
        before, fields, after = self.parts(arguments)
        return before, Call(*fields), after

    def named(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return {name: value} as a tuple in the order of the operator's arguments, with None for missing names."""
        return tuple([values.get(name) for name in self.names])

    def of_inputs(self, values: Sequence[Any], prefix: str = "") -> list[Any]:
        """Return the values of INPUTS from those of all arguments; with prefix="tangent_", tangent_query and so on."""
        return [values[self.names.index(f"{prefix}{name}")] for name in INPUTS]


FORWARD = Signature("", "bool need_lse, bool need_weights, bool save, str backend")
_INCOMING = "Tensor? grad_out, Tensor? grad_lse, Tensor? grad_weights, Tensor out, Tensor weights, Tensor stats"
BACKWARD = Signature(_INCOMING, f"str backend, bool[{len(INPUTS)}] need")
_TANGENTS = ", ".join(f"Tensor? tangent_{name}" for name in INPUTS)
TANGENT = Signature(f"{_TANGENTS}, Tensor out, Tensor stats", "bool need_weights, str backend")
ROTARY = "Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved"
_CACHES = "Tensor query, Tensor key_cache, Tensor value_cache, Tensor cache_seqlens, Tensor? block_table, SymInt added"
_OPTIONS = [name for name in CACHED if name not in ATTENDED]
DECODE = Signature(f"{_CACHES}, {ROTARY}", "bool need_lse, str backend", _OPTIONS)


def save(ctx: Any, arguments: Sequence[Any], *results: Tensor | None) -> None:
    """Save the arguments and some results of a Function for its derivatives."""
    tensors = [x if isinstance(x, Tensor) else None for x in arguments]
    ctx.save_for_backward(*tensors, *results)
    if forward_level() >= 0 or transforms_active():  # they may ask for a tangent
        ctx.save_for_forward(*tensors, *results)
    ctx.others = [None if x is tensor else x for x, tensor in zip(arguments, tensors, strict=True)]
    ctx.facts = facts((*tensors, *results))
    ctx.set_materialize_grads(False)


def saved(ctx: Any) -> tuple[list[Any], list[Tensor | None]]:
    """Return (arguments, results) saved by `save`. Raise if saved-tensor hooks changed a shape or dtype."""
    tensors, others = ctx.saved_tensors, ctx.others
    check_saved(ctx.facts, facts(tensors))
    arguments = [b if a is None else a for a, b in zip(tensors, others, strict=False)]
    return arguments, list(tensors[len(others) :])


def run_operator(operator, implementation, *arguments):
    """Run an operator on checked arguments: directly, or by torch's dispatcher if a mode must see the call."""
    # The dispatcher also materialises negated views and wrappers.
    if plain(arguments):
        return implementation(*arguments)
    flops.offer(operator)
    with below_autograd():
        return operator(*arguments)


def rounded_lengths(call: Call, need_weights: bool) -> Call:
    """Return a call with maximum lengths rounded up, if kernels only choose by them. So fewer calls differ."""
    plain = call.mask is call.block_mask is call.bias is call.key_mask is None and not need_weights
    if not plain or call.cu_seqlens_q is None:
        return call
    # The backward of wide heads on Hopper stores scores of the longest sequence: at most an eighth more of them.
    is_wide = max(call.query.shape[3], call.value.shape[3]) > ONE_PASS

    def rounded(most, total):
        if most is None:
            return None
        step = 1 << max(most - 1, FEW_ROWS - 1).bit_length()
        step = max(FEW_ROWS, step // 16) if is_wide else step
        return min(total, max(1, -(-most // step)) * step)

    rows, keys = rounded(call.max_seqlen_q, call.query.shape[2]), rounded(call.max_seqlen_k, call.key.shape[2])
    return call._replace(max_seqlen_q=rows, max_seqlen_k=keys)


def by_kernel(call: Call, launches: Sequence[Callable[[], None]], naive: Callable[[], None]) -> None:
    """Run the first launch that works here, else the naive path. Warn of a failure; raise if the backend is named."""
    for launch in launches:
        try:
            return launch()
        except KernelUnavailable as why:
            fall_back(why, call.named)
    naive()


def fill(targets: Sequence[Tensor], results: Sequence[Tensor | None]) -> None:
    """Copy results into targets. An empty target means that its result is not needed."""
    for target, x in zip(targets, results, strict=False):
        if x is not None and target.numel():
            target.copy_(x)


def new_results(call: Call, need_lse: bool, need_weights: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialised (output, lse, weights) of a call, or tangents. lse and weights are empty unless needed."""
    query, rows, wide = call.query, call.query.shape[:3], wide_dtype(call.query.dtype)
    out = dense(query, (*rows, call.value.shape[3]), wide if call.partial else None)
    columns: Any = call.key.shape[2] if call.cu_seqlens_q is None else call.max_seqlen_k
    weights = query.new_empty((*rows, columns) if need_weights else (0,))
    return out, query.new_empty(rows if need_lse else (0,), dtype=wide), weights


def stats_columns(dtype: torch.dtype, width: int, backend: str = "triton") -> int:
    """Return how many numbers a forward saves for each row, besides its output of `width` columns."""
    # Kernels save two numbers of the softmax and, for an output of 16 bits, its rounding error, one byte per element.
    if backend == "cpu":
        return cpu.stats_columns(dtype, width)
    if backend == "naive":
        return 0
    return 2 + (-(-width // 4) if dtype.itemsize == 2 else 0)


def facts(tensors) -> list:
    return [None if x is None else (x.shape, x.dtype) for x in tensors]


def check_saved(before: list, after: list) -> None:
    """Raise if saved tensors came back from hooks with another shape or dtype."""
    for saved, returned in zip(before, after, strict=True):
        if saved != returned:
            expected = f"a tensor of {saved[1]} and shape {tuple(saved[0])} back, as it was saved"
            fail(ValueError, "saved_tensors_hooks", expected, f"{returned[1]} and shape {tuple(returned[0])}")
