"""Choice of a call's backend, in order of preference, with the reasons why the others cannot take it."""

import functools
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import checks, jagged, options as of_calls
from ..call.checks import check_flags, check_names, fail
from ..call.decode import Decode
from ..call.options import Arguments, AssumedGPU, Call, Device, override, thread_overrides
from ..call.private import constant, eager
from ..call.rules import checked
from ..call.varlen import checked_varlen
from ..cpu import run as cpu
from ..launch import grids, tile_table, tuned
from ..launch.failures import cause, failed_kernels, is_passing, warn_once
from ..naive import formula
from ..operators import attention, decode as cached, namespace

OLDEST_TRITON = (3, 6)  # as in pyproject.toml
ADVICE = ". Leave backend unset to use another"
INTERPRETED = " (to debug them here, set TRITON_INTERPRET=1 before Triton is imported)"


@functools.cache
def _find_machine_reasons(device: Device) -> tuple[str, ...]:
    try:
        import triton
    except Exception as error:  # a broken installation may raise anything
        if is_passing(error, error.__context__):
            raise
        absent = isinstance(error, ImportError) and error.name in (None, "triton")  # not a missing dependency of Triton
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
        if is_passing(error, error.__context__):
            raise
        if str(getattr(error, "name", None)).endswith(".kernels"):
            return ("a clone that is not installed lacks its kernels: run pip install -e . there, or leave its folder",)
        return (f"its kernels cannot be imported with Triton {triton.__version__} ({cause(error)})",)
    if isinstance(device, torch.device) and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        return ("this machine has no such GPU",)  # the device of a fake tensor
    capability, assumed = launch.capability(device), isinstance(device, AssumedGPU)
    if capability is None:  # interpreted
        return ()
    if torch.version.hip is not None and not assumed:
        return ("the GPU is not an NVIDIA GPU",)
    reasons = [f"the GPU has compute capability {capability / 10}, less than 8.0"] if capability < 80 else []
    if not (assumed or triton.knobs.build.cc or shutil.which("gcc") or shutil.which("clang")):
        reasons.append("Triton found no C compiler (gcc or clang)")
    return tuple(reasons)


@constant
def machine_reasons(device: Device) -> tuple[str, ...]:
    """Return the reasons why Triton kernels cannot run on a device; () if they can."""
    return _find_machine_reasons(device)  # torch.compile ignores the mark @constant on a cached function


def block_size(device: Device) -> int | None:
    """Return the size of a block of the block mask, in rows and keys; None if no kernels run on a device."""
    if machine_reasons(device):
        return None
    from ..launch import blocks

    return int(blocks.BLOCK)


def _device(call: Call) -> Device:
    return thread_overrides.gpu or call.query.device


def _kernel_reasons(call: Call, widest_key: int = tile_table.WIDTHS[-1], added: int | None = None) -> list[str]:
    """Return why Triton kernels cannot take the dtype, device and sizes of a call. added: the new keys of a Decode."""
    device = _device(call)
    reasons = list(machine_reasons(device))
    if call.query.dtype == torch.float64 and device.type == "cuda":
        reasons.append("only the naive path computes float64")
    if call.mask_bits is not None and not reasons and call.mask_bits.shape[1] != (size := block_size(device)):
        reasons.append(f"its plan was made elsewhere: its blocks have {call.mask_bits.shape[1]} rows, not {size}")
    for name, x, most in (("query", call.query, widest_key), ("value", call.value, tile_table.WIDTHS[-1])):
        if (dim := x.shape[3]) > most:
            reasons.append(f"the head dimension of {name} is {dim}, more than {most}")
    return reasons + grids.limits(call, added)


@constant
def hopper_reasons(device: Device) -> tuple[str, ...]:
    """Return the reasons why a device that runs the backend "triton" cannot run the backend "hopper"."""
    from ..launch import run as launch

    if (number := launch.capability(device)) is None:
        return ("Gluon, the language of its kernels, has no interpreter",)
    return () if number == 90 else (f"the GPU has compute capability {number / 10}, not 9.0",)


def _failures(of: Any, need_weights: bool, on_hopper: bool) -> list[str]:
    """Return [why] if a kernel this Call or Decode needs failed or was wrong on this device, otherwise []."""
    call, cached = (of.call, True) if isinstance(of, Decode) else (of, False)
    if torch.compiler.is_compiling() or not (failed_kernels or any(x.wrong for x in tuned.of(_device(call)).values())):
        return []
    from ..launch import backward, decode, run

    need = [isinstance(x, Tensor) and x.requires_grad for x in of_calls.inputs(call)]
    needed = torch.is_grad_enabled() and any(need) and not cached
    passes = backward.passes(call, need, "hopper" if on_hopper else "triton") if needed else ()
    # Calls with few rows split their keys, and "combine" merges the results.
    names = ("hopper", "combine") if on_hopper else decode.kernels(of) if cached else ("forward",)
    names = *names, *["weights"] * (need_weights and not cached), *passes
    return [str(why)] if (why := run.failed(call, names, cached)) is not None else []


