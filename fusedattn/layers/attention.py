"""MultiHeadAttention and SelfAttention: attention between linear projections."""

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.types import Device

from ..api import attention
from ..call import checks, rules
from ..call.checks import FLOATING, FLOATS, as_python, check_flags, check_place, check_sizes, fail
from ..call.options import Arguments, Plan
from ..call.rules import check_options
from ..dispatch.backends import check_name
from ..distributed.parallel import ContextParallel, attend as attend_in_parallel, by_heads, check_parallel


def check_layer(dtype: Any = None, layer_norm_eps: Any = 0.0, **dropouts: Any) -> None:
    for name, dropout in dropouts.items():
        checks.check_number(name, dropout, "a number from 0 to 1", 0, 1)
    checks.check_number("layer_norm_eps", layer_norm_eps, "a finite number of 0 or more", 0)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in FLOATING):
        fail(TypeError, "dtype", FLOATS, checks.value(dtype))


def check_input(
    name: str, tensor: Tensor, shape: tuple[int | str, ...], layer: nn.Module | None = None, jagged: bool = False,
    source: str = "",  # the argument that the caller passed, if `name` was left out
) -> None:  # fmt: skip
    """Raise unless a tensor has this shape (a string allows any size), and the dtype and device of a layer's weight."""
    if isinstance(tensor, fx.Proxy):
        return
    if not (jagged and getattr(tensor, "layout", None) == torch.jagged):
        check_place(name, tensor)
    fits = tensor.dim() == len(shape)
    for size, want in zip(tensor.shape, shape, strict=False):
        fits = fits and (isinstance(want, str) or checks.is_size(size, want))
    if not fits:
        why = f", because {name} was left out and is {source} by default" if source not in ("", name) else ""
        hint = ": pass a mask by its name" if tensor.dtype == torch.bool else ""
        expected = "shape " + str(shape).replace("'", "") + why
        fail(ValueError, source or name, expected, f"shape {tuple(tensor.shape)}{hint}")
    check_fits(source or name, tensor, layer)


def _size(tensor: Tensor, dim: int, name: str) -> int | str:
    """Return tensor.shape[dim] for `check_input`; for a Proxy or nested tensor, `name`, which allows any size."""
    return name if isinstance(tensor, fx.Proxy) or tensor.layout == torch.jagged else tensor.shape[dim]


def check_fits(name: str, tensor: Tensor, layer: nn.Module | None, same_dtype: bool = True) -> None:
    """Raise unless a tensor has the device of a layer's weight and, with same_dtype but without autocast, its dtype."""
    # A layer whose weight is wrapped, computed, quantized or not yet loaded checks its input itself.
    # Not layer.weight: torch.nn.utils.parametrize would compute it for this check alone.
    weight = None if layer is None else layer._parameters.get("weight")
    # Not weight.is_meta: a compiler makes it a node of its graph.
    if weight is None or not weight.is_floating_point() or weight.device.type == "meta":
        return
    if same_dtype and tensor.dtype != weight.dtype and not (tensor.is_floating_point() and rules.autocasting(tensor)):
        fail(TypeError, name, f"the dtype of the parameters, {weight.dtype}", tensor.dtype)
    if tensor.device != weight.device:
        fail(ValueError, name, f"the device of the parameters, {weight.device}", tensor.device)


def _linear(inputs: int, outputs: int, bias: bool, **factory: Any) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias, **factory)
    nn.init.xavier_uniform_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def _add_head_dim(name: str, pairs: Any, sizes: tuple[int, ...] | None) -> Any:
    """Unsqueeze a mask or bias (B, Sq, Sk) to (B, 1, Sq, Sk). sizes: B, Sq and Sk; None if they are not known yet."""
    if not isinstance(pairs, Tensor) or checks.irregular(pairs) is not None or pairs.dim() != 3:
        return pairs
    if sizes is not None and not checks.broadcasts(pairs, sizes):
        fail(ValueError, name, f"(B, Sq, Sk), broadcastable to {sizes}, because its rank is 3", pairs.shape)
    return pairs.unsqueeze(1)


@fx.wrap
def attend(q: Tensor, k: Tensor, v: Tensor, need_weights: bool, **options: Any) -> tuple[Tensor, Tensor | None]:
    check_flags(need_weights=need_weights)
    results: Any = attention(q, k, v, return_weights=need_weights, **options)
    return results if need_weights else (results, None)


