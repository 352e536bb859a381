"""Switches that make F.scaled_dot_product_attention run this package, for code that you cannot edit.

`sdpa` and `enable_sdpa` replace the function. `sdpa_provider` replaces the two CUDA operators of flash attention that
the function calls; those for nested and packed tensors stay torch's.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..api import attention
from ..call import private
from ..call.options import INPUTS, Arguments, Call
from ..call.rules import checked
from ..dispatch import backends
from ..operators.namespace import NAME, OPERATORS
from ._flash import without_autocast_of_half
from ._sdpa import scaled_dot_product_attention

# Each object by which a program can call torch's function.
_OPERATOR = torch.ops.aten.scaled_dot_product_attention
_TORCHS = F.scaled_dot_product_attention, _OPERATOR, _OPERATOR.default


class Override:
    """Replacement of aten operators by {name: function}, until remove(). If one returns None, torch's kernel runs."""

    def __init__(self, operators: Mapping[str, Callable[..., Any]], key: str, kernel_key: str | None = None):
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for name, run in operators.items():
            run = functools.partial(_call, run, torch.library.get_kernel(f"aten::{name}", kernel_key or key))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
                self.library.impl(name, run, key, with_keyset=True)

    def remove(self) -> None:
        self.library = None


def _call(run: Callable[..., Any], original: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    results = run(*args, **kwargs)
    return original.call_boxed(keyset, *args, **kwargs) if results is None else results


def sdpa() -> AbstractContextManager[Any]:
    """Return a context in which F.scaled_dot_product_attention runs this package, on any device.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64, requires_grad=True)
        >>> with fusedattn.compat.torch.sdpa():
        ...     torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()

    It is a TorchFunctionMode. It also replaces the function in modules that imported it before,
    torch.ops.aten.scaled_dot_product_attention, and attention in torch.nn.MultiheadAttention with need_weights=False,
    without its fast path. Gradients and autocast work; torch.compile compiles separately inside and outside.
    `fusedattn.use_backend` chooses the kernels; torch's sdpa_kernel does not. attn_mask together with is_causal raises,
    and so do nested tensors, except torch.jagged without a mask. Tensor classes keep their own __torch_function__.

    It applies to this thread (for others see `enable_sdpa`). With activation checkpointing, call the backward inside.
    Every call of a torch function takes about a microsecond longer.
    """
    return _Ours()


def enable_sdpa() -> None:
    """Make F.scaled_dot_product_attention run this package in all threads of the program, until `disable_sdpa`.

    Examples:
        >>> fusedattn.compat.torch.enable_sdpa()
        >>> query = key = value = torch.randn(2, 8, 128, 64)
        >>> out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        >>> fusedattn.compat.torch.disable_sdpa()

    In the calling thread it does what `sdpa` does. In all other threads, and in TorchScript, it replaces the operator
    behind the function. There, torch.compile, torch.func and a TorchDispatchMode see torch's operator, and
    torch.nn.MultiheadAttention keeps its fast path (see `convert`). Call enable_sdpa() in each thread that compiles. A
    second call changes nothing.
    """
    global _everywhere
    modes = private.function_modes()
    if not any(isinstance(mode, _OursWhileEnabled) for mode in modes):
        private.replace_function_modes([_OursWhileEnabled(), *modes])
    if _everywhere is None:
        # CompositeImplicitAutograd is an alias without a kernel to call. All devices have the same one: take the CPU's.
        _everywhere = Override({"scaled_dot_product_attention": _answer}, "CompositeImplicitAutograd", "CPU")


def disable_sdpa() -> None:
    """Undo `enable_sdpa` in all threads. A `with sdpa()` stays in effect.

    Examples:
        >>> fusedattn.compat.torch.disable_sdpa()
    """
    global _everywhere
    private.replace_function_modes([x for x in private.function_modes() if not isinstance(x, _OursWhileEnabled)])
    _everywhere = None


def _ours(*args: Any, **kwargs: Any) -> Tensor:
    return scaled_dot_product_attention(*args, **kwargs)


def _without_modes(function: Any, **names: Any) -> Callable[..., Any]:
    """Return a copy of a torch function that no TorchFunctionMode handles. names: {global name: its replacement}."""
    # Torch disables a mode until the function that it handles returns, but the mode must handle the calls inside that
    # function. There is no public way to do that: if the mode is pushed again, the function hands itself to the mode
    # and never runs its own body. Replacing names in torch's modules, or the operator, would change other threads and
    # graphs of torch.compile. So this copies the function's code with other globals.
    never = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda *_: False)
    space = {**function.__globals__, **never, **names}
    copy = FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_ATTENTION = F.multi_head_attention_forward
_OUR_ATTENTION = _without_modes(_ATTENTION, scaled_dot_product_attention=_ours)
# A backward recomputes the forwards of torch.utils.checkpoint, so the mode stays active in it.
_BACKWARDS = {x: _without_modes(x) for x in (Tensor.backward, torch.autograd.backward, torch.autograd.grad)}


