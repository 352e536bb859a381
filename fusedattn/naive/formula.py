"""The definition of attention in PyTorch, a block of rows at a time. Kernels must agree with it."""

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..call.decode import Decode
from ..call.layout import arrange
from ..call.options import Call, wide_dtype
from ..call.private import OLD_COMPILER, dispatch_modes, holds, transforms_active
from ..call.rules import autocasting
from . import pairs
from .blocks import CACHE, CUT_ROWS, Block, block, parts, readable, sized, whole_block
from .decode import append, by_length, dense
from .pairs import prepared
from .varlen import joined, packed, padded, sequences

# A softcap above LARGEST_CAP has no effect and is skipped. One below SMALLEST_CAP is raised to it: score / softcap or
# its gradient could be infinite, and scores capped that low are as good as 0. The kernels do the same.
LARGEST_CAP, SMALLEST_CAP = 2.0**60, 2.0**-60
# Bytes of scores that autograd may keep. Beyond that, the backward recomputes blocks.
BUDGET = 2**28
# Bytes of scores of a recomputed block. Tensors below 32 MiB fragment glibc's memory: with 12288 rows of 1 head, the
# peak was 1305 MiB with blocks of 4 MiB. Blocks of this size need 388 MiB, and a fifth less time.
RECOMPUTED = 2**26


