"""Kernel arguments made from a Call: Views (a tensor and its strides), NamedTuples of options, numbers."""

import torch
from torch import Tensor
from triton import cdiv
from triton.tools.tensor_descriptor import TensorDescriptor

from ..call.options import BY_HEAD, diagonal, hiding, shift, sizes
from ..call.private import has_storage, known
from ..kernels.vocabulary import dropout
from ..kernels.vocabulary.masks import BLOCK, Bits, Masks
from ..kernels.vocabulary.memory import View, width
from ..kernels.vocabulary.rules import Rules, Spec
from ..kernels.vocabulary.scores import score

TMA_BYTES = 16  # TMA needs addresses and strides that are multiples of 16 bytes


def slots(call, block, by_keys=False):
    """Return the number of row blocks, or key blocks, of one head over all batches; an upper bound if packed."""
    length = (call.key if by_keys else call.query).shape[2]
    if call.cu_seqlens_q is None:
        return cdiv(length, block) * call.query.shape[0]
    return length // block + call.cu_seqlens_q.shape[0] - 1


def programs(call, tile, by_keys=False):
    """Return the grid size of a kernel with a program for each block of rows, or of keys, of each head."""
    block, tensor = (tile.keys, call.key) if by_keys else (tile.rows, call.query)
    return slots(call, block, by_keys) * tensor.shape[1]


def hides(call):
    """Return whether a call has masks or a bias from which a block mask is computed."""
    return any(x is not None for x in hiding(call))


def precision(dtype):
    """Return the input precision of tl.dot: "tf32" for float32 if torch's setting allows it now, otherwise "ieee"."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def of(tensor):
    if tensor is None:
        return None
    # The stride of an axis of size 1 is arbitrary: 0 avoids compiling another kernel.
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return View(tensor, tuple(0 if size == 1 else step for size, step in axes))


def strided(tensor: Tensor) -> bool:
    """Return whether TMA supports the strides of a (B, H, S, D) tensor; True if a compiler cannot know."""
    pairs = zip(tensor.stride()[:3], tensor.shape[:3], strict=True)
    steps = [step * tensor.element_size() for step, size in pairs if known(size != 1, True)]
    readable = all(known(step > 0, True) and known(step % TMA_BYTES == 0, True) for step in steps)
    return (known(tensor.stride(3) == 1, True) or known(tensor.shape[3] == 1, False)) and readable


def aligned(tensor: Tensor) -> bool:
    """Return whether the address of a tensor is aligned as TMA requires."""
    # A tensor without an address, as under torch.compile, counts as aligned. The operator checks again when it runs.
    wraps = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if torch.compiler.is_compiling() or wraps or not has_storage(tensor):
        return True
    return tensor.data_ptr() % TMA_BYTES == 0


def by_threads(tensor: Tensor) -> bool:
    """Return whether Triton may load a (B, H, S, D) tensor one element at a time, not knowing its alignment."""
    # Triton knows only which addresses are multiples of 16 bytes, and which strides are multiples of 16 elements.
    *strides, last = of(tensor).strides
    return last != 1 or tensor.shape[3] % 2 != 0 or any(step % 16 for step in strides) or not aligned(tensor)


def block(tensor: Tensor, rows: int) -> tuple[list, list, list]:
    """Return (shape, strides, block shape) of a TMA descriptor that copies `rows` rows of one head."""
    # The stride of an axis of size 1 is arbitrary, and may not suit TMA.
    least = TMA_BYTES // tensor.element_size()
    strides = [least if size == 1 else step for size, step in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)]
    return list(tensor.shape), [*strides, 1], [1, 1, rows, width.fn(tensor.shape[3])]


def descriptor(tensor: Tensor, rows: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, *block(tensor, rows))


def _bytes(mask, *shape):
    return None if mask is None else of(mask.view(torch.uint8).expand(shape))


def masks(mask, key_mask, query_mask, batch, heads, rows, keys, packed=False):
    """Return the Views of a Call's masks; an absent mask stays None. Packed masks are (1, total tokens)."""

    def tokens(mask, length):
        if mask is None:
            return None
        return _bytes(mask[:, None, :, None], *((1, 1, mask.shape[1], 1) if packed else (batch, 1, length, 1)))

    return Masks(_bytes(mask, batch, heads, rows, keys), tokens(key_mask, keys), tokens(query_mask, rows))


