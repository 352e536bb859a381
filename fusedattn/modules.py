"""MultiHeadAttention and SelfAttention: attention between linear projections."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from .api import attention
from .backends import check_name
from .call.form import Arguments, Plan, autocasting
from .call.rules import check_flags, check_options, fail


def _linear(inputs: int, outputs: int, bias: bool, factory: dict[str, Any]) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias, **factory)
    nn.init.xavier_uniform_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def check_sizes(**sizes: object) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            fail(TypeError, name, "an int", type(size).__name__)
        if size < 1:
            fail(ValueError, name, "1 or more", size)


def check_input(name: str, tensor: Tensor, width: int, layer: nn.Module | None = None) -> None:
    """A tensor (batch, length, width) that a layer can take."""
    if not isinstance(tensor, Tensor):
        fail(TypeError, name, "a tensor", type(tensor).__name__)
    if tensor.dim() != 3 or tensor.shape[-1] != width:
        fail(ValueError, name, f"shape (batch, length, {width})", tuple(tensor.shape))
    check_fits(name, tensor, layer)


def check_fits(name: str, tensor: Tensor, layer: nn.Module | None) -> None:
    """The dtype and device of a tensor are those of the weight of a layer.

    One whose weight is wrapped, quantized or yet to be loaded answers for itself.
    """
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.is_meta:
        return
    if tensor.dtype != weight.dtype and not (tensor.is_floating_point() and autocasting(tensor)):
        fail(TypeError, name, f"the dtype of the parameters, {weight.dtype}", tensor.dtype)
    if tensor.device != weight.device:
        fail(ValueError, name, f"the device of the parameters, {weight.device}", tensor.device)


def check_shares(**shares: object) -> None:
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float):
            fail(TypeError, name, "a number", type(share).__name__)
        if not 0 <= share <= 1:
            fail(ValueError, name, "a number from 0 to 1", share)


def _by_head(pairs: Any) -> Any:
    """A mask, plan or bias of rank 3 (B, Sq, Sk) as one for all heads; any other as it is."""
    if isinstance(pairs, Plan):
        return pairs._replace(mask=_by_head(pairs.mask))
    return pairs.unsqueeze(1) if isinstance(pairs, Tensor) and pairs.dim() == 3 else pairs


def attend(
    query: Tensor, key: Tensor, value: Tensor, need_weights: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """(output, weights or None); asking for weights changes nothing in the output."""
    check_flags(need_weights=need_weights)
    got: Any = attention(query, key, value, return_weights=need_weights, **options)
    out, weights = got if need_weights else (got, None)
    return out, weights


class MultiHeadAttention(nn.Module):
    """Multi-head attention with input and output projections, one fused call between them.

        >>> layer = fusedattn.MultiHeadAttention(512, 8, causal=True)
        >>> output, _ = layer(torch.randn(2, 100, 512))

    Args:
        embed_dim: E, the width of query and output.
        num_heads: H. num_kv_heads: heads of key and value, a divisor of H; H by default.
        kdim, vdim: widths of key and value; embed_dim by default.
        head_dim: D; embed_dim // num_heads by default. value_head_dim: Dv; head_dim by default.
        bias: whether projections have one.
        dropout: the share of attention weights dropped while training.
        causal, window, scale, softcap: as in `fusedattn.attention`.
        backend: as in `fusedattn.attention`; "naive" is the reference module, with the same parameters.
    Raises: ValueError, TypeError for sizes and options that do not fit.
    Source: Attention is all you need, arXiv:1706.03762, section 3.2.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kdim: int | None = None,
        vdim: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        backend: str | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        kdim = embed_dim if kdim is None else kdim
        vdim = embed_dim if vdim is None else vdim
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(embed_dim=embed_dim, num_heads=num_heads, kdim=kdim, vdim=vdim, num_kv_heads=num_kv_heads)
        if head_dim is None:
            if embed_dim % num_heads:
                fail(ValueError, "num_heads", f"a divisor of embed_dim, {embed_dim}, or a head_dim", num_heads)
            head_dim = embed_dim // num_heads
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        check_sizes(head_dim=head_dim, value_head_dim=value_head_dim)
        if num_heads % num_kv_heads:
            fail(ValueError, "num_kv_heads", f"a divisor of num_heads, {num_heads}", num_kv_heads)
        check_options(Arguments(None, None, None, causal=causal, window=window, scale=scale, softcap=softcap))
        check_flags(bias=bias)
        check_shares(dropout=dropout)
        check_name(backend)
        self.embed_dim, self.kdim, self.vdim = embed_dim, kdim, vdim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.value_head_dim = head_dim, value_head_dim
        self.causal, self.window, self.scale, self.softcap = causal, window, scale, softcap
        self.dropout, self.backend = dropout, backend
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.q_proj = _linear(embed_dim, num_heads * head_dim, bias, factory)
        self.k_proj = _linear(kdim, num_kv_heads * head_dim, bias, factory)
        self.v_proj = _linear(vdim, num_kv_heads * value_head_dim, bias, factory)
        self.out_proj = _linear(num_heads * value_head_dim, embed_dim, bias, factory)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        mask: Tensor | Plan | None = None,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        bias: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key and value.

        Args:
            query: (B, Sq, E). key: (B, Sk, kdim), query by default. value: (B, Sk, vdim), key by default.
            mask: bool, True = may attend: (Sq, Sk), (B, Sq, Sk) or (B, 1 or H, Sq, Sk); or a `fusedattn.plan` of one.
            key_mask, query_mask: bool (B, Sk) and (B, Sq), True = a real token. What they hide changes no output, but
                must be finite for the gradients of the projections, which are linear in it.
            bias: floating, added to the scores, of the shapes a mask may have.
            need_weights: also return the weights, after dropout; they need memory for all pairs.
        Returns: (output (B, Sq, E), weights (B, H, Sq, Sk) or None). A row that sees nothing has the bias of
            out_proj, and weights 0.
        """
        key = query if key is None else key
        value = key if value is None else value
        check_input("query", query, self.embed_dim, self.q_proj)
        check_input("key", key, self.kdim, self.k_proj)
        check_input("value", value, self.vdim, self.v_proj)
        out, weights = attend(
            self.q_proj(query).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2),
            self.k_proj(key).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2),
            self.v_proj(value).unflatten(-1, (self.num_kv_heads, self.value_head_dim)).transpose(1, 2),
            need_weights,
            mask=_by_head(mask),
            bias=_by_head(bias),
            key_mask=key_mask,
            query_mask=query_mask,
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            dropout_p=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
        return self.out_proj(out.transpose(1, 2).flatten(2)), weights

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"


class SelfAttention(nn.Module):
    """Self-attention with one head and no output projection.

    Args:
        embed_dim: E, the width of input and output.
        dropout: the share of attention weights dropped while training.
        bias: whether projections have one.
        scale, backend: as in `fusedattn.attention`.
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        scale: float | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        check_sizes(embed_dim=embed_dim)
        check_options(Arguments(None, None, None, scale=scale))
        check_flags(bias=bias)
        check_shares(dropout=dropout)
        check_name(backend)
        self.embed_dim, self.dropout, self.scale, self.backend = embed_dim, dropout, scale, backend
        self.q_proj = _linear(embed_dim, embed_dim, bias, {})
        self.k_proj = _linear(embed_dim, embed_dim, bias, {})
        self.v_proj = _linear(embed_dim, embed_dim, bias, {})

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, key_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within x (B, S, E); mask is bool, (S, S) or (B, S, S), True = may attend; key_mask is bool (B, S).

        Returns: (output (B, S, E), weights (B, S, S) or None).
        """
        check_input("x", x, self.embed_dim, self.q_proj)
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return attend(
            query,
            key,
            value,
            need_weights,
            mask=mask,
            key_mask=key_mask,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            backend=self.backend,
        )
