"""The naive path: attention as its definition reads. Every kernel is held to it, and without a GPU it is what runs."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .call import Arguments, Call, autocasting, drop
from .checks import checked
from .layout import arrange

BUDGET = 2**28  # bytes of scores held at a time; forward and backward keep a few buffers of this size


def formula(query, key, value, visible=None, scale=1.0, need_lse=True):
    """(output, lse or None, weights) by the definition, every step in the dtype of the inputs.

    Args:
        query, key, value: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv).
        visible: bool, broadcasts to (B, Hq, Sq, Sk); None is all. A row that sees nothing has output 0 and lse -inf.
    Returns: (B, Hq, Sq, Dv), (B, Hq, Sq) and (B, Hq, Sq, Sk).
    """
    if key.shape[1] != query.shape[1]:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * scale
    if visible is not None:
        # A row of -inf would be NaN in the softmax and in its gradient: such a row is computed as zeros, then dropped.
        empty = ~visible.any(-1, keepdim=True)
        scores = scores.masked_fill(~visible, float("-inf")).masked_fill(empty, 0.0)
    weights = scores.softmax(-1)
    lse = scores.logsumexp(-1) if need_lse else None
    if visible is not None:
        weights = weights.masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty.squeeze(-1), float("-inf")) if need_lse else None
    return weights @ value, lse, weights


def visible(call: Call, first: int, last: int) -> Tensor | None:
    """Which keys rows first .. last - 1 may attend, broadcastable to (B, Hq, last - first, Sk); None is all of them."""
    conditions = []
    if call.mask is not None:
        conditions.append(call.mask if call.mask.shape[-2] == 1 else call.mask[:, :, first:last])
    if call.key_mask is not None:
        conditions.append(call.key_mask[:, None, None, :])
    if call.query_mask is not None:
        conditions.append(call.query_mask[:, None, first:last, None])
    if call.left is not None or call.right is not None:
        device, keys = call.query.device, call.key.shape[2]
        shift = 0 if call.top_left else keys - call.query.shape[2]
        row = torch.arange(first, last, device=device)[:, None] + shift
        key = torch.arange(keys, device=device)[None, :]
        if call.left is not None:
            conditions.append(key >= row - call.left)
        if call.right is not None:
            conditions.append(key <= row + call.right)
    if not conditions:
        return None
    seen = conditions[0]
    for condition in conditions[1:]:
        seen = seen & condition
    return seen


def _prepared(call: Call, dtype: torch.dtype) -> Call:
    """The call in `dtype`, with zeros where key_mask and query_mask say that anything may stand."""
    if call.query.dtype == dtype and call.key_mask is None and call.query_mask is None:
        return call
    query, key, value = call.query.to(dtype), call.key.to(dtype), call.value.to(dtype)
    if call.key_mask is not None:
        hidden = ~call.key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, 0.0), value.masked_fill(hidden, 0.0)
    if call.query_mask is not None:
        query = query.masked_fill(~call.query_mask[:, None, :, None], 0.0)
    return call._replace(query=query, key=key, value=value)


def _block(call: Call, first: int, last: int, need_lse: bool) -> tuple:
    """(output, lse or None) of rows first .. last - 1."""
    seen = visible(call, first, last)
    query = call.query if last - first == call.query.shape[2] else call.query[:, :, first:last]
    out, lse, _ = formula(query, call.key, call.value, seen, call.scale, need_lse)
    if call.query_mask is not None:
        # Not for the values, 0 and -inf already, but for what comes back: their gradients may be NaN.
        hidden = ~call.query_mask[:, None, first:last]
        out = out.masked_fill(hidden[..., None], 0.0)
        lse = lse.masked_fill(hidden, float("-inf")) if need_lse else None
    return out, lse


def _block_of(first: int, last: int, need_lse: bool, *fields) -> tuple:
    """`_block` as a checkpoint wants it: it keeps track of tensors that are arguments, not of those inside one."""
    return _block(Call(*fields), first, last, need_lse)


def _blocks(call: Call, need_lse: bool) -> tuple:
    """(output, lse or None), rows by the block where the scores of all of them would pass the budget."""
    batch, heads, rows, _ = call.query.shape
    row_bytes = batch * heads * call.key.shape[2] * call.query.element_size()
    # To a compiler the budget would be a guard on every size, and another graph for each length.
    if torch.compiler.is_compiling() or rows * row_bytes <= BUDGET:
        return _block(call, 0, rows, need_lse)
    step = max(1, BUDGET // row_bytes)
    spans = [(first, min(first + step, rows)) for first in range(0, rows, step)]
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (call.query, call.key, call.value))
    # Recomputed in the backward, so that no block's weights outlive it. torch.func forbids the hooks this needs.
    if needs_grad and not torch._C._are_functorch_transforms_active():
        parts = [
            checkpoint(_block_of, *span, need_lse, *call, use_reentrant=False, preserve_rng_state=False)
            for span in spans
        ]
    else:
        parts = [_block(call, *span, need_lse) for span in spans]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2) if need_lse else None


def _wide(call: Call) -> torch.dtype:
    return torch.promote_types(call.query.dtype, torch.float32)


def run(call: Call, need_lse: bool) -> tuple:
    """(output, lse or None) of a checked call: the backend "naive"."""
    if autocasting(call.query):
        with torch.autocast(call.query.device.type, enabled=False):
            return run(call, need_lse)
    out, lse = _blocks(_prepared(call, _wide(call)), need_lse)
    return arrange(out, call.query), lse


def weights(call: Call) -> Tensor:
    """(B, Hq, Sq, Sk) attention weights in query's dtype, differentiable."""
    if autocasting(call.query):
        with torch.autocast(call.query.device.type, enabled=False):
            return weights(call)
    plain = _prepared(call, _wide(call))
    seen = visible(plain, 0, plain.query.shape[2])
    return formula(plain.query, plain.key, plain.value, seen, plain.scale, need_lse=False)[2].to(call.query.dtype)


def eager(query, key, value, *, return_lse=False, **options):
    """`attention` with every step in the dtype of the inputs, and for all rows at once: what people write by hand.

    Its error is the unit that errors are measured in, and its time what `naive` means in a benchmark.
    """
    call = checked(Arguments(query, key, value, **options))
    out, lse = _block(_prepared(call, call.query.dtype), 0, call.query.shape[2], return_lse)
    return (drop(out, query.dim()), drop(lse, query.dim())) if return_lse else drop(out, query.dim())


def attention(
    query,
    key,
    value,
    *,
    mask=None,
    key_mask=None,
    query_mask=None,
    causal=False,
    window=None,
    align="bottom_right",
    scale=None,
    return_lse=False,
):
    """`fusedattn.attention`, computed naively: same arguments, same answers, any device.

    Queries are taken in blocks where the score matrix would pass `BUDGET` bytes, in the backward too; but for code that
    is compiled, where all rows are taken at once, and under torch.func, where blocks are not computed again.
    """
    call = checked(Arguments(query, key, value, mask, key_mask, query_mask, causal, window, align, scale))
    out, lse = run(call, return_lse)
    return (drop(out, query.dim()), drop(lse, query.dim())) if return_lse else drop(out, query.dim())
