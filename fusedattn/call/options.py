"""Arguments of a call as the caller wrote them, and the checked Call that every backend takes."""

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import bits
from .private import exported_as, forward_level, has_storage, unmapped


class Arguments(NamedTuple):
    """Unchecked arguments of `attention`."""

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


def non_default(arguments: Any) -> dict[str, Any]:
    """Return the fields of a NamedTuple that do not hold their default."""
    defaults = arguments._field_defaults.items()
    return {name: x for name, default in defaults if (x := getattr(arguments, name)) is not default}


@exported_as("fusedattn.Plan")
class Plan(NamedTuple):
    """Masks that `fusedattn.plan` prepared once, to pass as mask= to many calls.

    block_mask (1 or B, 1 or Hq, blocks of queries, blocks of keys), int16 or int32, has an entry for each 64 x 64
    pairs: 0 if no pair is visible, 1 if all are, 2 if only key_mask hides some, or from 3 on an index of mask_bits.
    mask_bits (n, 64), int64, has a bit for each pair of a partly visible block. Equal blocks are kept once, but not
    under torch.compile or transforms. mask_bits is None without a mask of pairs. key_mask and query_mask are the
    caller's tensors, which must not change. shape is (B, Hq, Sq, Sk) of the calls, or 1 where the masks broadcast.
    """

    block_mask: Tensor | None
    mask_bits: Tensor | None
    key_mask: Tensor | None
    query_mask: Tensor | None
    shape: tuple[int, ...]

    def to(self, device: torch.device | str) -> "Plan":
        """Return the plan with its tensors on a device."""
        moved: dict[str, Any] = {name: x.to(device) for name, x in self._asdict().items() if isinstance(x, Tensor)}
        return self._replace(**moved)

    @property
    def nbytes(self) -> int:
        """Bytes of the plan's tensors."""
        return sum(x.nbytes for x in self[:4] if x is not None)

    @property
    def density(self) -> float:
        """Share of the pairs that all masks of the plan show, with a GPU sync."""
        return bits.density(*self)

    def __str__(self) -> str:
        return f"Plan of {tuple(self.shape)}, {self.density:.2%} visible, {self.nbytes / 2**20:.2f} MiB"


class Lengths(NamedTuple):
    """Layout of packed sequences: offsets, total rows and keys, maximum lengths. Without them the offsets are None."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    rows: int
    keys: int
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class Origin(NamedTuple):
    """Position of a call's rows, keys and heads in a larger call that is split over processes.

    causal, window and alibi_slopes align row i with key i + `diagonal(call)`, which includes shift. Dropout counts row
    i as row + i, key j as key + j, and head h of batch b as plane + b * heads + h. The larger call has `heads` heads.
    """

    shift: int = 0
    row: int = 0
    key: int = 0
    plane: int = 0
    heads: int = 0


class Dims(NamedTuple):
    """Dimensions of a Call's tensor, a letter each: B batch, H query heads, G key heads, Q rows, K keys, D columns.

    q and k count blocks of rows and keys. Options broadcast along a batch of 1. mask, bias and block_mask broadcast
    along each dimension of 1. differentiable: it may have gradients.
    """

    letters: str
    differentiable: bool = False


NOT_CACHED = "not of a call to a cache"  # marks fields that the operators of `attention_decode` lack


class Call(NamedTuple):
    """Checked arguments of a call, as backends and operators take them.

    Each option is declared here, once: its name, type, default, and for a tensor its Dims. Operator schemas, saved
    tensors, slices by batch and head, and the limits of a backend are derived from these declarations.

    seed is one int64 if dropout_p is not 0, otherwise None. block_mask (1 or B, 1 or Hq, blocks of queries, blocks of
    keys) is int16 or int32; kernels/vocabulary/masks.py explains its entries. mask_bits has the bits of its blocks.
    Both come from a Plan (mask is then None), or from the masks of the call. Row i sees the keys diagonal + i - left to
    diagonal + i + right; None is unbounded. diagonal is 0 if top_left, otherwise Sk - Sq; an origin's shift is added.

    With cu_seqlens_q and cu_seqlens_k, int32 (n + 1,), the call holds n packed sequences and B is 1. Sequence b has
    rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1, and keys likewise. Kernels clamp offsets to the tensors. Rows and
    keys count from the start of their sequence; bias and mask broadcast to (n, Hq, max_seqlen_q, max_seqlen_k).
    max_seqlen is None in a call that does not need it.

    deterministic: gradients have the same bits in each run, whatever torch's own setting. named: the caller named the
    backend, so no other may take the call. origin: the fields of an Origin, or None. partial: the rows also see keys
    outside of the call. Output and gradients of query, key and value are then float32 (float64 for float64). The
    backward may get statistics of the softmax over all keys.
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
    seed: Annotated[Tensor | None, Dims(""), NOT_CACHED] = None
    block_mask: Annotated[Tensor | None, Dims("BHqk"), NOT_CACHED] = None
    mask_bits: Annotated[Tensor | None, Dims(""), NOT_CACHED] = None
    cu_seqlens_q: Annotated[Tensor | None, Dims(""), NOT_CACHED] = None
    cu_seqlens_k: Annotated[Tensor | None, Dims(""), NOT_CACHED] = None
    left: int | None = None
    right: int | None = None
    top_left: bool = False
    scale: float = 1.0
    softcap: float | None = None
    dropout_p: Annotated[float, NOT_CACHED] = 0.0
    max_seqlen_q: Annotated[int | None, NOT_CACHED] = None
    max_seqlen_k: Annotated[int | None, NOT_CACHED] = None
    deterministic: Annotated[bool, NOT_CACHED] = False
    named: bool = False
    origin: Annotated[Sequence[int] | None, NOT_CACHED] = None
    partial: Annotated[bool, NOT_CACHED] = False