class Backend(NamedTuple):
    """A backend: its name, the reasons why it refuses a call, and the function that computes a call.

    reasons(call, need_weights): why it cannot take the call; empty if it can. run(call, need_lse, need_weights):
    (output, lse, weights), None for a result that is not needed. For `attention`, run also takes `learned`: whether
    dispatch/replay.py counts calls of this kind.
    """

    name: str
    reasons: Callable[[Any, bool], list[str]]
    run: Callable[..., tuple[Any, ...]]


def _triton_reasons(call: Call, need_weights: bool) -> list[str]:
    return _kernel_reasons(call) or _failures(call, need_weights, on_hopper=False)


def _decode_reasons(decode: Decode, need_weights: bool) -> list[str]:
    reasons = _kernel_reasons(decode.call, tile_table.WIDEST_CACHED, decode.added)
    return reasons + cached.unmappable(decode) or _failures(decode, need_weights, on_hopper=False)


def _hopper_reasons(of: Any, need_weights: bool) -> list[str]:
    """Return the reasons why the backend "hopper" cannot take a Call or a Decode."""
    decode, call = (of, of.call) if isinstance(of, Decode) else (None, of)
    if reasons := _kernel_reasons(call) if decode is None else _decode_reasons(decode, need_weights):
        return [reason.removesuffix(INTERPRETED) for reason in reasons]
    if elsewhere := hopper_reasons(_device(call)):
        return [*elsewhere]
    from ..launch import hopper

    lacks = hopper.reasons(call) if decode is None else hopper.cache_reasons(decode)
    if reasons := lacks or _failures(of, need_weights, on_hopper=True):
        return reasons
    return [] if call.named or tuned.prefers_hopper("hopper", call, _device(call)) else [tuned.SLOWER]


BACKENDS = {
    "hopper": Backend("hopper", _hopper_reasons, attention.run_hopper),
    "triton": Backend("triton", _triton_reasons, attention.run_triton),
    "cpu": Backend("cpu", lambda call, need_weights: cpu.limits(call), attention.run_cpu),
    "naive": Backend("naive", lambda call, need_weights: [], attention.run_naive),
}
# Backends of `attention_decode`: their reasons and run take a Decode.
DECODERS = {
    "hopper": Backend("hopper", _hopper_reasons, cached.run_hopper),
    "triton": Backend("triton", _decode_reasons, cached.run_triton),
    "cpu": Backend("cpu", lambda decode, _: cpu.limits(decode.call) + cached.unmappable(decode), cached.run_cpu),
    "naive": Backend("naive", lambda decode, need_weights: [], formula.run_decode),
}


def check_name(name: str | None, argument: str = "backend") -> None:
    if name is not None and not (isinstance(name, str) and name in BACKENDS):
        fail(ValueError, argument, f"None or one of {', '.join(map(repr, BACKENDS))}", checks.value(name))


def use_backend(name: str | None) -> override:
    """Return a context in which all calls of this thread use a backend. `backend=` of a call takes precedence.

    torch.utils.checkpoint recomputes the forward during the backward: keep the backward inside, too. On a GPU, autograd
    runs backwards in another thread, which this function does not reach: pass `backend=` instead.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64)
        >>> with fusedattn.use_backend("naive"):
        ...     out = fusedattn.attention(query, key, value)

    Args:
        name: "hopper", "triton", "cpu" or "naive". None: choose by default again.

    Raises:
        ValueError: there is no backend of that name.
        NotImplementedError: raised by a call inside that the backend cannot take.
    """
    check_name(name, "name")
    return override(backend=name)


def named(name: str | None) -> str | None:
    return name if name is not None else thread_overrides.backend


def _on_gpu(call: Call) -> bool:
    return _device(call).type == "cuda"


def choose(call: Call | Decode, need_weights: bool, name: str | None = None) -> Backend:
    """Return the backend for a call: the one that the caller named, or the first one that can take the call."""
    check_name(name)
    among = DECODERS if isinstance(call, Decode) else BACKENDS
    if (taken := named(name)) is not None:
        if reasons := among[taken].reasons(call, need_weights):
            raise NotImplementedError(f"backend: {taken!r} cannot take this call: {'; '.join(reasons)}{ADVICE}")
        return among[taken]
    on_gpu = _on_gpu(call.call if isinstance(call, Decode) else call)
    # On a CPU, kernels run only with backend="triton", in the interpreter.
    taken = next(x for x in (among if on_gpu else ("cpu", "naive")) if not among[x].reasons(call, need_weights))
    if taken == "naive" and on_gpu and not torch.compiler.is_compiling():  # the compiler cannot trace a warning
        for reason in among["triton"].reasons(call, need_weights):
            warn_once(reason, f"the naive one, because {reason}", stacklevel=3)
    return among[taken]


