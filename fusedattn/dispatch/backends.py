"""Chooses the backend of a call, in order of preference, and lists why the others cannot take it."""

import functools
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.decode import Decode
from ..call.options import (
    Arguments,
    AssumedGPU,
    Call,
    Device,
    check_names,
    device_of,
    hiding,
    override,
    thread_overrides,
)
from ..call.private import constant, eager, holds
from ..call.rules import check_flags, checked, fail
from ..cpu import run as cpu
from ..launch import tile_table, tuned
from ..launch.failures import cause, warn_once
from ..naive import formula
from ..operators import attention, decode as cached

OLDEST_TRITON = (3, 6)  # as in pyproject.toml
MOST_POSITIONS = 2**31 - 1024  # kernels count rows, keys and shift in 32 bits, up to the end of the last tile

ADVICE = ". Leave backend unset to use another"
INTERPRETED = " (to debug them here, set TRITON_INTERPRET=1 before Triton is imported)"


def _too_old(capability: int) -> tuple[str, ...]:
    return (f"the GPU has compute capability {_dotted(capability)}, less than 8.0",) if capability < 80 else ()


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


@functools.cache
def _find_machine_reasons(device: Device) -> tuple[str, ...]:
    try:
        import triton
    except Exception as error:  # a broken installation may raise anything
        absent = isinstance(error, ImportError) and error.name in (None, "triton")  # not one of its dependencies
        why = str(error) if isinstance(error, ImportError) else cause(error)
        return (f"Triton {'is not installed' if absent else 'cannot be imported'} ({why})",)
    version = getattr(triton, "__version__", "")  # a folder named triton has none
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < OLDEST_TRITON:
        return (f"Triton is {version or 'of unknown version'}, older than {'.'.join(map(str, OLDEST_TRITON))}",)
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        return (f"the tensors are on the CPU, but its kernels need an NVIDIA GPU{INTERPRETED}",)
    if device.type not in ("cpu", "cuda"):
        return (f"the tensors are on {device.type}, not on an NVIDIA GPU",)
    try:
        from ..launch import run as launch
    except Exception as error:  # a later Triton may lack a function that the kernels use
        return (f"its kernels cannot be imported with Triton {triton.__version__} ({cause(error)})",)
    if isinstance(device, AssumedGPU):
        return _too_old(device.capability)
    if launch.interpreting():
        return ()
    if torch.version.hip is not None:
        return ("the GPU is not an NVIDIA GPU",)
    reasons = [*_too_old(launch.capability(device))]
    if not (triton.knobs.build.cc or shutil.which("gcc") or shutil.which("clang")):
        reasons.append("Triton found no C compiler (gcc or clang)")
    return tuple(reasons)


@constant
def machine_reasons(device: Device) -> tuple[str, ...]:
    """Return why Triton kernels cannot run on a device at all."""
    return _find_machine_reasons(device)


def _kernel_reasons(call: Call) -> list[str]:
    """Return why no kernel takes these dtypes, devices and sizes."""
    device, dtype = device_of(call.query), call.query.dtype
    reasons = list(machine_reasons(device))
    if dtype == torch.float64 and device.type == "cuda":
        reasons.append("only the naive path computes float64")
    for name, dim in (("query", call.query.shape[3]), ("value", call.value.shape[3])):
        if dim > 256:
            reasons.append(f"the head dimension of {name} is {dim}, more than 256")
    if holds(call.query.shape[2] + call.key.shape[2] > MOST_POSITIONS, False):
        reasons.append("rows and keys together exceed 2**31")
    return reasons