TYPES: dict[str, Any] = get_type_hints(Call)
_NOTES = {name: getattr(x, "__metadata__", ()) for name, x in get_type_hints(Call, include_extras=True).items()}
_DIMS = {name: note for name, notes in _NOTES.items() for note in notes if isinstance(note, Dims)}
TENSORS = tuple(_DIMS)
INPUTS = tuple(name for name, dims in _DIMS.items() if dims.differentiable)
ATTENDED = "query", "key", "value"
DIMS = {name: dims.letters for name, dims in _DIMS.items()}
# {letter of Dims: names of a Call's tensors with that dimension}
WITH_DIM = {letter: [name for name, letters in DIMS.items() if letter in letters] for letter in "BHGQKD"}
BY_HEAD = tuple(name for name in INPUTS if DIMS[name] == "BH")
CACHED = tuple(name for name, notes in _NOTES.items() if NOT_CACHED not in notes)


def inputs(call: Call) -> list[Tensor | None]:
    return [getattr(call, name) for name in INPUTS]


def tensors(call: Call) -> list[Tensor | None]:
    return [getattr(call, name) for name in TENSORS]


def with_tensors(call: Call, tensors: Sequence[Tensor | None]) -> Call:
    fields: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
    return call._replace(**fields)


def in_full(name: str, x: Any) -> Any:
    """Return an option's tensor in full rank: omitted dimensions become dimensions of size 1. None stays None."""
    rank = len(DIMS[name])
    if x is None or not rank or x.dim() == rank:
        return x
    if x.dim() == 3:  # (B, Sq, Sk), the same for all heads
        return x.unsqueeze(1)
    return x[None] if rank == 2 else x[None, None]


def sliced(name: str, x: Any, pairs: Mapping[str, slice] | None = None, **slices: slice) -> Any:
    """Slice tensor x of a Call, as in B=slice(2, 4), unless it broadcasts. pairs: slices that mask and bias use."""
    letters = DIMS[name]
    if letters == "BHQK" and pairs is not None:
        slices |= pairs
    for axis, letter in enumerate(letters if x is not None else ""):
        # Rows and keys broadcast only in mask and bias; elsewhere a size of 1 is a single row or key.
        if letter in slices and (x.shape[axis] != 1 or (letter in "QK" and letters != "BHQK")):
            x = x[(slice(None),) * axis + (slices[letter],)]
    return x


# Functions, not properties: the compiler of torch 2.10 does not trace properties of a NamedTuple.
def lengths_of(call: Call) -> Lengths:
    totals = call.query.shape[2], call.key.shape[2]
    return Lengths(call.cu_seqlens_q, call.cu_seqlens_k, *totals, call.max_seqlen_q, call.max_seqlen_k)


