"""Splits a call into dense calls (parts), and their scores into rectangles, so that hidden scores are skipped."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call.layout import narrow
from ..call.options import Call, diagonal, sliced, wide_dtype
from ..call.private import multiplies_bfloat16
from ..naive import pairs
from ..naive.blocks import Block
from ..naive.decode import alike
from ..naive.varlen import of_batches, runs

CACHE = 2**22  # bytes of an additive mask built at a time
ROWS = 32  # minimum rows of a rectangle; the kernel works on 32, 64 or 256 at a time
BAND = 64, 256  # minimum and maximum rows of a rectangle along a window
MASK_ROWS = 128  # rows of the blocks whose range of visible keys is read from a mask
WASTE = 1  # maximum ratio of the scores that a part computes to its visible ones; CALL scores more are allowed
CALL = 2**12  # scores of one head that take as long to compute as the overhead of a kernel call
FEWEST = 128  # minimum keys of a rectangle cut by a mask: float32 gradients of few keys are slower
PART = 2**17  # scores that take as long to compute as the overhead of one more part, mainly its copies
SHORT = 192  # rows below which the kernel's bfloat16 backward takes up to 5 times as long as its float32 backward,
SHORT_KEYS = 2**14  # if the elements of a head's keys are fewer than this
TINY = 16  # keys up to which bfloat16 gradients of many rows are too inaccurate
COPY = 1 / 4  # scores computed in the time of copying one element


def is_widened(dtype: torch.dtype) -> bool:
    """Return whether to compute in float32 because the kernel's backward is 4 to 10 times slower in this dtype."""
    return dtype == torch.float16 or (dtype == torch.bfloat16 and not multiplies_bfloat16())


def is_short(query: Tensor, key: Tensor) -> bool:
    """Return whether float32 computes the backward of these bfloat16 rows and keys: it is faster or more exact."""
    small = query.shape[2] < SHORT and key.shape[2:].numel() < SHORT_KEYS
    return query.dtype == torch.bfloat16 and (small or key.shape[2] <= TINY)


class Part(NamedTuple):
    """A dense call split off a larger call. Only rows first .. last - 1 and keys begin .. end - 1 are visible.

    batches, rows and keys locate it in the whole call. sequences: the number of consecutive packed sequences
    of equal lengths that form its batch, or 0 for one or none.
    """

    call: Call
    first: int
    last: int
    begin: int
    end: int
    batches: slice = slice(None)
    rows: slice = slice(None)
    keys: slice = slice(None)
    sequences: int = 0

    def view(self, x: Tensor, where: slice) -> Tensor:
        """Return a view of the rows or keys of this part. x: a tensor of the whole call. where: `rows` or `keys`."""
        x = x[self.batches, :, where]
        return x.squeeze(0).unflatten(1, (self.sequences, -1)).transpose(0, 1) if self.sequences else x


class Rectangle(NamedTuple):
    """Scores of one kernel call: rows first .. last - 1 and keys begin .. end - 1 of a part.

    causal: row first + i sees keys up to begin + i. masked: the kernel adds the tensor from `additive`.
    """

    first: int
    last: int
    begin: int
    end: int
    causal: bool = False
    masked: bool = False


def parts(call: Call) -> list[Part]:
    """Split a call into dense Parts. Empty ones are left out, because they crash the kernel."""
    if 0 in (*call.query.shape[:3], call.key.shape[2]):
        return []
    if call.cu_seqlens_q is not None:
        return _of_sequences(call)
    if call.key_mask is not None or call.query_mask is not None:
        return _of_batches(call)
    return [Part(call, 0, call.query.shape[2], 0, call.key.shape[2])]