def grouped(x: Tensor, heads: int) -> Tensor:
    """Return (B, Hq, S, D) as (B * heads, Hq // heads * S, D), which joins the query heads of a key head."""
    batch, all_heads, rows, columns = x.shape
    return x.reshape(batch * heads, (all_heads // heads if heads else 0) * rows, columns)


def scores_of(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return scale * query @ key.T, (B, Hq, Sq, Sk), without repeating key heads."""
    # baddbmm could also scale, but torch 2.13 crashed on it with torch.func inside torch.compile.
    scores = torch.bmm(grouped(query, key.shape[1]), key.flatten(0, 1).mT)
    # Under a dispatch mode, do not overwrite the product: a selective checkpoint may keep it.
    scores = scores * scale if torch.compiler.is_compiling() or dispatch_modes() else scores.mul_(scale)
    return scores.view(*query.shape[:3], key.shape[2])


def sums_of(weights: Tensor, value: Tensor) -> Tensor:
    """Return weights @ value, (B, Hq, Sq, Dv), without repeating value heads."""
    return torch.bmm(grouped(weights, value.shape[1]), value.flatten(0, 1)).view(*weights.shape[:3], value.shape[3])


def repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _each_repeated(x: Tensor, heads: int) -> Tensor:
    # Before torch 2.13 repeat_interleave cannot be exported with dynamic lengths.
    if not (OLD_COMPILER and 0 < x.shape[1] < heads):
        return repeated(x, heads)
    return torch.cat([head for head in x.split(1, 1) for _ in range(heads // x.shape[1])], 1)


FEWEST_COPIES = scores_of, sums_of
# The same products as users write them, with repeated key heads.
AS_WRITTEN = (
    lambda query, key, scale: query @ _each_repeated(key, query.shape[1]).mT * scale,
    lambda weights, value: weights @ _each_repeated(value, weights.shape[1]),
)


def softmax(scores, need_lse, visible=None, empty=None, *, limits=(), sinks=None, in_place=False):
    """Return (weights, lse or None) of scores (B, Hq, Sq, Sk)."""
    # visible: bool, broadcasts to the scores; None hides nothing. limits: [(slice of columns, bool: pairs in them whose
    # scores become -inf)], not under a transform. empty: bool, broadcasts to (B, Hq, Sq, 1): rows that see nothing,
    # which get weights 0 and lse -inf or the sink. sinks: (1 or B, Hq), an additional logit for each head. in_place:
    # overwrite scores that no gradient needs, because new memory takes as long as the softmax; not under a transform, a
    # dispatch mode or a compiler.
    scores = scores if visible is None else scores.masked_fill(~visible, float("-inf"))
    for columns, hidden in limits:  # detached: a score whose weight is 0 has the gradient 0 anyway
        scores.detach()[..., columns].masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, :, None, None].expand(*scores.shape[:3], 1)], -1)
        empty = None if empty is None else empty & (sinks == float("-inf"))[:, :, None, None]
    if empty is not None:
        # The softmax of a row of -inf, and its gradient, would be NaN. Scores of 0 stand in, and the weights become 0.
        scores = scores.masked_fill(empty, 0.0)
    in_place = in_place and not (need_lse or scores.requires_grad)
    weights = torch.softmax(scores, -1, out=scores) if in_place else scores.softmax(-1)
    lse = _logsumexp(scores) if need_lse else None
    if empty is not None:
        weights = weights.masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty.squeeze(-1), float("-inf")) if need_lse else None
    return weights if sinks is None else weights[..., :-1], lse


def scored(products: Tensor, softcap: float | None, added: Iterable[Tensor]) -> Tensor:
    """Return scores from scaled products: apply the softcap, then add the `added` terms."""
    if softcap is not None and softcap <= LARGEST_CAP:
        cap = max(softcap, SMALLEST_CAP)  # used to multiply and to divide, so that the derivative at 0 is 1
        products = cap * torch.tanh(products / cap)
    for term in added:
        products = products + term
    return products


def _logsumexp(scores: Tensor) -> Tensor:
    """Return `scores.logsumexp(-1)`, with a right gradient even for scores of 1e38, which absorb the log of the sum."""
    if holds(scores.shape[-1] == 0, False):
        return scores.logsumexp(-1)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)
    scores = scores - top
    # Compiled by torch 2.13, logsumexp guards on an empty size, which may depend on data.
    total = scores.exp().sum(-1).log() if torch.compiler.is_compiling() else scores.logsumexp(-1)
    return total + top.squeeze(-1)


def hiding(call: Call, block: Block, in_place: bool) -> dict:
    """Return arguments of `softmax` that hide pairs of a block: `empty`, and `limits` if `in_place`, else `visible`."""
    if holds(block.begin == block.end, False):
        return dict(empty=call.query.new_ones(1, 1, 1, 1, dtype=torch.bool))
    if in_place and (edges := pairs.edges(call, block)) is not None:
        return dict(limits=edges)
    if (seen := pairs.visible(call, block)) is None:
        return {}
    empty = ~seen.any(-1, keepdim=True)
    if not in_place:
        return dict(visible=seen, empty=empty)
    return dict(limits=[(slice(None), ~seen)], empty=empty if empty.any() else None)


def of_block(call: Call, block: Block, need_lse: bool, need_weights: bool, products: tuple = FEWEST_COPIES) -> tuple:
    """Return (output, lse or None, weights or None) of a block. products: functions for q @ k.T and weights @ v."""
    first, last, begin, end = block
    all_rows, all_keys = last - first == call.query.shape[2], end - begin == call.key.shape[2]
    query = call.query if all_rows else call.query[:, :, first:last]
    key, value = (x if all_keys else x[:, :, begin:end] for x in (call.key, call.value))
    products_of, output_of = products
    scores = scored(products_of(query, key, call.scale), call.softcap, pairs.added(call, block, query.dtype))
    in_place = readable(call)
    weights, lse = softmax(scores, need_lse, sinks=call.sinks, in_place=in_place, **hiding(call, block, in_place))
    if (factor := pairs.factor(call, block)) is not None:
        weights = weights.mul_(factor) if in_place and not weights.requires_grad else weights * factor
    out = output_of(weights, value)
    # These weights are 0 already. Masking them again also zeroes their incoming gradients, which may be NaN.
    if call.key_mask is not None and need_weights:
        weights = weights.masked_fill(~call.key_mask[:, None, None, begin:end], 0.0)
    if call.query_mask is not None:
        hidden = ~call.query_mask[:, None, first:last]
        out = out.masked_fill(hidden[..., None], 0.0)
        weights = weights.masked_fill(hidden[..., None], 0.0) if need_weights else weights
        if need_lse and call.sinks is not None:
            lse = torch.where(hidden, call.sinks.detach()[:, :, None], lse)
    return out, lse, weights if need_weights else None


def of_all(call: Call, need_lse: bool, need_weights: bool, products: tuple = FEWEST_COPIES) -> tuple:
    return of_block(call, whole_block(call), need_lse, need_weights, products)


def _recomputed(call: Call, block: Block, need_lse: bool) -> tuple:
    """Return `of_block` without weights. Autograd saves no scores, because the backward computes the block again."""

    def run(*fields):  # torch's checkpoint takes tensors as separate arguments
        return of_block(Call(*fields), block, need_lse, False)

    return checkpoint(run, *call, use_reentrant=False, preserve_rng_state=False)


def most(call: Call) -> int:
    return min(BUDGET, CACHE * torch.get_num_threads()) if call.query.device.type == "cpu" else BUDGET


def _is_one(call: Call) -> bool:
    """Return whether computing the whole call as one block is about as fast as computing several blocks."""
    (batch, heads, rows, _), keys = call.query.shape, call.key.shape[2]
    scores = batch * heads * rows * keys
    if scores * wide_dtype(call.query.dtype).itemsize > most(call):
        return False
    # Few rows see nearly the same keys, so cutting them skips little.
    return call.left is call.right is None or (rows <= CUT_ROWS and block(call, 0, rows) == (0, rows, 0, keys))


def _saved_bytes(call: Call, blocks: list[Block], need_lse: bool) -> int:
    copies = 1 + need_lse + (call.softcap is not None) + 2 * (call.seed is not None)
    pairs = sum((last - first) * (end - begin) for first, last, begin, end in blocks)
    return copies * pairs * call.query.shape[0] * call.query.shape[1] * call.query.element_size()


def _in_blocks(call: Call, need_lse: bool) -> tuple:
    """Return (output, lse or None, None) of a call, computed a block at a time."""
    cut = calls, blocks = parts(call, most(call))
    needs_grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call)
    several = len(calls) > 1 or len(calls[0]) > 1 or len(blocks) > 1
    # torch.func forbids the hooks of a checkpoint.
    if several and needs_grad and not transforms_active() and _saved_bytes(call, blocks, need_lse) > BUDGET:
        cut = parts(call, max(most(call), RECOMPUTED))
        return by_part(lambda part, block: _recomputed(part, block, need_lse), cut)
    return by_part(lambda part, block: of_block(part, block, need_lse, False), cut)


def without_autocast(function):
    """Disable autocast in a function whose first argument is a Call, because its inputs are already cast."""

    @functools.wraps(function)
    def run(call, *rest):
        if not autocasting(call.query):
            return function(call, *rest)
        with torch.autocast(call.query.device.type, enabled=False):
            return function(call, *rest)

    return run


def run_naive(call: Call, need_lse: bool, need_weights: bool) -> tuple:
    """Return (output, lse or None, weights or None) of a checked call: the backend "naive"."""
    return by_sequence(lambda padded: run_padded(padded, need_lse, need_weights), call)


def by_part(run: Callable[..., tuple], *cuts: tuple[list[list[Call]], list[Block]]) -> tuple:
    """Join the results of run(a part of each call, block) for each block. cuts: `parts` of calls of one shape."""
    blocks, rows = cuts[0][1], []
    for some in zip(*[calls for calls, _ in cuts], strict=True):
        columns = [joined([run(*each, block) for block in blocks], 2) for each in zip(*some, strict=True)]
        rows.append(joined(columns, 1))
    return joined(rows, 0)


def by_sequence(run: Callable[..., tuple], *calls: Call) -> tuple:
    """Return run(*calls). Packed calls, which must have the same offsets, are first padded to batches."""
    call = calls[0]
    if call.cu_seqlens_q is None:
        return run(*calls)
    results = []
    for some in zip(*[sequences(x) for x in calls], strict=True):
        batches = [padded(x) for x in some]
        results.append(packed(batches[0][1], *run(*[batch for batch, _ in batches])))
    out, lse, weights = joined(results, 2, call.max_seqlen_k)
    return arrange(out, call.query, out.dtype), lse, weights


@without_autocast
def run_padded(call: Call, need_lse: bool, need_weights: bool) -> tuple:
    """Return `run_naive` of a call that is not packed, or of a batch that `padded` made (it has offsets)."""
    wide = prepared(call)
    if not sized(wide):  # with symbolic sizes torch 2.10 cannot export merged dimensions
        out, lse, weights = of_all(wide, need_lse, need_weights, AS_WRITTEN)
    elif _is_one(wide):
        out, lse, weights = of_all(wide, need_lse, need_weights)
    else:
        out, lse, weights = _in_blocks(wide, need_lse)
        if need_weights:  # for all rows at once, without changing any bit of the output
            weights = of_all(wide, False, True)[2]
    weights = weights.to(call.query.dtype).contiguous() if need_weights else None
    return arrange(out, call.query), lse, weights


def run_decode(decode: Decode, need_lse: bool, need_weights: bool) -> tuple:
    """Append new keys, and return (output, lse or None, weights or None) of a Decode: the backend "naive"."""
    append(decode)
    if (calls := by_length(decode)) is None:
        return run_padded(dense(decode), need_lse, need_weights)
    results = [run_naive(call, need_lse, need_weights) for call in calls]
    out, lse, weights = joined(results, 0, decode.call.key.shape[2])
    return arrange(out, decode.call.query), lse, weights
