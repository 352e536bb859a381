"""The two forms of a call: Arguments, as the caller wrote it, and Call, checked, as every backend takes it."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from .numbers import as_python
from .private import dispatch_modes, forward_level, has_storage, tracing, transforms_active, unmapped

UNBOUNDED = 2**31  # a side of the window that no tensor is long enough for; larger ones would overflow


class Arguments(NamedTuple):
    """Arguments of a call as the caller wrote them, unchecked."""

    query: Any
    key: Any
    value: Any
    mask: Any = None
    bias: Any = None
    key_mask: Any = None
    query_mask: Any = None
    causal: Any = False
    window: Any = None
    align: Any = "bottom_right"
    scale: Any = None
    softcap: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    dropout_p: Any = 0.0
    seed: Any = None


class Plan(NamedTuple):
    """Masks, and which blocks of pairs they leave: what `fusedattn.plan` makes, to be passed as mask= again and again.

    mask, key_mask and query_mask are what it was made of: while a plan is in use they must not change. block_mask has
    a byte for 64 x 64 pairs each, (1 or B, 1 or Hq, blocks of queries, blocks of keys): 0 where none is seen, 3 where
    all are; None where no kernel could read them.
    """

    mask: Tensor | None
    key_mask: Tensor | None
    query_mask: Tensor | None
    block_mask: Tensor | None


class Lengths(NamedTuple):
    """Layout of packed sequences, as a Call has it: offsets, rows and keys in all, maximum lengths."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    rows: int
    keys: int
    max_seqlen_q: int | None
    max_seqlen_k: int | None


WHOLE = Lengths(None, None, 0, 0, None, None)  # of what is not packed


class Origin(NamedTuple):
    """Where a call lies in a larger one, of which it has some rows, keys and heads.

    Row i is level with key diagonal + shift + i, in causal, window and alibi_slopes. Dropout counts row i as row + i,
    key j as key + j, and head h of batch b as plane + b * heads + h.
    """

    shift: int = 0
    row: int = 0
    key: int = 0
    plane: int = 0
    heads: int = 0


class Dims(NamedTuple):
    """Dimensions of a tensor of a Call, one letter each, and whether it may have a gradient.

    B batches, H query heads, G key heads, Q rows, K keys, D columns. All tensors but query, key and value may have a
    size of 1 instead, which is broadcast.
    """

    letters: str
    differentiable: bool = False


class Call(NamedTuple):
    """A checked call, in the one form that backends and operators take: the table of all options.

    An option is declared here, once: its name, its type, its default, and for a tensor its Dims. The schemas of
    operators, what they save, how a call is cut, and what a backend lacks follow from that.

    seed is a tensor of one int64 where dropout_p is not 0, otherwise None. block_mask is that of a Plan. Row i sees
    keys diagonal + i - left .. diagonal + i + right; None is unbounded; diagonal is 0 if top_left, otherwise Sk - Sq.

    With cu_seqlens, int32 (n + 1,), it is n calls at once: B is 1, and sequence b has rows cu_seqlens_q[b] up to
    cu_seqlens_q[b + 1] of query and query_mask, and such keys. Nobody has checked that they lie inside. bias and mask
    broadcast to (n, Hq, max_seqlen_q, max_seqlen_k). They count from the start of each sequence, as rows and keys do in
    all that is said above. max_seqlen is None where nobody needs it.

    deterministic: gradients have the same bits each time, also where torch is not told to want that of all. named: the
    caller named the backend, and no other may take it.

    origin: the fields of an Origin, or None of a call that is all there is. partial: its keys are some of those that
    its rows see. Then the output, and the gradients of query, key and value, are float32 (float64) and not rounded, and
    the stats that a backward takes may be those of all keys.
    """

    query: Annotated[Tensor, Dims("BHQD", True)]
    key: Annotated[Tensor, Dims("BGKD", True)]
    value: Annotated[Tensor, Dims("BGKD", True)]
    bias: Annotated[Tensor | None, Dims("BHQK", True)] = None
    alibi_slopes: Annotated[Tensor | None, Dims("BH", True)] = None
    sinks: Annotated[Tensor | None, Dims("BH", True)] = None
    mask: Annotated[Tensor | None, Dims("BHQK")] = None
    key_mask: Annotated[Tensor | None, Dims("BK")] = None
    query_mask: Annotated[Tensor | None, Dims("BQ")] = None
    seed: Annotated[Tensor | None, Dims("")] = None
    block_mask: Annotated[Tensor | None, Dims("")] = None
    cu_seqlens_q: Annotated[Tensor | None, Dims("")] = None
    cu_seqlens_k: Annotated[Tensor | None, Dims("")] = None
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    scale: float = 1.0
    softcap: float | None = None
    dropout_p: float = 0.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    deterministic: bool = False
    named: bool = False
    origin: Sequence[int] | None = None
    partial: bool = False


