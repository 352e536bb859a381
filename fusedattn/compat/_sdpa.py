"""scaled_dot_product_attention with the signature and the results of torch's."""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..api import attention
from ..call import checks, rules
from ..call.checks import check_flags, check_place, check_tensors, fail, overridable, unfit
from ..call.private import holds


@overridable
def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute attention with the arguments and results of `torch.nn.functional.scaled_dot_product_attention`.

    Examples:
        >>> query = key = value = torch.randn(2, 8, 128, 64)
        >>> out = fusedattn.compat.torch.scaled_dot_product_attention(query, key, value, is_causal=True)

    A row that sees nothing is 0 and has gradients 0. attn_mask together with is_causal raises, and so do key and value
    of different lengths, for which torch's result depends on its kernel.

    Args:
        query, key, value: (..., Hq, L, D), (..., H, S, D), (..., H, S, Dv); leading dimensions broadcast as in
            `torch.matmul`. Autocast casts all three as in torch. Or three nested tensors of torch.jagged,
            (B, H, ragged, D), without attn_mask; the output is then nested.
        attn_mask: of rank 2 or more, broadcastable to (..., Hq, L, S): bool, True = may attend; or float, added to the
            scores, in query's dtype or float32. Or a causal bias of `torch.nn.attention.bias`.
        dropout_p: the fraction of weights to drop; there is no training mode.
        is_causal: row i sees keys 0 to i, whatever the lengths.
        scale: 1 / sqrt(D) by default.
        enable_gqa: key and value may have fewer heads (dimension -3): query head h reads head h // (Hq // H).

    Returns:
        (..., Hq, L, Dv) in query's dtype. Its dimensions have query's order in memory if torch's fused kernels keep
        that order. Otherwise it is contiguous.

    Raises:
        ValueError, TypeError: for arguments that do not fit.
    """
    inputs = {"query": query, "key": key, "value": value}
    check_tensors(**inputs)
    for name, tensor in inputs.items():
        jagged = query.is_nested and tensor.layout == torch.jagged
        if not jagged and (got := checks.irregular(tensor)) is not None:
            fail(TypeError, name, "a dense tensor, or nested query, key and value of layout torch.jagged", got)
        if tensor.dim() < 2:
            fail(ValueError, name, "rank 2 or more", tensor.shape)
    check_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    causal, align = is_causal, "top_left"
    if query.is_nested:
        if attn_mask is not None:
            fail(TypeError, "attn_mask", "None with nested tensors", type(attn_mask).__name__)
        heads = query.shape[1]
        for name, tensor in inputs.items():
            if tensor.dim() == query.dim() and tensor.shape[1] != heads and not enable_gqa:
                fail(ValueError, name, f"the {heads} heads of query, or enable_gqa=True", f"{tensor.shape[1]} heads")
        return attention(query, key, value, causal=causal, align=align, scale=scale, dropout_p=dropout_p)
    if query.shape[-1] == key.shape[-1] == 0 or value.shape[-1] == 0:
        # An added column of zeros changes no score and no other column.
        q, k, v = (pad(x, (0, int(x.shape[-1] == 0))) for x in inputs.values())
        out = scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out[..., : value.shape[-1]].contiguous()
    if attn_mask is not None:
        if is_causal:
            fail(ValueError, "is_causal", "False, because attn_mask is given", True)
        if variant := _causal_bias(attn_mask, query.shape[-2], key.shape[-2]):
            attn_mask, causal, align = None, True, variant

    if enable_gqa:
        for name, tensor in inputs.items():
            if tensor.dim() < 3:
                fail(ValueError, name, "rank 3 or more with enable_gqa", tensor.shape)
            if not checks.divides(query.shape[-3], tensor.shape[-3]):
                expected = f"a number of heads that divides the {query.shape[-3]} heads of query"
                fail(ValueError, name, expected, f"{tensor.shape[-3]} heads")
    leading = _common({name: x.shape[: -3 if enable_gqa else -2] for name, x in inputs.items()})
    leading = (*leading, query.shape[-3]) if enable_gqa else leading
    batch, heads = leading[:-1], leading[-1] if leading else 1
    q, k, v = (_rank4(x, batch) for x in inputs.values())
    q = q.expand(-1, heads, -1, -1) if not enable_gqa and not holds(q.shape[1] == heads, False) else q
    if k.shape[1] != v.shape[1]:  # `attention` shares heads only if key and value have equally many
        k, v = (x.repeat_interleave(heads // max(x.shape[1], 1), 1) for x in (k, v))

    mask = bias = None
    if attn_mask is not None:
        _check_mask(attn_mask, query, (*leading, query.shape[-2], key.shape[-2]))
        mask = attn_mask if attn_mask.dim() == 2 else _rank4(attn_mask, batch, shared=True)
        mask, bias = (mask, None) if mask.dtype == torch.bool else (None, mask)
    out = attention(q, k, v, mask=mask, bias=bias, causal=causal, align=align, scale=scale, dropout_p=dropout_p)
    fused = query.dim() == 4 and query.shape[-1] == value.shape[-1] and all(x.stride(-1) == 1 for x in inputs.values())
    # Do not use is_shape here: it makes torch assert at run time that the sizes agree.
    leading_pairs = (zip(x.shape[:2], query.shape[:2], strict=True) for x in (key, value))
    if fused and (enable_gqa or all(holds(a == b, False) for pairs in leading_pairs for a, b in pairs)):
        return out
    return out.contiguous().view(*leading, *out.shape[2:])


def _causal_bias(mask: Any, rows: int, keys: int) -> str | None:
    """Return the option align= for a causal bias of torch.nn.attention.bias; None for any other mask."""
    module = sys.modules.get("torch.nn.attention.bias")  # a caller with such a bias has imported it
    if module is None or not isinstance(mask, module.CausalBias):
        return None
    if (mask.seq_len_q, mask.seq_len_kv) != (rows, keys):
        fail(ValueError, "attn_mask", f"a bias for lengths {(rows, keys)}", (mask.seq_len_q, mask.seq_len_kv))
    return "top_left" if mask.variant == module.CausalVariant.UPPER_LEFT else "bottom_right"


def _common(shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    common = [1] * max(map(len, shapes.values()))
    for name, shape in shapes.items():
        for axis in range(-len(shape), 0):
            if holds(common[axis] == 1, False):
                common[axis] = shape[axis]
            elif not checks.is_size(shape[axis], 1, common[axis]):
                expected = f"leading dimensions that broadcast with {tuple(common)}"
                gqa_fits = axis == -1 and name != "query" and checks.divides(common[axis], shape[axis])
                hint = ": pass enable_gqa=True to share heads" * gqa_fits
                fail(ValueError, name, expected, f"{tuple(shape)}{hint}")
    return tuple(common)


def _rank4(tensor: Tensor, batch: tuple[int, ...], shared: bool = False) -> Tensor:
    """Expand all dimensions but the last three to `batch`, and flatten them. shared: if all are 1, do not expand."""
    if tensor.dim() == 4 and len(batch) == 1 and (shared or holds(tensor.shape[0] == batch[0], False)):
        return tensor
    tensor = tensor[(None,) * (max(len(batch), 1) + 3 - tensor.dim())]
    batch = (1,) * len(batch) if shared and all(holds(size == 1, False) for size in tensor.shape[:-3]) else batch
    return tensor.expand(*batch or (1,), *tensor.shape[-3:]).reshape(math.prod(batch), *tensor.shape[-3:])


def _check_mask(mask: Tensor, query: Tensor, scores: tuple[int, ...]) -> None:
    check_place("attn_mask", mask, query.device)
    dtype = rules.autocast_dtype(query)
    cast = rules.CAST if dtype in rules.CAST and rules.autocasting(query) else ()
    if mask.dtype not in (torch.bool, torch.float32, dtype, *cast):
        allowed = " or ".join(map(str, dict.fromkeys((torch.bool, torch.float32, dtype, *cast))))
        fail(TypeError, "attn_mask", allowed, unfit(mask, "call .bool() or .float() on it"))
    if mask.dim() < 2 or not checks.broadcasts(mask, scores):
        fail(ValueError, "attn_mask", f"shape {scores}, or one of rank 2 or more that broadcasts to it", mask.shape)
