"""This package in place of the two CUDA operators of flash attention that F.scaled_dot_product_attention calls.

The operators for nested and packed tensors stay torch's.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..api import attention
from ..call.options import INPUTS, Arguments, Call
from ..call.rules import checked
from ..dispatch import backends
from ..operators.namespace import NAME, OPERATORS


class Override:
    """Replaces operators of aten for a dispatch key, until remove() or until this object is deleted.

    Args:
        operators: {name: function}. If a function returns None, torch's kernel runs.
        kernel_key: the dispatch key of torch's kernel, if not `key`.
    """

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
    """In the `with`, F.scaled_dot_product_attention runs this package in place of torch's flash attention.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64, dtype=torch.float16, device="cuda")  # doctest: +SKIP
        >>> with fusedattn.compat.torch.sdpa_provider():  # doctest: +SKIP
        ...     out = torch.nn.functional.scaled_dot_product_attention(query, key, value)

    torch runs flash attention on CUDA for float16 and bfloat16, one head dimension up to 256 and no mask. Calls that
    its kernels do not take run torch's. On Hopper and later GPUs torch prefers cuDNN to flash attention: choose flash
    attention by `sdpa_kernel(SDPBackend.FLASH_ATTENTION)` of torch.nn.attention, or set
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
    """Return the checked call, or None if the kernels cannot take it."""
    call = checked(Arguments(query, key, value, causal=is_causal, align="top_left", scale=scale))
    return None if backends.BACKENDS["triton"].reasons(call, False) else call


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...] | None:  # fmt: skip
    """Return (out, lse, None, None, L, S, seed, unused, debug mask); None if the kernels cannot take the call."""
    if _checked(query, key, value, is_causal, scale) is None:
        return None
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask: expected False, got True: fusedattn has no debug mask")
    state = torch.zeros(2, dtype=torch.int64, device=query.device)  # torch's seed is uint64 (2,); we use one number
    if dropout_p:
        state.random_(2**63 - 1)
    options: dict[str, Any] = dict(causal=is_causal, align="top_left", scale=scale, dropout_p=dropout_p, seed=state[:1])
    with torch.no_grad():  # autograd runs above this operator
        out, lse = attention(query, key, value, **options, return_lse=True)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], state.view(torch.uint64), unused, query.new_empty(0)


def flash_backward(*arguments: Any, scale: float | None = None) -> tuple[Any, ...] | None:
    """Return gradients of query, key and value; None if the kernels cannot take the call."""
    # Between logsumexp and dropout_p: cum_seq_q, cum_seq_k, max_q and max_k; at the end philox_offset.
    grad_out, query, key, value, out, logsumexp, _, _, _, _, dropout_p, is_causal, philox_seed, _ = arguments
    call = _checked(query, key, value, is_causal, scale)
    if call is None:
        return None
    if dropout_p:
        call = call._replace(seed=philox_seed.view(torch.int64)[:1], dropout_p=dropout_p)
    # The kernels read two numbers a row whose sum is the log-sum-exp in base 2: here 0 and log2_sum.
    log2_sum = torch.where(logsumexp == float("-inf"), float("inf"), logsumexp * math.log2(math.e))
    stats = torch.stack([torch.zeros_like(log2_sum), log2_sum], -1)
    need = [name in ("query", "key", "value") for name in INPUTS]
    results = grad_out, None, None, out, out.new_empty(0), stats
    grads = dict(zip(INPUTS, OPERATORS.backward(*results, *call, "triton", need), strict=True))
    return grads["query"], grads["key"], grads["value"]


_NAME = "_scaled_dot_product_flash_attention"
REPLACED: dict[str, Callable[..., Any]] = {_NAME: flash_forward, f"{_NAME}_backward": flash_backward}