def each_head(tensor, batch, heads):
    return None if tensor is None else of(tensor[:, :, None, None].expand(batch, heads, 1, 1))


def masks_of(call):
    (batch, heads, rows, keys), words = sizes(call), call.mask_bits
    mask, bits = call.mask, None
    if words is not None:
        block_mask = call.block_mask.expand(batch, heads, cdiv(rows, BLOCK.value), cdiv(keys, BLOCK.value))
        mask, bits = None, Bits(of(block_mask), words, words.shape[0])
    made = masks(mask, call.key_mask, call.query_mask, batch, heads, rows, keys, call.cu_seqlens_q is not None)
    return made._replace(bits=bits)


def scored(call):
    batch, heads, rows, keys = sizes(call)
    bias = None if call.bias is None else of(call.bias.expand(batch, heads, rows, keys))
    by_head = {name: each_head(getattr(call, name), batch, heads) for name in BY_HEAD}
    return score(call.scale, call.softcap, bias, shift(call), **by_head, narrow=call.query.element_size() == 2)


def bounded(call):
    """Return the call with None for each of `left` and `right` that hides no keys. Packed calls stay unchanged."""
    if call.cu_seqlens_q is not None:
        return call
    rows, keys, first = call.query.shape[2], call.key.shape[2], diagonal(call)
    left = None if call.left is None or call.left >= first + rows - 1 else call.left
    right = None if call.right is None or call.right + first >= keys - 1 else call.right
    return call._replace(left=left, right=right)


def band(call):
    """Return the lengths and the window of a call as kernel arguments: 32-bit numbers, None if unbounded."""
    rows, keys, by = call.query.shape[2], call.key.shape[2], shift(call)
    before, after = (keys, rows) if call.top_left else (rows, keys)  # -before < row - key < after, for aligned rows
    left = None if call.left is None else max(-before, min(call.left - by, after))
    right = None if call.right is None else max(-after, min(call.right + by, before))
    return dict(q_len=rows, k_len=keys, left=left, right=right)


def rules(call):
    drop = None if call.seed is None else dropout.of(call.seed, call.dropout_p, call.origin)
    return Rules(masks_of(call), scored(call), drop)


def spec(call, **others):
    group, width = call.query.shape[1] // max(1, call.key.shape[1]), call.query.shape[3]
    numbers = dict(GROUP=group, D=width, DV=call.value.shape[3], TOP_LEFT=call.top_left)
    return Spec(**numbers | dict(PRECISION=precision(call.query.dtype)) | others)


def common(call, **others):
    """Return the arguments that most kernels share. others: more fields of their Spec (compile-time constants)."""
    views = dict(Q=of(call.query), K=of(call.key), V=of(call.value))
    return views | dict(rules=rules(call), heads=call.query.shape[1], spec=spec(call, **others)) | band(call)


def sums_sinks_by_row(call):
    """Return whether the kernel dq must sum the gradient of sinks, because `preprocess` cannot.

    It cannot for partial calls (rows see keys of other calls, too), or packed sequences with different sinks (vmap).
    """
    return call.sinks is not None and (call.partial or (call.cu_seqlens_q is not None and len(call.sinks) > 1))


def pack_gqa(call, out, most):
    """Reshape (call, output): query heads that share a key head become rows of one head, if `most` or fewer."""
    (_, heads, rows, _), kv_heads = call.query.shape, call.key.shape[1]
    others = *(getattr(call, name) for name in BY_HEAD), call.seed, call.query_mask, call.block_mask, call.cu_seqlens_q
    pairs = [x for x in (call.mask, call.bias) if x is not None]
    packs = (
        kv_heads < heads
        and rows * (heads // kv_heads) <= most
        and all(x is None for x in others)
        and all(x.shape[1] == x.shape[2] == 1 for x in pairs)
        and (within := bounded(call)).left is within.right is None
        and all(x.shape[2] == 1 or x.stride(1) == x.shape[2] * x.stride(2) for x in (call.query, out))
    )

    def packed(tensor):
        return tensor.unflatten(1, (kv_heads, -1)).flatten(2, 3)

    return (call._replace(query=packed(call.query), left=None, right=None), packed(out)) if packs else (call, out)