def _ranges(mask: Tensor | None, batch: int, length: int) -> list[tuple[int, int]]:
    """Return (first, last + 1) of the visible positions of each batch; (0, 0) if all are hidden."""
    if mask is None:
        return [(0, length)] * batch
    seen = mask.to(torch.uint8)
    first, after = seen.argmax(1), length - seen.flip(1).argmax(1)
    after = torch.where(seen.amax(1).bool(), after, first)
    return list(zip(first.tolist(), after.tolist(), strict=True)) * (batch // mask.shape[0])


def _of_batches(call: Call) -> list[Part]:
    """Split a call into Parts: consecutive batches with equal or similar visible ranges."""
    batch, heads, rows, _ = call.query.shape
    of_rows, of_keys = _ranges(call.query_mask, batch, rows), _ranges(call.key_mask, batch, call.key.shape[2])
    lengths = [(last - first, end - begin) for (first, last), (begin, end) in zip(of_rows, of_keys, strict=True)]
    copied = call.key.shape[1] * (call.key.shape[3] + call.value.shape[3]) * COPY

    def whole(start: int, stop: int) -> list[tuple[int, int]]:
        return [(min(x)[0], max(b for _, b in x)) for x in (of_rows[start:stop], of_keys[start:stop])]

    def cost(groups: list[tuple[int, int]]) -> float:
        """Return the time of one Part for each group of batches, in scores."""
        total = 0.0
        for start, stop in groups:
            (first, last), (begin, end) = whole(start, stop)
            copies = len(set(of_keys[start:stop])) > 1  # with 0 for hidden tokens
            total += PART + (stop - start) * (end - begin) * ((last - first) * heads + copies * copied)
        return total

    split = []
    groups = [(start, stop) for start, stop, _ in alike(list(zip(of_rows, of_keys, strict=True)))]
    if len(groups) > 1:
        most = max(1, cost(one := [(0, batch)]) // PART)  # more parts than this cost more than one
        similar = list(runs(lengths, WASTE, CALL // heads)) if most > 1 else one
        groups = min((some for some in (groups, similar, one) if len(some) <= most), key=cost)
    for start, stop in groups:
        if all(0 in length for length in lengths[start:stop]):
            continue
        (first, last), (begin, end) = whole(start, stop)
        part = call if stop - start == batch else of_batches(call, B=slice(start, stop))
        split.append(Part(part, first, last, begin, end, slice(start, stop)))
    return split


def _of_sequences(call: Call) -> list[Part]:
    """Split a packed call into Parts. Consecutive sequences of equal lengths form one Part."""
    assert call.cu_seqlens_q is not None and call.cu_seqlens_k is not None
    columns: list[list[int]] = []
    sides = (call.cu_seqlens_q, call.query, call.max_seqlen_q), (call.cu_seqlens_k, call.key, call.max_seqlen_k)
    for offsets, x, most in sides:
        inside = offsets.clamp(0, x.shape[2]).tolist()  # offsets and lengths may be unchecked
        lengths = [min(b - a, b - a if most is None else most) for a, b in itertools.pairwise(inside)]
        # The second list has equal numbers for neighbours of equal lengths without a gap between them.
        columns += [lengths, [a - b * n for b, (a, n) in enumerate(zip(inside, lengths, strict=False))]]
    groups = alike(list(zip(*columns, strict=True)))
    return [_alike(call, start, stop, *group) for start, stop, group in groups if group[0] > 0 and group[2] > 0]


def _alike(call: Call, start: int, stop: int, rows: int, first: int, keys: int, begin: int) -> Part:
    """Return sequences start .. stop - 1 as a Part. Sequence b starts at row first + b * rows, key begin + b * keys."""
    count = stop - start
    where = slice(first + start * rows, first + stop * rows), slice(begin + start * keys, begin + stop * keys)
    part = Part(call, 0, rows, 0, keys, slice(None), *where, count if count > 1 else 0)

    def tokens(x, where, length):
        return None if x is None else x[0, where].unflatten(0, (count, length))

    cut: dict[str, Any] = {
        name: sliced(name, getattr(call, name), B=slice(start, stop), Q=slice(rows), K=slice(keys))
        for name in ("bias", "mask", "block_mask", "alibi_slopes")
    }
    cut |= dict(query=part.view(call.query, part.rows), cu_seqlens_q=None, cu_seqlens_k=None)
    cut |= dict(key=part.view(call.key, part.keys), value=part.view(call.value, part.keys))
    key_mask, query_mask = tokens(call.key_mask, part.keys, keys), tokens(call.query_mask, part.rows, rows)
    return part._replace(call=call._replace(key_mask=key_mask, query_mask=query_mask, **cut))


def rectangles(part: Part) -> Iterator[Rectangle]:
    """Yield rectangles that cover the visible scores of a part, ordered by rows, then by keys."""
    call, first, last, begin, end = part[:5]
    if not (first < last and begin < end):
        return
    # Row i sees keys i + low .. i + high; None if the bound hides no key of this part.
    offset = diagonal(call)
    low = None if call.left is None or last - 1 + offset - call.left <= begin else offset - call.left
    high = None if call.right is None or first + offset + call.right >= end - 1 else offset + call.right
    dense = call.mask is call.mask_bits is call.bias is call.alibi_slopes is None and not has_holes(part)
    if dense and low is None and high is None:
        yield Rectangle(first, last, begin, end)
    elif dense and low is None and high is not None and call.scale > 0:  # the kernel multiplies -inf by the scale
        yield from _staircase(first, last, begin, end, high)
    elif low is None and high is None and is_additive(call):
        yield Rectangle(first, last, begin, end, masked=True)
    else:
        yield from _steps(call, first, last, begin, end, low, high, dense)


def rectangles_of_rows(part: Part) -> list[Rectangle]:
    """Return `rectangles`, with those of the same rows joined, so that each has all visible keys of its rows."""
    some: list[Rectangle] = []
    for where in rectangles(part):
        same_rows = some and some[-1][:2] == where[:2]
        some.append(some.pop()._replace(end=where.end, masked=True) if same_rows else where)
    return some


def has_holes(part: Part) -> bool:
    """Return whether key_mask hides any key between the first and the last visible key of a part."""
    mask = part.call.key_mask
    return mask is not None and not bool(mask[:, part.begin : part.end].all())


def is_additive(call: Call) -> bool:
    """Return whether the kernel can add the caller's bias uncopied: its dtype fits, and no mask or slopes exist."""
    if call.bias is None or not call.mask is call.mask_bits is call.alibi_slopes is call.key_mask is None:
        return False
    dtype, wide = call.query.dtype, wide_dtype(call.query.dtype)
    return call.bias.dtype in (wide, wide if is_widened(dtype) else dtype)


def _staircase(first: int, last: int, begin: int, end: int, high: int) -> Iterator[Rectangle]:
    """Cover a causal mask, where row i sees keys up to i + high, with unmasked rectangles and causal squares."""
    first = max(first, begin - high)
    top = min(last, end - high)  # the first row that sees all keys
    if first < top:
        corner = first + high
        if corner == begin:
            yield Rectangle(first, top, begin, top + high, causal=True)
        elif (top - first) * (end - begin) <= CALL:
            yield Rectangle(first, top, begin, top + high, masked=True)
        else:
            yield Rectangle(first, top, begin, corner)
            yield Rectangle(first, top, corner, top + high, causal=True)
    if max(first, top) < last:
        yield Rectangle(max(first, top), last, begin, end)


def _steps(call, first, last, begin, end, low, high, dense) -> Iterator[Rectangle]:
    """Yield one rectangle per block of rows, with the range of keys that masks and windows leave visible to it."""
    if dense:
        width = (end if high is None else high) - (begin if low is None else low)
        step = min(max(width, BAND[0]), BAND[1])
    else:
        pairs = [x for x in (call.mask, call.block_mask, call.bias) if x is not None]
        planes = max([1, *(x.shape[0] * x.shape[1] for x in pairs)])
        planes = planes if call.alibi_slopes is None else max(planes, call.alibi_slopes.numel())
        step = max(ROWS, CACHE // (4 * planes * (end - begin)) // ROWS * ROWS)
    blocks = [Block(row, min(row + step, last), begin, end) for row in range(first, last, step)]
    planes, size = call.query.shape[0] * call.query.shape[1], (last - first) * (end - begin)
    if not call.mask is call.mask_bits is None and size * planes > PART and end - begin > FEWEST:
        smaller = _seen(call, Block(first, last, begin, end), step)
        size -= sum((block.last - block.first) * (block.end - block.begin) for block in smaller)
        blocks = smaller if size * planes > PART * (len(smaller) - len(blocks)) else blocks
    for row, after, left, right in blocks:
        left = left if low is None else max(left, row + low)
        right = right if high is None else min(right, after + high)
        if left < right:
            cut = (low is not None and after - 1 + low > left) or (high is not None and row + high < right - 1)
            yield Rectangle(row, after, left, right, masked=cut or not dense)


def _seen(call: Call, of: Block, most: int) -> list[Block]:
    """Split rows into Blocks of at most `most` rows, each with the range of keys that the mask leaves visible to it."""
    height, keys = min(MASK_ROWS, most), of.end - of.begin
    rows = [(row, min(row + height, of.last)) for row in range(of.first, of.last, height)]
    masks = [pairs.of_mask(call, Block(*each, of.begin, of.end)) for each in rows]
    seen = [narrow(x).view(torch.uint8).amax(2).amax((0, 1)).expand(keys) for x in masks if x is not None]
    blocks: list[Block] = []
    for (first, last), (left, right) in zip(rows, _ranges(torch.stack(seen), len(rows), keys), strict=True):
        if left < right:
            right = min(keys, max(right, left + FEWEST))
            left = max(0, min(left, right - FEWEST))
        if blocks and blocks[-1][2:] == (of.begin + left, of.begin + right) and last - blocks[-1].first <= most:
            first = blocks.pop().first  # join the two, which see the same keys
        blocks.append(Block(first, last, of.begin + left, of.begin + right))
    return blocks


def is_nothing(less: float | Tensor) -> bool:
    return not isinstance(less, Tensor) and not less


def additive(call: Call, where: Rectangle, less: float | Tensor = 0.0) -> Tensor:
    """Return the tensor to add to a rectangle's scores: -inf where hidden, otherwise bias and ALiBi minus `less`."""
    block = Block(*where[:4])
    if is_additive(call) and call.left is call.right is None and is_nothing(less):
        assert call.bias is not None
        return pairs.cut(call.bias, block)
    wide = wide_dtype(call.query.dtype)
    terms = pairs.added(call, block, wide)
    seen = pairs.visible(call._replace(bias=None, query_mask=None), block)  # `terms` have the -inf of a bias
    if isinstance(less, Tensor):
        terms.append(-less)
    elif seen is not None and not terms and seen.numel() > CALL:
        # 1 - 1 / seen is 0 or -inf: torch.where takes 1.2 to 5 times as long. A true byte may be larger than 1.
        ones = seen.view(torch.uint8).clamp_max(1).to(wide)
        return ones.reciprocal_().neg_().add_(1.0 - less)
    elif less or not terms:
        terms.append(torch.full((), -less, dtype=wide, device=call.query.device))
    total = functools.reduce(torch.add, terms)
    return total if seen is None else torch.where(seen, total, float("-inf"))