def sizes(call: Call) -> tuple[int, int, int, int]:
    """Return (B, Hq, Sq, Sk). If packed: B sequences, with maximum lengths Sq and Sk (total lengths if unknown)."""
    (batch, heads, rows, _), keys = call.query.shape, call.key.shape[2]
    if call.cu_seqlens_q is not None:
        batch = call.cu_seqlens_q.shape[0] - 1
        rows = rows if call.max_seqlen_q is None else call.max_seqlen_q
        keys = keys if call.max_seqlen_k is None else call.max_seqlen_k
    return batch, heads, rows, keys


def hiding(call: Call) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return the mask, key_mask, query_mask and bias from which the block mask of a call is computed."""
    # For packed sequences query_mask, which kernels apply in any case, is left out: with it, each sequence would have a
    # block mask as large as that of the longest.
    return call.mask, call.key_mask, call.query_mask if call.cu_seqlens_q is None else None, call.bias


def diagonal(call: Call) -> int:
    """Return the position of the key that causal and window align with row 0."""
    return (0 if call.top_left else call.key.shape[2] - call.query.shape[2]) + shift(call)


def origin_of(call: Call) -> Origin:
    return Origin(heads=call.query.shape[1]) if call.origin is None else Origin(*call.origin)


def shift(call: Call) -> int:
    return 0 if call.origin is None else call.origin[0]


# Returns the dtype in which a call accumulates, from that of query: float32, or float64 for float64 inputs.
wide_dtype = functools.partial(torch.promote_types, torch.float32)


class AssumedGPU(NamedTuple):
    """GPU that `explain` assumes in place of this machine's device. capability: 90 for (9, 0)."""

    capability: int
    type: str = "cuda"


Device = torch.device | AssumedGPU


class _ThreadOverrides(threading.local):
    """Settings of this thread: deterministic gradients, the backend, the GPU that `explain` assumes."""

    gpu: AssumedGPU | None

    def __init__(self) -> None:  # not class attributes: the compiler of torch 2.10 would read those instead
        self.deterministic, self.backend, self.gpu = False, None, None
        self.before: list[tuple[override, dict[str, Any]]] = []


thread_overrides = _ThreadOverrides()


class override:
    """Set attributes of `thread_overrides` for calls made by this thread inside the `with`. It can be used again."""

    def __init__(self, **wanted: Any) -> None:
        self.wanted = wanted

    def __enter__(self) -> None:
        thread_overrides.before.append((self, {name: getattr(thread_overrides, name) for name in self.wanted}))
        for name, value in self.wanted.items():
            setattr(thread_overrides, name, value)

    def __exit__(self, *error: object) -> None:
        # Generators and asyncio tasks end in any order, and generators even in another thread.
        before = thread_overrides.before
        own = [n for n, (other, _) in enumerate(before) if other is self]
        for name, value in (before.pop(own[-1])[1] if own else {}).items():
            later = [values for _, values in before[own[-1] :] if name in values]
            if later:
                later[0][name] = value  # is still open, and goes back to this value
            else:
                setattr(thread_overrides, name, value)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        wanted = self.wanted

        @functools.wraps(function)
        def inside(*args: Any, **options: Any) -> Any:
            with override(**wanted):  # torch.compile takes none that was made elsewhere
                return function(*args, **options)

        return inside


def is_known(x: Tensor) -> bool:
    """Return whether a tensor's values can be read now: it is on a CPU, and not compiled, vmapped or wrapped."""
    return type(x) is Tensor and x.device.type == "cpu" and not is_compiling() and has_storage(x)


def differentiated(arguments: Iterable[Any]) -> bool:
    """Return whether autograd or forward mode tracks one of the arguments."""
    recorded, dual = torch.is_grad_enabled(), not is_compiling() and forward_level() >= 0
    if not (recorded or dual):
        return False
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    if recorded and any(x.requires_grad for x in tensors):
        return True
    return dual and any(forward_ad.unpack_dual(unmapped(x)).tangent is not None for x in tensors)


def seed_tensor(seed: Any, device: torch.device) -> Tensor:
    """Return the seed as int64 (1,); None draws one from torch's generator, without a host sync."""
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    return seed.reshape(1) if isinstance(seed, Tensor) else torch.full((1,), seed, dtype=torch.int64, device=device)
