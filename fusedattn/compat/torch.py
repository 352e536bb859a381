"""Drop-ins for torch's own attention: a function, a module, a converter of models, and switches for whole programs."""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.nn.utils import parametrize
from torch.types import Device

from ..call import checks
from ..call.checks import FLOATING, as_python, check_flags, check_place, check_shape, fail, unfit
from ..layers.attention import attend, check_input, check_layer
from ._sdpa import scaled_dot_product_attention
from ._switch import disable_sdpa, enable_sdpa, register, sdpa, sdpa_provider

__all__ = ["MultiheadAttention", "convert", "disable_sdpa", "enable_sdpa", "register", "scaled_dot_product_attention"]
__all__ += ["sdpa", "sdpa_provider"]
_log = logging.getLogger("fusedattn")
_ADVICE = (
    "If it calls F.scaled_dot_product_attention, use fusedattn.compat.torch.sdpa(). For a model of Hugging Face "
    'Transformers, use fusedattn.compat.transformers.register() and attn_implementation="fusedattn"'
)


def _stay(module: nn.Module, inputs: Any) -> None:
    """Do nothing. As a forward pre-hook it keeps torch.nn.TransformerEncoderLayer from computing attention itself."""


def _check_flags(**flags: Any) -> None:
    """Raise unless flags are bools, or 0 or 1, as torch.nn.MultiheadAttention allows."""
    for name, flag in flags.items():
        if not (isinstance(flag, int) and flag in (0, 1)):
            check_flags(**{name: flag})


def _check_inputs(layer: nn.MultiheadAttention, batch_dim: int, query: Tensor, key: Tensor, value: Tensor) -> None:
    # One check is enough for self-attention: a compiler traces each check in each layer of a model.
    same = query is key and key is value and layer.kdim == layer.vdim == layer.embed_dim
    for name, x in (("query", query), ("key", key), ("value", value))[: 1 if same else 3]:
        if isinstance(x, Tensor) and x.is_nested:
            expected = "a dense tensor, or a strided nested tensor as all three, batch_first and unmasked"
            fail(TypeError, name, expected, f"a nested tensor of {x.layout}")
    check_place("query", query)
    if query.dim() not in (2, 3):
        fail(ValueError, "query", "rank 2 or 3", query.shape)
    leading: list[int | str] = ["length"] * (query.dim() - 1)
    if len(leading) == 2:
        leading[batch_dim] = "batch"
    check_input("query", query, (*leading, layer.embed_dim), layer.out_proj)
    if same:
        return
    if len(leading) == 2:
        leading[batch_dim] = query.shape[batch_dim]
    check_input("key", key, (*leading, layer.kdim), layer.out_proj)
    check_input("value", value, (*key.shape[:-1], layer.vdim), layer.out_proj)


def _check_mask(name: str, mask: Tensor, query: Tensor, *shapes: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, *FLOATING):
        got = unfit(mask, "call .bool() or .float() on it")
        fail(TypeError, name, "a bool tensor, True = hidden, or a floating one, which is added to scores", got)
    check_place(name, mask, query.device)
    check_shape(name, mask, *shapes, why="as query and key have")


def _masks(attn_mask: Tensor | None, padding: Tensor | None, extra: int) -> dict[str, Tensor]:
    """Convert attn_mask and key padding to arguments of `attention`. Every query sees the `extra` appended keys."""
    masks = {}
    if attn_mask is not None:
        attn_mask = pad(attn_mask, (0, extra))
        hides = attn_mask.dtype == torch.bool
        masks["mask" if hides else "bias"] = ~attn_mask if hides else attn_mask
    if padding is not None and padding.dtype == torch.bool:
        masks["key_mask"] = ~pad(padding, (0, extra))
    elif padding is not None:
        padding = pad(padding, (0, extra))[:, None, None]
        if (bias := masks.get("bias")) is not None:  # so that finfo.min + finfo.min stays finite
            dtype = torch.promote_types(torch.promote_types(bias.dtype, padding.dtype), torch.float32)
            hidden = (bias == float("-inf")) | (padding == float("-inf"))
            both = (bias.to(dtype) + padding.to(dtype)).clamp_min(torch.finfo(dtype).min)
            padding = both.masked_fill(hidden, float("-inf"))
        masks["bias"] = padding
    return masks