def _marked_blocks(call: Call) -> int:
    """Return the largest number of blocks in the block mask of a call; 0 if it needs none."""
    tensors = [x for x in hiding(call) if x is not None]
    if not tensors or call.block_mask is not None:
        return 0
    batch, heads, rows, keys = *call.query.shape[:2], call.query.shape[2], call.key.shape[2]
    if call.cu_seqlens_q is not None:
        batch = call.cu_seqlens_q.shape[0] - 1
        rows, keys = call.max_seqlen_q or rows, call.max_seqlen_k or keys
    shared = all(x.dim() < 4 or holds(x.shape[1] == 1, False) or holds(x.stride(1) == 0, False) for x in tensors)
    size = tile_table.block_mask_size(interpreted=False)
    return batch * (1 if shared else heads) * -(-rows // size) * -(-keys // size)


def _grid_reasons(call: Call) -> list[str]:
    """Return why the universal kernels cannot take a call; empty if they can."""
    reasons = _kernel_reasons(call)
    batch, heads, rows, _ = call.query.shape
    blocks = batch * -(-max(rows, call.key.shape[2]) // 16)  # no tile has fewer than 16 rows or keys
    if call.cu_seqlens_q is not None:
        blocks += call.cu_seqlens_q.shape[0]  # each sequence starts a block
    if holds(blocks * heads >= 2**31, False):
        reasons.append("the grid would exceed 2**31 programs")
    if holds(_marked_blocks(call) >= 2**31, False):
        reasons.append("its block mask would exceed 2**31 blocks")
    return reasons


@constant
def hopper_reasons(device: Device) -> tuple[str, ...]:
    """Return why a device cannot run the Hopper kernels, although it runs the universal ones."""
    from ..launch import run as launch

    if (number := launch.capability(device)) is None:
        return ("Gluon, the language of its kernels, has no interpreter",)
    return () if number == 90 else (f"the GPU has compute capability {_dotted(number)}, not 9.0",)


def _hopper_reasons(call: Call, need_weights: bool) -> list[str]:
    """Return why the Hopper kernel cannot take a call; empty if it can."""
    if reasons := _grid_reasons(call):
        return [reason.removesuffix(INTERPRETED) for reason in reasons]
    from ..launch import hopper

    reasons = [*hopper_reasons(device_of(call.query)), *hopper.reasons(call)]
    return reasons or attention.failed(call, need_weights, on_hopper=True)


class Backend(NamedTuple):
    """A way to compute a call.

    reasons(call, need_weights): why it cannot take the call. run(call, need_lse, need_weights): (output, lse, weights),
    None for a result that is not needed. waits(call): why it takes the call only when named, or None.
    """

    name: str
    reasons: Callable[[Any, bool], list[str]]
    run: Callable[[Any, bool, bool], tuple[Any, ...]]
    waits: Callable[[Any], str | None] = lambda call: None


def _hopper_waits(call: Call) -> str | None:
    """Return why the Hopper kernel is not chosen by default: a tuning file found it slower."""
    return None if tuned.prefers_hopper("hopper", call, device_of(call.query)) else tuned.SLOWER


BACKENDS = {
    "hopper": Backend("hopper", _hopper_reasons, attention.run_hopper, _hopper_waits),
    "triton": Backend(
        "triton", lambda call, need: _grid_reasons(call) or attention.failed(call, need, False), attention.run_triton
    ),
    "cpu": Backend("cpu", lambda call, need_weights: cpu.limits(call), attention.run_cpu),
    "naive": Backend("naive", lambda call, need_weights: [], attention.run_naive),
}


def _decode_reasons(decode: Decode, need_weights: bool) -> list[str]:
    """Return why the universal kernels cannot take a call to a cache; empty if they can."""
    reasons = _kernel_reasons(decode.call) + cached.unmappable(decode)
    batch, heads, rows, _ = decode.call.query.shape
    if holds(batch * heads * max(rows, decode.added) >= 2**31, False):
        reasons.append("the grid would exceed 2**31 programs")
    return reasons or cached.failed(decode)


# Backends of `attention_decode`: their reasons and run take a Decode.
DECODERS = {
    "hopper": Backend("hopper", lambda decode, need_weights: ["it has no kernel for caches"], cached.run_triton),
    "triton": Backend("triton", _decode_reasons, cached.run_triton),
    "cpu": Backend("cpu", lambda decode, _: cpu.limits(decode.call) + cached.unmappable(decode), cached.run_cpu),
    "naive": Backend("naive", lambda decode, need_weights: [], formula.run_decode),
}


def check_name(name: str | None) -> None:
    if name is not None and not (isinstance(name, str) and name in BACKENDS):
        fail(ValueError, "backend", f"None or one of {', '.join(map(repr, BACKENDS))}", repr(name))


def use_backend(name: str | None) -> AbstractContextManager[None]:
    """Name the backend of all calls that this thread makes inside the `with`. `backend=` of a call takes precedence.

    torch.utils.checkpoint recomputes a forward where its backward runs: keep the backward inside, too. On a GPU,
    autograd runs backwards in a thread of its own, which this function does not reach: pass `backend=` instead.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64)
        >>> with fusedattn.use_backend("naive"):
        ...     out = fusedattn.attention(query, key, value)

    Args:
        name: "hopper", "triton", "cpu" or "naive". None: choose by default again.

    Raises:
        ValueError: name is none of these.
        NotImplementedError: raised by a call inside, if the backend cannot take it.
    """
    check_name(name)
    return override(backend=name)


def named(name: str | None) -> str | None:
    """Return the backend that the call or `use_backend` names, unchecked, or None."""
    return name if name is not None else thread_overrides.backend


def _on_gpu(call: Call | Decode) -> bool:
    """Return whether kernels are chosen by default. Triton's interpreter is used only when named."""
    return device_of((call.call if isinstance(call, Decode) else call).query).type == "cuda"


def choose(call: Call | Decode, need_weights: bool, name: str | None = None) -> Backend:
    """Return the backend that takes a call: the named one, or the first without a reason not to."""
    check_name(name)
    among = DECODERS if isinstance(call, Decode) else BACKENDS
    taken = named(name)
    if taken is not None:
        if reasons := among[taken].reasons(call, need_weights):
            raise NotImplementedError(f"backend: {taken!r} cannot take this call: {'; '.join(reasons)}{ADVICE}")
        return among[taken]
    if not _on_gpu(call):
        return among["naive" if among["cpu"].reasons(call, need_weights) else "cpu"]
    taken = next(
        name for name, known in among.items() if known.waits(call) is None and not known.reasons(call, need_weights)
    )
    if taken == "naive" and not torch.compiler.is_compiling():  # the compiler cannot trace a warning
        for reason in among["triton"].reasons(call, need_weights):
            warn_once(reason, f"the naive one, because {reason}", stacklevel=3)
    return among[taken]


class Explanation(NamedTuple):
    """Result of `explain`. Print it to read it.

    backend: the backend that the call takes; None if it would raise. tiles: {kernel: Tile, Pipeline or Backward}.
    reasons: {backend: [sentence, ...]} for each other backend. backward: on a Hopper GPU, why the Hopper kernels do not
    compute the gradients of query, key and value; empty if they do.
    """

    backend: str | None
    tiles: dict[str, tile_table.Tile | tile_table.Pipeline | tile_table.Backward]
    reasons: dict[str, list[str]]
    backward: Sequence[str] = ()

    def __str__(self) -> str:
        lines = [f"takes {self.backend}" if self.backend else "raises NotImplementedError"]
        for kernel, tile in self.tiles.items():
            size = f"{tile.rows} rows" if tile.keys is None else f"{tile.rows} rows x {tile.keys} keys"
            warps = f"{tile.warps} warps" if isinstance(tile, tile_table.Tile) else f"{tile.warpgroups} warpgroups"
            lines.append(f"    {kernel}: tiles of {size}, {warps}, {tile.stages} stages")
        for name, sentences in self.reasons.items():
            lines += [f"not {name}: {sentence}" for sentence in sentences]
        lines += [f"backward not on hopper: {sentence}" for sentence in self.backward]
        return "\n".join(lines)


@eager
def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    backend: str | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    capability: tuple[int, int] | None = None,
    **options: Any,
) -> Explanation:
    """Return which backend `fusedattn.attention` takes for these arguments, and why not the others. Computes nothing.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64)
        >>> fusedattn.explain(query, key, value).backend  # print the result to see why
        'cpu'
        >>> half = query.bfloat16()
        >>> fusedattn.explain(half, half, half, capability=(9, 0)).backend  # on an H100 or H200
        'hopper'

    Args:
        capability: explain for an NVIDIA GPU of this compute capability, such as (9, 0) for an H100 or H200, without a
            tuning file, wherever the tensors are; needs Triton. None: for the device of the tensors.
        **options: as in `fusedattn.attention`.

    Raises:
        TypeError, ValueError: for wrong arguments, as `fusedattn.attention` raises; for a wrong capability.
    """
    check_flags(return_lse=return_lse, return_weights=return_weights)
    check_names("explain", options, Arguments._fields)
    check_name(backend)
    chosen = named(backend)
    call = checked(Arguments(query, key, value, **options), named=chosen is not None)
    with override(gpu=_assumed(capability)):
        return _explained(call, chosen, return_weights)


def _assumed(capability: Any) -> AssumedGPU | None:
    """Return the GPU that `explain` assumes, or None for the device of the tensors."""
    if capability is None:
        return None
    fits = isinstance(capability, (tuple, list)) and len(capability) == 2 and all(type(x) is int for x in capability)
    if not fits or not (0 < capability[0] < 100 and 0 <= capability[1] < 10):
        fail(ValueError, "capability", "None or a compute capability such as (9, 0)", repr(capability))
    return AssumedGPU(10 * capability[0] + capability[1])


def _explained(call: Call, chosen: str | None, return_weights: bool) -> Explanation:
    reasons = {name: known.reasons(call, return_weights) for name, known in BACKENDS.items()}
    on_gpu = _on_gpu(call)
    for name, known in BACKENDS.items():
        if name != chosen and (on_gpu or not reasons[name]) and (why := known.waits(call)) is not None:
            reasons[name].append(why)
    if chosen is not None:
        taken, why = (None if reasons[chosen] else chosen), f"{chosen!r} is named, and a named backend never falls back"
    elif not on_gpu:
        taken, why = "naive" if reasons["cpu"] else "cpu", "the tensors are not on a GPU and no backend is named"
        if taken == "cpu":
            reasons["naive"].append("'cpu' takes the call and is preferred")
    else:
        taken = next(name for name, sentences in reasons.items() if not sentences)
        why = f"{taken!r} takes the call and is preferred"
    others = {name: sentences or [why] for name, sentences in reasons.items() if name != taken}
    if taken not in ("hopper", "triton"):
        return Explanation(taken, {}, others)
    tiles = attention.tiles_for(call, return_weights, taken == "hopper")
    backward = attention.backward_reasons(call, taken == "hopper") if not hopper_reasons(device_of(call.query)) else ()
    return Explanation(taken, tiles, others, backward)
