"""torch's own scaled_dot_product_attention on our kernels: an implementation for torch.nn.attention's registry.

Of the slot for flash attention the two operators behind F.scaled_dot_product_attention are replaced, for CUDA alone;
those for nested and packed tensors stay torch's.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..api import attention
from ..call.form import Arguments, Call
from ..call.rules import checked
from ..operators.namespace import NAME, OPERATORS
from ._override import Override


def register() -> None:
    """Add "fusedattn" to `torch.nn.attention.list_flash_attention_impls()`. Nothing is activated.

    In a copy of the package under another name that name stands for it, as it does for the operators.
    `torch.nn.attention.activate_flash_attention_impl("fusedattn")` then puts our kernels, and sdpa_provider() for the
    length of a `with`, where F.scaled_dot_product_attention runs flash attention on CUDA tensors.
    """
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)


def sdpa_provider() -> AbstractContextManager[None]:
    """In the `with`, F.scaled_dot_product_attention runs our kernels wherever it would run flash attention.

        >>> with fusedattn.compat.torch.sdpa_provider():
        ...     model(inputs)

    That is: CUDA, float16 and bfloat16, one head dimension up to 256, no mask. What the kernels do not take goes to
    torch's own. On Hopper and later GPUs torch prefers cuDNN to flash attention: ask for the latter by
    `sdpa_kernel(SDPBackend.FLASH_ATTENTION)` of torch.nn.attention, or set TORCH_CUDNN_SDPA_DEPRIORITIZED=1.
    Calls register(); what was active before is active again on exit. A backward belongs inside, too.
    Raises: RuntimeError without CUDA, on a machine that cannot run the kernels, and with torch 2.10.
    """
    _check_machine()
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        raise RuntimeError(f"sdpa_provider: expected torch 2.11 or later, got {torch.__version__}")
    return _provide()


@contextmanager
def _provide() -> Iterator[None]:
    register()
    before = torch.nn.attention.current_flash_attention_impl()
    try:
        torch.nn.attention.activate_flash_attention_impl(NAME)
        yield
    finally:
        if before is None:
            torch.nn.attention.restore_flash_attention_impl()
        else:
            torch.nn.attention.activate_flash_attention_impl(before)


def _check_machine() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "sdpa_provider: expected a machine with CUDA, got one without: F.scaled_dot_product_attention"
        )
    reasons = backends.machine_reasons(torch.device("cuda", torch.cuda.current_device()))
    if reasons:
        raise RuntimeError(f"sdpa_provider: expected a machine that runs the kernels: {'; '.join(reasons)}")


def _activate() -> Override:
    _check_machine()
    return Override(REPLACED, "CUDA")


def _call(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Call | None:
    """The call that the kernels get; None if they cannot take it."""
    call = checked(Arguments(query, key, value, causal=is_causal, align="top_left", scale=scale))
    return None if backends.BACKENDS["triton"].reasons(call, False) else call


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...] | None:
    """aten::_scaled_dot_product_flash_attention: (out, lse, None, None, L, S, seed, unused, debug mask), or None.

    seed: uint64 (2,), of which the first is ours.
    """
    if _call(query, key, value, is_causal, scale) is None:
        return None
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask: expected False, got True: fusedattn has no debug mask")
    if dropout_p:
        state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device=query.device)
    else:
        state = torch.zeros(2, dtype=torch.int64, device=query.device)
    with torch.no_grad():  # autograd is above this operator
        out, lse = attention(
            query,
            key,
            value,
            causal=is_causal,
            align="top_left",
            scale=scale,
            dropout_p=dropout_p,
            seed=state[:1],
            return_lse=True,
        )
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    lengths = query.shape[2], key.shape[2]
    return out, lse, None, None, *lengths, state.view(torch.uint64), unused, query.new_empty(0)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Any, ...] | None:
    """aten::_scaled_dot_product_flash_attention_backward: gradients of query, key and value, or None."""
    call = _call(query, key, value, is_causal, scale)
    if call is None:
        return None
    if dropout_p:
        call = call._replace(seed=philox_seed.view(torch.int64)[:1], dropout_p=dropout_p)
    # What the kernels keep of a row is its largest score and the rest of the log of its sum: 0 and all of it will do.
    rest = torch.where(logsumexp == float("-inf"), float("inf"), logsumexp * math.log2(math.e))
    stats = torch.stack([torch.zeros_like(rest), rest], -1)
    need = [True, True, True, False, False, False]
    grads: tuple[Any, ...] = OPERATORS.backward(grad_out, None, None, out, out.new_empty(0), stats, *call, need)
    return grads[:3]


REPLACED: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention": forward,
    "_scaled_dot_product_flash_attention_backward": backward,
}