class MultiheadAttention(nn.MultiheadAttention):
    """Fused torch.nn.MultiheadAttention with the same constructor, parameters, initial values, state dict and forward.

    Examples:
        >>> layer, x = fusedattn.compat.torch.MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 100, 64)
        >>> output, weights = layer(x, x, x)

    torch's result depends on need_weights, on train or eval mode and on its fast path. Ours does not:

    - A query that sees nothing gets the bias of out_proj, weights 0 and finite gradients. torch returns NaN for it if
      need_weights is True.
    - is_causal is only a hint. In torch, without weights, it overrides an attn_mask that contradicts it.
    - For one seed, dropout drops the same weights with and without need_weights. bool and float masks can be mixed.
    - Keys and values that a bool key_padding_mask hides may be NaN or inf. In torch they reach the output.

    `torch.jit.script` does not compile it.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True,
        add_bias_kv: bool = False, add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None,
        batch_first: bool = False, device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        embed_dim, num_heads, dropout = map(as_python, (embed_dim, num_heads, dropout))
        kdim, vdim = (embed_dim if x is None else as_python(x) for x in (kdim, vdim))
        checks.check_sizes(embed_dim=embed_dim, num_heads=num_heads, kdim=kdim, vdim=vdim)
        if embed_dim % num_heads:
            fail(ValueError, "num_heads", f"a divisor of embed_dim, {embed_dim}", num_heads)
        check_layer(dropout=dropout)
        _check_flags(bias=bias, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, batch_first=batch_first)
        flags = bias, add_bias_kv, add_zero_attn
        super().__init__(embed_dim, num_heads, dropout, *flags, kdim, vdim, batch_first, device, dtype)
        self._leave_fast_path()

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's own has no types
        self._leave_fast_path()

    def _leave_fast_path(self) -> None:
        # Do not use register_forward_pre_hook: after unpickling, another hook may get the same number.
        hooks: Any = self._forward_pre_hooks
        hooks.setdefault("fusedattn", _stay)
        if type(self) is MultiheadAttention:
            # torch.fx does not trace into modules of torch.nn.
            self.__module__ = nn.MultiheadAttention.__module__

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attend from query to key and value.

        Args:
            query: (L, N, E); (N, L, E) with batch_first; or (L, E), without a batch.
            key, value: (S, N, kdim), (S, N, vdim), in the layout of query. With batch_first and without masks, one
                nested tensor of torch.strided may be all three.
            key_padding_mask: (N, S), or (S,): bool, True = hidden, or float, added to the scores.
            attn_mask: (L, S), (N * heads, L, S) or, for a query (L, E), (heads, L, S); bool, True = hidden, or float.
            need_weights: also return the weights, after dropout.
            average_attn_weights: return the mean of the weights over the heads.
            is_causal: a hint that attn_mask is causal. It needs attn_mask, and changes nothing.

        Returns:
            (output, weights or None). output is contiguous, in query's layout. weights: (N, L, S) if averaged, else
            (N, heads, L, S), without N if query has none. add_bias_kv and add_zero_attn each add a visible key to S.

        Raises:
            ValueError, TypeError: for arguments that do not fit.
        """
        _check_flags(need_weights=need_weights, average_attn_weights=average_attn_weights, is_causal=is_causal)
        need_weights = bool(need_weights)
        unmasked = query is key and key is value and attn_mask is None and key_padding_mask is None
        if unmasked and self.batch_first and isinstance(query, Tensor) and query.is_nested:
            if query.layout == torch.strided:  # a padded batch as torch.nn.TransformerEncoder packs it
                return self._within(query, need_weights, None, average_attn_weights, is_causal)
        if attn_mask is None and is_causal:
            fail(ValueError, "is_causal", "False without an attn_mask", "True: pass a causal attn_mask with it")
        batch_dim, along = (0, 1) if self.batch_first else (1, 0)
        _check_inputs(self, batch_dim, query, key, value)
        batched = query.dim() == 3
        if not batched:  # a tensor passed twice stays one object, for `_project`
            batches = {id(x): x.unsqueeze(batch_dim) for x in (query, key, value)}
            query, key, value = (batches[id(x)] for x in (query, key, value))
        batch, rows, keys = query.shape[batch_dim], query.shape[along], key.shape[along]
        if attn_mask is not None:
            _check_mask("attn_mask", attn_mask, query, (rows, keys), (batch * self.num_heads, rows, keys))
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (batch, self.num_heads))
        if key_padding_mask is not None:
            _check_mask("key_padding_mask", key_padding_mask, query, (batch, keys) if batched else (keys,))
            key_padding_mask = key_padding_mask.reshape(batch, keys)
            if key_padding_mask.dtype == torch.bool:
                # A key_mask keeps hidden keys out of the output. The projections' gradients need them finite, too.
                hidden = (key_padding_mask if along else key_padding_mask.mT).unsqueeze(-1)
                same, key = key is value, key.masked_fill(hidden, 0.0)
                value = key if same else value.masked_fill(hidden, 0.0)

        q, k, v = self._project(query, key, value)
        k, v = self._extend(k, v, along)
        order, back = ((0, 2, 1, 3), (0, 2, 1, 3)) if along else ((1, 2, 0, 3), (2, 0, 1, 3))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).permute(order) for x in (q, k, v))
        masks = _masks(attn_mask, key_padding_mask, k.shape[2] - keys)
        out, weights = attend(q, k, v, need_weights, dropout_p=self.dropout if self.training else 0.0, **masks)
        # Call the module: it may be a quantized layer or an adapter, or have a hook.
        out = self.out_proj(out.permute(back).flatten(2))
        weights = weights.mean(1) if weights is not None and average_attn_weights else weights
        if not batched:
            out, weights = out.squeeze(batch_dim), None if weights is None else weights.squeeze(0)
        return out, weights

    def _within(self, x: Tensor, *options: Any) -> tuple[Tensor, Tensor | None]:
        """Attend within each sequence of a nested tensor; return (nested output, padded weights or None)."""
        lengths = [len(sequence) for sequence in x.unbind()]
        padded = torch.nested.to_padded_tensor(x, 0.0)
        padding = torch.arange(padded.shape[1], device=x.device) >= torch.tensor(lengths, device=x.device)[:, None]
        out, weights = self.forward(padded, padded, padded, padding, *options)
        return torch.nested.as_nested_tensor([row[:end] for row, end in zip(out, lengths, strict=True)]), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return the projections q, k and v. Inputs that are the same tensor share one matrix product."""
        weight, bias, width = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if weight is not None and query is key and key is value:
            return linear(query, weight, bias).chunk(3, -1)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.chunk(3)
        biases = [None] * 3 if bias is None else bias.chunk(3)
        q = linear(query, weights[0], biases[0])
        if weight is not None and key is value:
            return q, *linear(key, weight[width:], None if bias is None else bias[width:]).chunk(2, -1)
        return q, linear(key, weights[1], biases[1]), linear(value, weights[2], biases[2])

    def _extend(self, k: Tensor, v: Tensor, along: int) -> tuple[Tensor, Tensor]:
        """Append bias_k and bias_v, and the zeros of add_zero_attn, to k and v in dimension `along`."""
        if self.bias_k is None and not self.add_zero_attn:
            return k, v
        shape = [1 if dim == along else size for dim, size in enumerate(k.shape)]
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, more.expand(shape)], along) for x, more in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(shape)], along) for x in (k, v))
        return k, v


def convert(model: nn.Module) -> nn.Module:
    """Replace each torch.nn.MultiheadAttention in a model by a fused MultiheadAttention, in place; return the model.

    Examples:
        >>> model = fusedattn.compat.torch.convert(torch.nn.Transformer(64, 4))

    New modules share the parameters, buffers, hooks, flags and mode of the old ones; names, order and state dict stay.
    Not replaced: modules in a plain list, and subclasses of torch's module, except those that parametrizations make. A
    second call changes nothing. Copies and pickles of a converted model stay converted. The logger "fusedattn" reports
    the number of replaced modules (INFO), and warns if there are none or if subclasses remain. Given a bare
    torch.nn.MultiheadAttention, it returns a converted one.

    Converted models skip the fast path of torch.nn.TransformerEncoderLayer (eval without gradients) and the nested
    tensors of torch.nn.TransformerEncoder: outputs at padded positions are finite, not 0. A forward pre-hook of the new
    modules prevents the fast path, which is back if you remove all hooks. torch.fx treats the modules as leaves.

    Raises:
        TypeError: if model is not a module.
    """
    if not isinstance(model, nn.Module):
        fail(TypeError, "model", "a torch.nn.Module", type(model).__name__)
    attentions = [x for x in model.modules() if isinstance(x, nn.MultiheadAttention)]
    before = sum(isinstance(x, MultiheadAttention) for x in attentions)
    torchs = [x for x in attentions if parametrize.type_before_parametrizations(x) is nn.MultiheadAttention]
    left = [type(x).__name__ for x in attentions if not (isinstance(x, MultiheadAttention) or x in torchs)]
    fused: dict[nn.Module | None, nn.Module] = {x: _converted(x) for x in torchs}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in fused:
                parent._modules[name] = fused[child]
    for encoder in (x for x in model.modules() if isinstance(x, nn.TransformerEncoder)):
        if any(isinstance(x, MultiheadAttention) for x in encoder.modules()):
            encoder.use_nested_tensor = False
    kind = type(model).__name__
    if fused or before:
        already = f"; {before} were converted before" if before else ""
        _log.info("convert: replaced %d torch.nn.MultiheadAttention in %s%s", len(fused), kind, already)
        if left:
            _log.warning("convert: left subclasses of torch's module as they are: %s", ", ".join(sorted(set(left))))
    else:
        but = f" ({len(left)} of its subclasses stay as they are)" if left else ""
        text = "convert: replaced nothing, because %s has no torch.nn.MultiheadAttention%s. %s"
        _log.warning(text, kind, but, _ADVICE)
    return fused.get(model, model)


def _converted(module: nn.MultiheadAttention) -> MultiheadAttention:
    kind: Any = MultiheadAttention
    if type(module) is not nn.MultiheadAttention:  # a class made by a parametrization, with computed parameters
        kind = type(type(module).__name__, (MultiheadAttention,), dict(vars(type(module))))
    twin: MultiheadAttention = kind.__new__(kind)
    # Both share one dict, so that references to the old module and handles of its hooks keep working.
    object.__setattr__(twin, "__dict__", module.__dict__)
    twin._leave_fast_path()
    return twin