TYPES: dict[str, Any] = get_type_hints(Call)
_DIMS = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Call, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
TENSORS = tuple(_DIMS)
INPUTS = tuple(name for name, dims in _DIMS.items() if dims.differentiable)
DIMS = {name: dims.letters for name, dims in _DIMS.items()}
# Tensors that callers may write with fewer dimensions than a Call has.
_SHORT = tuple(name for name, letters in DIMS.items() if letters)


def inputs(call: Call) -> list[Tensor | None]:
    return [getattr(call, name) for name in INPUTS]


def tensors(call: Call) -> list[Tensor | None]:
    return [getattr(call, name) for name in TENSORS]


def with_tensors(call: Call, tensors: Sequence[Tensor | None]) -> Call:
    fields: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
    return call._replace(**fields)


def in_full(name: str, x: Any) -> Any:
    """Return a tensor option as a Call has it, with the dimensions that the caller may leave out."""
    rank = len(DIMS[name])
    return add_head_dim(x) if rank == 4 else add_batch_dim(x) if rank == 2 else x


def with_dims(letters: str) -> list[str]:
    """Return the names of the fields that have all of these dimensions."""
    return [name for name, own in DIMS.items() if set(letters) <= set(own)]


def sliced(name: str, x: Any, **slices: slice) -> Any:
    """Return slices of a field, or of a tensor of its shape, by dimension: B=slice(2, 4). A broadcast one stays."""
    letters = DIMS[name]
    for axis, letter in enumerate(letters if x is not None else ""):
        # Of rows and keys only those of pairs are broadcast; a single key is as good a key as any.
        if letter in slices and (x.shape[axis] != 1 or (letter in "QK" and letters != "BHQK")):
            x = x[(slice(None),) * axis + (slices[letter],)]
    return x


# Functions, not properties: the compiler of torch 2.10 does not trace those of a NamedTuple.
def lengths_of(call: Call) -> Lengths | None:
    if call.cu_seqlens_q is None or call.cu_seqlens_k is None:
        return None
    totals = call.query.shape[2], call.key.shape[2]
    return Lengths(call.cu_seqlens_q, call.cu_seqlens_k, *totals, call.max_seqlen_q, call.max_seqlen_k)


def hiding(call: Call) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """mask, key_mask, query_mask and bias, as a block mask is made from them.

    Of packed sequences without query_mask: with it, the block mask of each sequence would have the square of the
    longest length, and rows that query_mask hides give nothing without it as well.
    """
    return call.mask, call.key_mask, call.query_mask if call.cu_seqlens_q is None else None, call.bias


# Not a property: the compiler of torch 2.10 does not trace those of a NamedTuple.
def diagonal(call: Call) -> int:
    """Return the offset of the diagonal: row i is level with key i + offset."""
    return (0 if call.top_left else call.key.shape[2] - call.query.shape[2]) + shift(call)


def shift(call: Call) -> int:
    """Return what the Origin of a call adds to its diagonal."""
    return 0 if call.origin is None else call.origin[0]


def wide_dtype(call: Call) -> torch.dtype:
    """Return the dtype of sums and of partial results: float32, or float64 for float64."""
    return torch.promote_types(call.query.dtype, torch.float32)


class AssumedGPU(NamedTuple):
    """A GPU that need not be there, by its compute capability, 90 for (9, 0): `explain` says what calls take on it."""

    capability: int
    type: str = "cuda"

    def __str__(self) -> str:
        return f"a GPU of compute capability {self.capability // 10}.{self.capability % 10}"


Device = torch.device | AssumedGPU


class _ThreadOverrides(threading.local):
    """Settings of this thread: deterministic gradients, a named backend, and the GPU that `explain` assumes."""

    gpu: AssumedGPU | None

    def __init__(self) -> None:  # not attributes of the class: those the compiler of torch 2.10 would see
        self.deterministic, self.backend, self.gpu = False, None, None


thread_overrides = _ThreadOverrides()


@contextmanager
def override(**wanted: Any) -> Iterator[None]:
    """Set attributes of `thread_overrides` for calls made by this thread inside the `with`."""
    before = {name: getattr(thread_overrides, name) for name in wanted}
    for name, value in wanted.items():
        setattr(thread_overrides, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thread_overrides, name, value)


def device_of(tensor: Tensor) -> Device:
    """Return the device of a tensor, or the GPU that `explain` assumes."""
    return tensor.device if thread_overrides.gpu is None else thread_overrides.gpu


def must_dispatch() -> bool:
    """Return whether a compiler, a transform or a mode must see the operators of torch."""
    return is_compiling() or dispatch_modes() != 0 or transforms_active() or bool(tracing()) or forward_level() >= 0


_CLASSES = frozenset((Tensor, Parameter))


def in_memory(tensors: Iterable[Any]) -> bool:
    """Return whether all tensors are of torch's own class and lie at their addresses.

    Wrappers of other tensors, negated views and tensors without an address do not. Other arguments are passed over.
    """
    for x in tensors:
        if isinstance(x, Tensor) and (
            type(x) not in _CLASSES
            or x.layout is not torch.strided
            or x.is_nested
            or not has_storage(x)
            or x.is_neg()
            or (x.data_ptr() == 0 and x.numel() != 0)
        ):
            return False
    return True