@fx.wrap  # one node of a traced graph, because it branches on shapes
def _attend_by_heads(
    query: Tensor, key: Tensor, value: Tensor, heads: tuple[int, int], widths: tuple[int, int],
    parallel: ContextParallel | None, need_weights: bool, *, mask: Any, bias: Any, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend from projections (B, S, H * D): return (output (B, Sq, Hq * Dv), weights or None). widths: (D, Dv)."""
    (num_heads, num_kv_heads), (head_dim, value_head_dim) = heads, widths
    q = by_heads(query, "num_heads", num_heads, head_dim)
    k = by_heads(key, "num_kv_heads", num_kv_heads, head_dim)
    v = by_heads(value, "num_kv_heads", num_kv_heads, value_head_dim)
    if q.shape[1] * num_kv_heads != k.shape[1] * num_heads:
        shared = f"{q.shape[1]} of {num_heads} heads and {k.shape[1]} of {num_kv_heads} key heads"
        fail(ValueError, "num_kv_heads", "q_proj and k_proj cut over the same number of processes", shared)
    dense = parallel is None and torch.jagged not in (q.layout, k.layout)
    sizes = (q.shape[0], q.shape[2], k.shape[2]) if dense else None
    options |= {name: _add_head_dim(name, pairs, sizes) for name, pairs in (("mask", mask), ("bias", bias))}
    if parallel is None:
        out, weights = attend(q, k, v, need_weights, **options)
    else:
        out, weights = attend_in_parallel(parallel, q, k, v, need_weights, **options)
    return out.transpose(1, 2).flatten(2), weights


class MultiHeadAttention(nn.Module):
    """Multi-head attention: projections of query, key and value, one fused call, an output projection.

    Examples:
        >>> layer = fusedattn.MultiHeadAttention(512, 8, causal=True)
        >>> output, _ = layer(torch.randn(2, 100, 512))

    Args:
        embed_dim, num_heads: E, the width of query and output, and H.
        kdim, vdim: widths of key and value, embed_dim by default.
        num_kv_heads: heads of key and value, a divisor of H, by default H.
        head_dim, value_head_dim: D (embed_dim // num_heads by default) and Dv (head_dim by default).
        dropout: the probability to drop an attention weight, in training.
        bias: give the projections a bias.
        causal, window, scale, softcap, backend: as in `fusedattn.attention`; "naive" is the plain formula.
        context_parallel: a `fusedattn.distributed.ContextParallel`, for inputs that are shards of a sequence. The
            output is this rank's shard. The method determines which masks are allowed. The attribute may be set later.

    For tensor parallelism use torch's `parallelize_module` with ColwiseParallel for q_proj, k_proj and v_proj, and
    RowwiseParallel for out_proj. Each of n processes then has num_heads / n heads, also in masks, bias and weights.

    Weights begin Xavier-uniform and biases 0. The projections' own `reset_parameters`, after `to_empty`, differs.

    Raises:
        ValueError, TypeError: for sizes and options that do not fit.

    Source: Attention is all you need, arXiv:1706.03762, section 3.2.2.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, kdim: int | None = None, vdim: int | None = None,
        num_kv_heads: int | None = None, head_dim: int | None = None, value_head_dim: int | None = None,
        dropout: float = 0.0, bias: bool = True, causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        scale: float | None = None, softcap: float | None = None, backend: str | None = None,
        context_parallel: ContextParallel | None = None,
        device: Device = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        kdim, vdim = (embed_dim if x is None else x for x in (kdim, vdim))
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        embed_dim, num_heads, kdim, vdim, num_kv_heads = check_sizes(
            embed_dim=embed_dim, num_heads=num_heads, kdim=kdim, vdim=vdim, num_kv_heads=num_kv_heads
        )
        if head_dim is None:
            if embed_dim % num_heads:
                fail(ValueError, "num_heads", f"a divisor of embed_dim, {embed_dim}", f"{num_heads}: or pass head_dim")
            head_dim = embed_dim // num_heads
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        head_dim, value_head_dim = check_sizes(head_dim=head_dim, value_head_dim=value_head_dim)
        if num_heads % num_kv_heads:
            fail(ValueError, "num_kv_heads", f"a divisor of num_heads, {num_heads}", num_kv_heads)
        arguments = Arguments(None, None, None, causal=causal, window=window, scale=scale, softcap=softcap)
        scale = check_options(arguments).scale
        check_flags(bias=bias)
        check_layer(dtype, dropout=dropout)
        check_name(backend)
        check_parallel(context_parallel)
        self.context_parallel = context_parallel
        self.embed_dim, self.kdim, self.vdim = embed_dim, kdim, vdim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.value_head_dim = head_dim, value_head_dim
        self.window = None if window is None else tuple(map(as_python, window))
        self.causal, self.scale, self.softcap = causal, as_python(scale), as_python(softcap)
        self.dropout, self.backend = as_python(dropout), backend
        self.q_proj = _linear(embed_dim, num_heads * head_dim, bias, device=device, dtype=dtype)
        self.k_proj = _linear(kdim, num_kv_heads * head_dim, bias, device=device, dtype=dtype)
        self.v_proj = _linear(vdim, num_kv_heads * value_head_dim, bias, device=device, dtype=dtype)
        self.out_proj = _linear(num_heads * value_head_dim, embed_dim, bias, device=device, dtype=dtype)

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None,
        mask: Tensor | Plan | None = None, *, key_mask: Tensor | None = None, query_mask: Tensor | None = None,
        bias: Tensor | None = None, need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attend from query to key and value.

        Args:
            query, key, value: (B, Sq, E), (B, Sk, kdim), (B, Sk, vdim). By default key is query, and value is key.
            mask: bool, True = may attend: (Sq, Sk), (B, Sq, Sk) or (B, 1 or H, Sq, Sk); or a `fusedattn.plan`.
            bias: floating, added to the scores; the same shapes as mask.
            key_mask, query_mask: bool (B, Sk) and (B, Sq), True = a real token. Hidden tokens change no output, but
                must be finite for the gradients of the projections.
            need_weights: also return the weights, after dropout; they take memory for all pairs.

        Returns:
            (output (B, Sq, E), weights (B, H, Sq, Sk) or None). A row that sees nothing: out_proj's bias, weights 0.
        """
        key, of_key = (query, "query") if key is None else (key, "key")
        value, of_value = (key, of_key) if value is None else (value, "value")
        check_input("query", query, ("batch", "length", self.embed_dim), self.q_proj, jagged=True)
        batch = _size(query, 0, "batch")
        check_input("key", key, (batch, "length", self.kdim), self.k_proj, True, of_key)
        check_input("value", value, (batch, _size(key, 1, "length"), self.vdim), self.v_proj, True, of_value)
        out, weights = _attend_by_heads(
            self.q_proj(query), self.k_proj(key), self.v_proj(value),
            (self.num_heads, self.num_kv_heads), (self.head_dim, self.value_head_dim), self.context_parallel,
            need_weights, mask=mask, bias=bias, key_mask=key_mask, query_mask=query_mask, causal=self.causal,
            window=self.window, scale=self.scale, softcap=self.softcap, backend=self.backend,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self.out_proj(out), weights

    def extra_repr(self) -> str:
        names = "embed_dim", "num_heads", "num_kv_heads", "dropout", "causal", "window", "scale", "softcap", "backend"
        shown = {name: getattr(self, name) for name in (*names, "context_parallel")}
        shown |= dict(dropout=self.dropout or None, causal=self.causal or None)
        return ", ".join(f"{name}={x!r}" for name, x in shown.items() if x is not None)


class SelfAttention(nn.Module):
    """Self-attention with one head and no output projection.

    Examples:
        >>> layer = fusedattn.SelfAttention(64)
        >>> output, weights = layer(torch.randn(2, 100, 64), need_weights=True)

    embed_dim is E, the width of input and output. dropout, bias, scale and backend are as in `MultiHeadAttention`.
    """

    def __init__(
        self, embed_dim: int, *, dropout: float = 0.0, bias: bool = True, scale: float | None = None,
        backend: str | None = None,
    ):  # fmt: skip
        super().__init__()
        (embed_dim,) = check_sizes(embed_dim=embed_dim)
        scale = check_options(Arguments(None, None, None, scale=scale)).scale
        check_flags(bias=bias)
        check_layer(dropout=dropout)
        check_name(backend)
        self.embed_dim, self.backend = embed_dim, backend
        self.dropout, self.scale = as_python(dropout), as_python(scale)
        self.q_proj, self.k_proj, self.v_proj = (_linear(embed_dim, embed_dim, bias) for _ in range(3))

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, key_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, weights (B, S, S) or None) for x (B, S, E), mask (S, S) or (B, S, S) and key_mask (B, S)."""
        check_input("x", x, ("batch", "length", self.embed_dim), self.q_proj)
        options = dict(dropout_p=self.dropout if self.training else 0.0, scale=self.scale, backend=self.backend)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        for name, projected in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
            if not isinstance(projected, fx.Proxy) and projected.shape[-1] != self.embed_dim:
                fail(ValueError, name, f"all {self.embed_dim} columns of its one head", projected.shape[-1])
        out, weights = attend(q, k, v, need_weights, mask=mask, key_mask=key_mask, **options)
        return out, weights  # under torch.fx the result of `attend` is one Proxy, and callers expect a pair
