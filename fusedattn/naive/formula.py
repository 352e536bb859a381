"""Attention by its definition in PyTorch, a block of rows at a time: what kernels are held to, and what a CPU runs."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..call.decode import Decode
from ..call.layout import arrange
from ..call.options import Call, autocasting, wide_dtype
from ..call.private import dispatch_modes, holds, transforms_active
from . import decode as cached, pairs
from .blocks import CACHE, CUT_ROWS, Block, Part, block, parts, readable, sized, uncut
from .inputs import prepared
from .varlen import joined, packed, padded, sequences

# A larger cap no score feels, as in the kernels; by a smaller one a quotient, or its gradient, would be infinite, and
# this one is as good: nothing of it is left beside another score.
LARGEST_CAP, SMALLEST_CAP = 2.0**60, 2.0**-60
# Bytes that autograd may keep of scores; where it were more, blocks are computed again in the backward.
BUDGET = 2**28
# Bytes of a block that is computed again. What glibc frees below 32 MiB it does not reuse where an output was put
# meanwhile: at 12288 rows of 1 head blocks of 4 MiB took 1305 MiB at their peak, these 388, and a fifth less time.
AGAIN = 2**26
SMALL = 2**12  # scores that are computed at once, whatever is seen of them


def grouped(x: Tensor, heads: int) -> Tensor:
    """(B, Hq, S, D) as (B * heads, Hq // heads * S, D): rows of heads that share a key head, one after the other."""
    batch, all_heads, rows, columns = x.shape
    return x.reshape(batch * heads, (all_heads // heads if heads else 0) * rows, columns)


def scores_of(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """(B, Hq, Sq, Sk), without a copy of a key head for each of its heads."""
    # Not by baddbmm, which could scale as well: torch 2.13 crashed on it where torch.func is inside torch.compile.
    scores = torch.bmm(grouped(query, key.shape[1]), key.flatten(0, 1).mT)
    # A selective checkpoint, which is a mode, may keep the product.
    scores = scores * scale if torch.compiler.is_compiling() or dispatch_modes() else scores.mul_(scale)
    return scores.view(*query.shape[:3], key.shape[2])


def sums_of(weights: Tensor, value: Tensor) -> Tensor:
    """(B, Hq, Sq, Dv): the values that weights add up, without a copy of a value head for each of its heads."""
    return torch.bmm(grouped(weights, value.shape[1]), value.flatten(0, 1)).view(*weights.shape[:3], value.shape[3])


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


FEWEST_COPIES = scores_of, sums_of
# The same as people write it by hand.
AS_WRITTEN = (
    lambda query, key, scale: query @ _repeated(key, query.shape[1]).mT * scale,
    lambda weights, value: weights @ _repeated(value, weights.shape[1]),
)


def softmax(scores, need_lse, visible=None, empty=None, *, limits=(), sinks=None, alone=False):
    """Return (weights, lse or None) of scores (B, Hq, Sq, Sk).

    Args:
        visible: bool, broadcasts to the scores; None hides nothing. limits: pairs (columns, bool of what they hide),
            which hide as well, but in place: for code that no transform sees.
        empty: bool, broadcasts to (B, Hq, Sq, 1): rows that see nothing. Their weights are 0, their lse is -inf or the
            sink. None says that there is none.
        sinks: (1 or B, Hq), what each head attends to besides the keys.
        alone: no transform, mode or graph sees this, so what nothing keeps for a gradient is written over. To get new
            memory takes as long as a softmax.
    """
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    for columns, hidden in limits:  # autograd need not know: where a weight is 0, its score has the gradient 0
        scores.detach()[..., columns].masked_fill_(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks[:, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
        empty = None if empty is None else empty & (sinks == float("-inf"))[:, :, None, None]
    if empty is not None:
        # A row of -inf would be NaN in the softmax and in its gradient: such a row is computed as zeros, then dropped.
        scores = scores.masked_fill(empty, 0.0)
    alone = alone and not (need_lse or scores.requires_grad)
    weights = torch.softmax(scores, -1, out=scores) if alone else scores.softmax(-1)
    lse = _logsumexp(scores) if need_lse else None
    if empty is not None:
        weights = weights.masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty.squeeze(-1), float("-inf")) if need_lse else None
    return weights if sinks is None else weights[..., :-1], lse


def scored(products: Tensor, softcap: float | None, added: Iterable[Tensor]) -> Tensor:
    """Return scores from scaled products, before anything is hidden."""
    if softcap is not None and softcap <= LARGEST_CAP:
        cap = max(softcap, SMALLEST_CAP)  # in both places: a score of 0 has the derivative 1
        products = cap * torch.tanh(products / cap)
    for term in added:
        products = products + term
    return products


def _logsumexp(scores: Tensor) -> Tensor:
    """Return `scores.logsumexp(-1)`, with a right gradient where a score of 1e38 absorbs the log of the count."""
    if holds(scores.shape[-1] == 0, False):
        return scores.logsumexp(-1)
    top = scores.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)
    scores = scores - top
    # The compiler of torch 2.13 asks of logsumexp whether scores are empty, which may depend on data.
    total = scores.exp().sum(-1).log() if torch.compiler.is_compiling() else scores.logsumexp(-1)
    return total + top.squeeze(-1)


def hiding(call: Call, block: Block) -> dict:
    """Return visible, limits and empty of a block, as `softmax` takes them."""
    if holds(block.begin == block.end, False):
        return dict(empty=call.query.new_ones(1, 1, 1, 1, dtype=torch.bool))
    if call.left is call.right is call.mask is call.bias is call.key_mask is call.query_mask is None:
        return {}
    quick = readable(call)
    if quick and pairs.only_edges(call, block):
        return dict(limits=pairs.edges(call, block))
    seen = pairs.visible(call, block)
    assert seen is not None
    empty = ~seen.any(-1, keepdim=True)
    if not quick:
        return dict(visible=seen, empty=empty)
    return dict(limits=[(slice(None), ~seen)], empty=empty if empty.any() else None)


def of_block(part: Part, block: Block, need_lse: bool, need_weights: bool, products: tuple = FEWEST_COPIES) -> tuple:
    """Return (output, lse or None, weights or None) of a block, every step in the dtype of the inputs.

    products: how scores and output are multiplied.
    """
    call, (first, last, begin, end) = part.call, block
    all_rows, all_keys = last - first == call.query.shape[2], end - begin == call.key.shape[2]
    query = call.query if all_rows else call.query[:, :, first:last]
    key, value = (x if all_keys else x[:, :, begin:end] for x in (call.key, call.value))
    multiply, add_up = products
    scores = scored(multiply(query, key, call.scale), call.softcap, pairs.added(call, block, query.dtype))
    alone = readable(call)
    weights, lse = softmax(scores, need_lse, sinks=call.sinks, alone=alone, **hiding(call, block))
    factor = pairs.factor(call, part.planes, block)
    if factor is not None:
        weights = weights.mul_(factor) if alone and not weights.requires_grad else weights * factor
    out = add_up(weights, value)
    # The values are 0 already. This zeroes incoming gradients of hidden keys, which may be NaN.
    if call.key_mask is not None and need_weights:
        weights = weights.masked_fill(~call.key_mask[:, None, None, begin:end], 0.0)
    if call.query_mask is not None:
        hidden = ~call.query_mask[:, None, first:last]
        out = out.masked_fill(hidden[..., None], 0.0)
        if need_weights:
            weights = weights.masked_fill(hidden[..., None], 0.0)
        if need_lse:
            nothing = lse.new_full((), float("-inf")) if call.sinks is None else call.sinks.detach()[:, :, None]
            lse = torch.where(hidden, nothing, lse)
    return out, lse, weights if need_weights else None


def of_all(call: Call, need_lse: bool, need_weights: bool, products: tuple = FEWEST_COPIES) -> tuple:
    part = uncut(call)
    return of_block(part, part.blocks[0], need_lse, need_weights, products)


def _block_of(block: Block, planes: Tensor | None, need_lse: bool, *fields) -> tuple:
    """`of_block` of the fields of a Call, which torch's checkpoint tracks only as arguments of their own."""
    return of_block(Part(Call(*fields), planes, []), block, need_lse, False)


def most(call: Call) -> int:
    return min(BUDGET, CACHE * torch.get_num_threads()) if call.query.device.type == "cpu" else BUDGET


def _is_one(call: Call) -> bool:
    """Return whether cutting a call into blocks would save nothing, or cost more than it saves."""
    (batch, heads, rows, _), keys = call.query.shape, call.key.shape[2]
    scores = batch * heads * rows * keys
    if scores <= SMALL and call.query.device.type == "cpu":
        return True
    if scores * wide_dtype(call).itemsize > most(call):
        return False
    # Of few rows each sees nearly all keys that one of them sees.
    return call.left is call.right is None or (rows <= CUT_ROWS and block(call, 0, rows) == (0, rows, 0, keys))


def _kept(call: Call, all_parts: list[list[Part]], need_lse: bool) -> int:
    """Return how many bytes of scores autograd would keep for the backward."""
    each = 1 + need_lse + (call.softcap is not None) + 2 * (call.seed is not None)
    pairs = sum(
        part.call.query.shape[0] * part.call.query.shape[1] * (last - first) * (end - begin)
        for row in all_parts
        for part in row
        for first, last, begin, end in part.blocks
    )
    return each * pairs * call.query.element_size()


def _of_part(part: Part, need_lse: bool, again: bool) -> tuple:
    """(output, lse or None, None) of a part. again: its scores are computed again in the backward, and not kept."""
    if again:
        recomputed = functools.partial(checkpoint, _block_of, use_reentrant=False, preserve_rng_state=False)
        done = [recomputed(block, part.planes, need_lse, *part.call) for block in part.blocks]
    else:
        done = [of_block(part, block, need_lse, False) for block in part.blocks]
    return joined(done, 2)


def _blocks(call: Call, need_lse: bool) -> tuple:
    """(output, lse or None, None), a block at a time."""
    if not sized(call):  # with open sizes torch 2.10 cannot export what merges dimensions
        return of_all(call, need_lse, False, AS_WRITTEN)
    if _is_one(call):
        return of_all(call, need_lse, False)
    all_parts = parts(call, most(call))
    needs_grad = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in call)
    several = len(all_parts) > 1 or len(all_parts[0]) > 1 or len(all_parts[0][0].blocks) > 1
    # torch.func forbids the hooks that computing again needs.
    again = several and needs_grad and not transforms_active() and _kept(call, all_parts, need_lse) > BUDGET
    if again:
        all_parts = parts(call, max(most(call), AGAIN))
    return joined([joined([_of_part(part, need_lse, again) for part in row], 1) for row in all_parts], 0)


def without_autocast(function):
    """`function` of a Call and more, with autocast off: what it should cast, `checked` has cast."""

    @functools.wraps(function)
    def run(call, *rest):
        if not autocasting(call.query):
            return function(call, *rest)
        with torch.autocast(call.query.device.type, enabled=False):
            return function(call, *rest)

    return run


@without_autocast
def run_naive(call: Call, need_lse: bool, need_weights: bool) -> tuple:
    """(output, lse or None, weights or None) of a checked call: the backend "naive"."""
    if call.cu_seqlens_q is None:
        return _run(call, need_lse, need_weights)
    results = []
    for some in sequences(call):
        made, rows = padded(some)
        results.append(packed(rows, *_run(made, need_lse, need_weights)))
    out, lse, weights = joined(results, 2, call.max_seqlen_k)
    return arrange(out, call.query), lse, weights


def _run(call: Call, need_lse: bool, need_weights: bool) -> tuple:
    """Compute `run_naive` for a call that is not packed; it may be padded."""
    made = prepared(call, wide_dtype(call))
    if need_weights and sized(made) and _is_one(made):
        out, lse, weights = of_all(made, need_lse, True)
    else:
        out, lse, _ = _blocks(made, need_lse)
        # All rows at once: they are what was asked for. The output stays what it is without them.
        products = FEWEST_COPIES if sized(made) else AS_WRITTEN
        weights = of_all(made, False, True, products)[2] if need_weights else None
    weights = weights.to(call.query.dtype).contiguous() if need_weights else None
    return arrange(out, call.query), lse, weights


def run_eagerly(call: Call, need_lse: bool, need_weights: bool) -> tuple:
    """Compute `run_naive` with every step in the dtype of the inputs, and all rows at once."""
    return of_all(prepared(call, call.query.dtype), need_lse, need_weights, AS_WRITTEN)


def run_decode(decode: Decode, need_lse: bool, need_weights: bool) -> tuple:
    """(output, lse or None, weights or None) of a checked call to a cache, written to first: the backend "naive"."""
    cached.append(decode)
    calls = cached.by_length(decode)
    if calls is None:
        return run_naive(cached.dense(decode), need_lse, need_weights)
    results = [run_naive(call, need_lse, need_weights) for call in calls]
    out, lse, weights = joined(results, 0, decode.call.key.shape[2])
    return arrange(out, decode.call.query), lse, weights