def plain(arguments: Iterable[Any]) -> bool:
    """Return whether an operator of arguments may be computed without telling torch."""
    return not must_dispatch() and in_memory(arguments)


def check_names(function: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise for the name of an option that a function does not have, as Python would."""
    for name in options:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def is_known(x: Tensor) -> bool:
    """Return whether values can be read without waiting: on a CPU, not compiled, not mapped, no wrapper."""
    return type(x) is Tensor and x.device.type == "cpu" and not is_compiling() and has_storage(x)


def differentiated(arguments: Iterable[Any]) -> bool:
    """Return whether a derivative may be wanted with regard to one of the arguments."""
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    dual = not is_compiling() and forward_level() >= 0
    return dual and any(forward_ad.unpack_dual(unmapped(x)).tangent is not None for x in tensors)


def autocasting(tensor: Tensor) -> bool:
    """Return whether autocast is enabled on the device of a tensor; meta and some others have none."""
    kind = tensor.device.type
    # Both of these know it, and asking costs more than the answer.
    return (kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind)


CAST = (torch.float16, torch.bfloat16, torch.float32)  # what autocast casts


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype that autocast, if enabled, gives a tensor, as in torch's SDPA; float64 stays."""
    cast = tensor.dtype in CAST and autocasting(tensor)
    return torch.get_autocast_dtype(tensor.device.type) if cast else tensor.dtype


def autocast(arguments: Arguments) -> Arguments:
    """Return the arguments with query, key and value in autocast's dtype, if it is enabled."""
    query = arguments.query
    if not isinstance(query, Tensor) or not autocasting(query):
        return arguments
    cast = [x.to(autocast_dtype(x)) if isinstance(x, Tensor) else x for x in (query, arguments.key, arguments.value)]
    return arguments._replace(query=cast[0], key=cast[1], value=cast[2])


def add_head_dim(pairs: Any) -> Any:
    """Return a tensor of rank 2 or 3 with rank 4: heads come after the batch."""
    if pairs is None or pairs.dim() == 4:
        return pairs
    return pairs[None, None] if pairs.dim() == 2 else pairs.unsqueeze(1)


def add_batch_dim(tensor: Any) -> Any:
    """Return (n,) as (1, n), which the batch shares."""
    return tensor[None] if tensor is not None and tensor.dim() == 1 else tensor


def seed_tensor(seed: Any, device: torch.device) -> Tensor:
    """Return one int64 on the device; without a seed it is drawn from torch's generator and never fetched."""
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    return seed.reshape(1) if isinstance(seed, Tensor) else torch.full((1,), seed, dtype=torch.int64, device=device)


def _default_scale(columns: Any) -> float:
    scale = columns**-0.5
    return float(scale) if isinstance(scale, Tensor) else scale  # a tensor while torch.jit traces


def normalise(arguments: Arguments, **more: Any) -> Call:
    """Return the Call of checked arguments; more are fields that do not follow from these."""
    a = arguments
    left, right = (None, None) if a.window is None else map(as_python, a.window)
    fields: dict[str, Any] = {name: in_full(name, x) for name in _SHORT if (x := getattr(a, name)) is not None}
    fields |= dict(
        seed=seed_tensor(a.seed, a.query.device) if a.dropout_p else None,
        left=None if left is None else min(left, UNBOUNDED),
        right=0 if a.causal else None if right is None else min(right, UNBOUNDED),
        # Where nothing is bounded and no distance counts, alignment means nothing: one kernel for both.
        top_left=a.align == "top_left"
        and (left is not None or right is not None or a.causal or a.alibi_slopes is not None),
        scale=_default_scale(a.query.shape[-1]) if a.scale is None else float(a.scale),
        softcap=None if a.softcap is None else float(a.softcap),
        dropout_p=float(a.dropout_p),
        deterministic=thread_overrides.deterministic,
    )
    return Call(**{**fields, **more})


def results(rank: int, *results: Tensor | None) -> Tensor | Any:
    """Return (out, lse, weights) as the caller gets them: in the rank of query, without None."""
    wanted = [x for x in results if x is not None]
    if rank < 4:
        wanted = [x.squeeze(1) if rank == 3 else x.squeeze((0, 1)) for x in wanted]
    return tuple(wanted) if len(wanted) > 1 else wanted[0]


def packed_results(out: Tensor, lse: Tensor | None, weights: Tensor | None) -> Tensor | Any:
    """Return the results of packed sequences: (T, Hq, Dv), (Hq, T) and (Hq, T, longest)."""
    wanted = [out.squeeze(0).transpose(0, 1), *(x.squeeze(0) for x in (lse, weights) if x is not None)]
    return tuple(wanted) if len(wanted) > 1 else wanted[0]