class _Ours(TorchFunctionMode):
    """Mode in which `scaled_dot_product_attention` of this package replaces torch's."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARDS:
            with self:
                return _BACKWARDS[func](*args, **kwargs)
        if (func in _TORCHS or func is _ATTENTION) and not _have_own_attention(types):
            # disable_sdpa cannot remove a mode from other threads; there the mode must leave calls to torch.
            if not isinstance(self, _OursWhileEnabled) or _everywhere is not None:
                return (_OUR_ATTENTION if func is _ATTENTION else _ours)(*args, **kwargs)
        return func(*args, **kwargs)


class _OursWhileEnabled(_Ours):
    """The mode of `enable_sdpa`; after `disable_sdpa` it does nothing."""


_UNCHANGED = (vars(Tensor)["__torch_function__"].__func__, private.disabled_torch_function)


def _have_own_attention(types: Iterable[Any]) -> bool:
    functions = (kind.__torch_function__ for kind in types if kind.__module__ not in private.TENSORS_OF_TORCH)
    return any(getattr(function, "__func__", function) not in _UNCHANGED for function in functions)


def _answer(*args: Any, **kwargs: Any) -> Tensor | None:
    """Compute aten::scaled_dot_product_attention, or return None to let torch's kernel run."""
    # A traced graph would keep our operator after disable_sdpa, because no guard checks the switch.
    # torch.func cannot transform autograd nodes that are made inside a kernel.
    recorded = torch.compiler.is_compiling() or private.dispatch_modes() or private.transforms_active()
    if recorded or private.is_as_torch_has_it():
        return None
    with private.as_torch_has_it():
        return _ours(*args, **kwargs)


_everywhere: Override | None = None


def register() -> None:
    """Add "fusedattn" to `torch.nn.attention.list_flash_attention_impls()` without activating it.

    Examples:
        >>> fusedattn.compat.torch.register()
        >>> "fusedattn" in torch.nn.attention.list_flash_attention_impls()
        True

    `torch.nn.attention.activate_flash_attention_impl("fusedattn")` or `sdpa_provider` activates it. A copy of the
    package under another name adds that name.
    """
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)


@contextmanager
def sdpa_provider() -> Iterator[None]:
    """Return a context in which F.scaled_dot_product_attention runs this package in place of torch's flash attention.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64, dtype=torch.float16, device="cuda")  # doctest: +SKIP
        >>> with fusedattn.compat.torch.sdpa_provider():  # doctest: +SKIP
        ...     out = torch.nn.functional.scaled_dot_product_attention(query, key, value)

    torch runs flash attention on CUDA for float16 and bfloat16, equal head dimensions up to 256 and no mask. Calls that
    this package does not take run torch's kernels. On Hopper and later GPUs torch prefers cuDNN to flash attention:
    choose flash attention by `sdpa_kernel(SDPBackend.FLASH_ATTENTION)` of torch.nn.attention, or set
    TORCH_CUDNN_SDPA_DEPRIORITIZED=1. Run the backward inside the `with`, too. On exit the previous implementation is
    active again.

    Raises:
        RuntimeError: without CUDA, on a machine that cannot run the kernels, and with torch 2.10.
    """
    _check_machine()
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        raise RuntimeError(f"sdpa_provider: expected torch 2.11 or later, got {torch.__version__}")
    register()
    before = torch.nn.attention.current_flash_attention_impl()
    try:
        torch.nn.attention.activate_flash_attention_impl(NAME)
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()
        if before is not None:
            torch.nn.attention.activate_flash_attention_impl(before)


def _check_machine() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("sdpa_provider: expected a machine with CUDA, got none: use fusedattn.compat.torch.sdpa()")
    if reasons := backends.machine_reasons(torch.device("cuda", torch.cuda.current_device())):
        raise RuntimeError(f"sdpa_provider: expected a machine that runs the kernels, got this: {'; '.join(reasons)}")


def _activate() -> Override:
    _check_machine()
    return Override(REPLACED, "CUDA")


def _checked(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Call | None:
    """Check the arguments, and return them as a Call, or None if the Triton kernels cannot take this call."""
    with without_autocast_of_half(query):  # torch casts above its operators
        call = checked(Arguments(query, key, value, causal=is_causal, align="top_left", scale=scale))
    return None if backends.BACKENDS["triton"].reasons(call, False) else call


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Compute torch's _scaled_dot_product_flash_attention, or return None if the kernels cannot take the call."""
    if _checked(query, key, value, is_causal, scale) is None:
        return None
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask: expected False, got True: fusedattn has no debug mask")
    state = torch.zeros(2, dtype=torch.int64, device=query.device)  # torch's seed is uint64 (2,); we use one number
    if dropout_p:
        state.random_(2**63 - 1)
    options: dict[str, Any] = dict(causal=is_causal, align="top_left", scale=scale, dropout_p=dropout_p, seed=state[:1])
    with torch.no_grad(), without_autocast_of_half(query):  # autograd runs above this operator
        out, lse = attention(query, key, value, **options, return_lse=True)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], state.view(torch.uint64), unused, query.new_empty(0)


def flash_backward(*arguments: Any, scale: float | None = None) -> tuple[Any, ...] | None:
    """Return the gradients of query, key and value, or None if the kernels cannot take the call."""
    # Unused arguments: cum_seq_q, cum_seq_k, max_q, max_k and, at the end, philox_offset.
    grad_out, query, key, value, out, logsumexp, _, _, _, _, dropout_p, is_causal, philox_seed, _ = arguments
    if (call := _checked(query, key, value, is_causal, scale)) is None:
        return None
    call = call._replace(seed=philox_seed.view(torch.int64)[:1], dropout_p=dropout_p) if dropout_p else call
    # The kernels read two numbers a row whose sum is the log-sum-exp in base 2: here 0 and log2_sum.
    log2_sum = torch.where(logsumexp == float("-inf"), float("inf"), logsumexp * math.log2(math.e))
    stats = torch.stack([torch.zeros_like(log2_sum), log2_sum], -1)
    need = [name in ("query", "key", "value") for name in INPUTS]
    results = grad_out, None, None, out, out.new_empty(0), stats
    grads = dict(zip(INPUTS, OPERATORS.backward(*results, *call, "triton", need), strict=True))
    return grads["query"], grads["key"], grads["value"]


_NAME = "_scaled_dot_product_flash_attention"
REPLACED: dict[str, Callable[..., Any]] = {_NAME: flash_forward, f"{_NAME}_backward": flash_backward}