def _backend_here(call: Call, backend: str, has_caches: bool) -> str:
    """Return a backend of this device for a call whose backend is of another device. Raise if the caller named it."""
    if backend != "cpu" and not machine_reasons(_device(call)):  # in Triton's interpreter
        return backend
    if has_caches and backend == "cpu" and not call.named:
        return "naive" if machine_reasons(_device(call)) or call.query.dtype == torch.float64 else "triton"
    return choose(call, False, backend if call.named else None).name


namespace.backend_here = _backend_here


class Explanation(NamedTuple):
    """Result of `explain`; `print` shows it as text.

    backend: the backend that takes the call; None if the call would raise. tiles: {kernel: Tile, Pipeline or Backward}.
    reasons: {other backend: [sentence, ...]}. backward: on a Hopper GPU, why the backward runs the kernels of "triton",
    not of "hopper". For "cpu", why the naive formula computes the gradients, if inputs require them. Otherwise empty.
    If no input requires a gradient, `tiles` and `backward` are for gradients of query, key and value.
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
        first = "cpu" if self.backend == "cpu" else "hopper"
        lines += [f"not {first} for the backward: {sentence}" for sentence in self.backward]
        return "\n".join(lines)


@eager
def explain(
    query: Tensor, key: Tensor, value: Tensor, *,
    backend: str | None = None, return_lse: bool = False, return_weights: bool = False,
    capability: tuple[int, int] | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, **options: Any,
) -> Explanation:  # fmt: skip
    """Return the backend that takes a call of `attention` or `attention_varlen`, and why the others do not.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64)
        >>> fusedattn.explain(query, key, value).backend  # print the result to see why
        'cpu'
        >>> half = query.bfloat16()
        >>> fusedattn.explain(half, half, half, capability=(9, 0)).backend  # on an H100 or H200
        'hopper'

    Args:
        capability: None explains the call for the device of the tensors. (9, 0), for example, explains it for an H100
            or H200 without a tuning file, on any device; needs Triton.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: explain a call of `fusedattn.attention_varlen`.
        **options: as in `fusedattn.attention`.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """
    check_flags(return_lse=return_lse, return_weights=return_weights)
    check_names("explain", options, Arguments._fields)
    check_name(backend)
    chosen = named(backend)
    arguments = Arguments(query, key, value, **options)
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if isinstance(query, Tensor) and query.is_nested and all(x is None for x in offsets):
        arguments, offsets, _ = jagged.pack(arguments)
    if all(x is None for x in offsets):
        call = checked(arguments, named=chosen is not None)
    else:
        call = checked_varlen(arguments, *offsets, return_weights, chosen is not None)
    gpu = thread_overrides.gpu
    if capability is not None:
        pair = isinstance(capability, (tuple, list)) and [type(x) for x in capability] == [int, int]
        if not pair or not (0 < capability[0] < 100 and 0 <= capability[1] < 10):
            fail(ValueError, "capability", "None or a compute capability such as (9, 0)", checks.value(capability))
        gpu = AssumedGPU(10 * capability[0] + capability[1])
    with override(gpu=gpu):
        return _explained(call, chosen, return_weights)


def _explained(call: Call, chosen: str | None, return_weights: bool) -> Explanation:
    reasons = {name: known.reasons(call, return_weights) for name, known in BACKENDS.items()}
    if chosen is not None:
        taken, why = (None if reasons[chosen] else chosen), f"{chosen!r} is named, and a named backend never falls back"
    else:
        taken = next(name for name in (BACKENDS if _on_gpu(call) else ("cpu", "naive")) if not reasons[name])
        why = f"{taken!r} takes the call and is preferred"
    others = {name: sentences or [why] for name, sentences in reasons.items() if name != taken}
    need = [x is not None and x.requires_grad for x in of_calls.inputs(call)]
    if taken == "cpu":
        return Explanation(taken, {}, others, cpu.lacks_gradients(call, None, need) if any(need) else [])
    if taken not in ("hopper", "triton"):
        return Explanation(taken, {}, others)
    from ..launch import backward, run

    need = need if any(need) else [name in of_calls.ATTENDED for name in of_calls.INPUTS]
    names = "hopper" if taken == "hopper" else "forward", *["weights"] * return_weights
    tiles = {name: run.form_of(name, call) for name in (*names, *backward.passes(call, need, taken))}
    why_not = () if hopper_reasons(_device(call)) else backward.reasons_not_on_hopper(call, need, taken)
    return Explanation(taken, tiles, others, why_not)
