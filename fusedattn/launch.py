"""From tensors to kernels: views, grids and tiles. Sizes of 0 do not get here: `ops` answers for them."""

import contextlib
import functools

import torch
from triton import cdiv, knobs
from triton.runtime.errors import OutOfResources

from . import configs
from .kernels import backward as gradients
from .kernels import forward as attention
from .kernels.masks import Masks
from .kernels.scores import score
from .kernels.tiles import View, width


def interpreting():
    """Whether kernels run in Triton's interpreter, as TRITON_INTERPRET=1 asks before Triton is imported."""
    return knobs.runtime.interpret


if interpreting():
    from . import interpreter

    interpreter.repair()


@functools.cache
def _capability(device):
    """90 for compute capability (9, 0); None where kernels are interpreted."""
    if interpreting():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def _precision(dtype):
    """How products of float32 may be rounded: as torch was told for its own, at the time of the call."""
    if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    return "ieee"


def _view(tensor):
    # The stride of a single element means nothing; left in, it would only make another kernel.
    return View(
        tensor, tuple(0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    )


def _mask(tensor, *shape):
    """The View that Masks wants of a bool tensor; absent stays None."""
    return None if tensor is None else _view(tensor.view(torch.uint8).expand(shape))


def _side(side, rows, keys):
    """A side of the window in 32 bits; past all rows and keys it is as good as unbounded."""
    return None if side is None else min(side, rows + keys)


def _common(query, key, value, mask, key_mask, query_mask, left, right, top_left, scale):
    """The arguments that kernels over pairs share."""
    (batch, heads, rows, dim), keys = query.shape, key.shape[2]
    return dict(
        Q=_view(query),
        K=_view(key),
        V=_view(value),
        masks=Masks(
            pairs=_mask(mask, batch, heads, rows, keys),
            keys=_mask(None if key_mask is None else key_mask[:, None, None, :], batch, 1, 1, keys),
            rows=_mask(None if query_mask is None else query_mask[:, None, :, None], batch, 1, rows, 1),
        ),
        q_len=rows,
        k_len=keys,
        left=_side(left, rows, keys),
        right=_side(right, rows, keys),
        score=score(scale),
        HEADS=heads,
        GROUP=heads // key.shape[1],
        D=dim,
        DV=value.shape[3],
        TOP_LEFT=top_left,
        PRECISION=_precision(query.dtype),
    )


KERNELS = {kernel.__name__: kernel for kernel in (attention.forward, gradients.prepare, gradients.dq, gradients.dkdv)}
_too_large: dict[tuple, int] = {}  # (kernel, device, dtype, width): how many of its tiles the device could not hold


def _kind(name, query, value):
    return name, query.device, query.dtype, max(width.fn(query.shape[3]), width.fn(value.shape[3]))


def candidates(name, query, value):
    """Tiles that a kernel may take for these tensors, best first, less those that the device is known not to hold."""
    kind = _kind(name, query, value)
    tiles = configs.tiles(name, _capability(query.device), query.element_size(), kind[-1])
    return tiles[min(_too_large.get(kind, 0), len(tiles) - 1) :]


def _surroundings(device):
    """What a launch needs around it: the device of its tensors, or an interpreter that does not warn."""
    if interpreting():
        return interpreter.quiet()
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _launch(name, query, value, length, planes, arguments, by_keys=False):
    """Run a kernel over the blocks of `length` in each plane, with the first of its tiles that fits the device."""
    kernel, tiles = KERNELS[name], candidates(name, query, value)
    with _surroundings(query.device):
        for left, tile in zip(reversed(range(len(tiles))), tiles, strict=True):
            sizes = {"BLOCK_M": tile.rows} if tile.keys is None else {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
            programs = cdiv(length, tile.keys if by_keys else tile.rows) * planes
            try:
                kernel[(programs,)](**arguments, **sizes, num_warps=tile.warps, num_stages=tile.stages)
                return
            except OutOfResources:
                if not left:
                    raise
                kind = _kind(name, query, value)
                # Counted from the end: another thread may have come as far meanwhile.
                whole = configs.tiles(name, _capability(query.device), query.element_size(), kind[-1])
                _too_large[kind] = len(whole) - left


def forward(out, lse, stats, query, key, value, *options):
    """Fill out, lse and, unless None, stats."""
    batch, heads, rows, _ = query.shape
    arguments = _common(query, key, value, *options)
    arguments |= dict(Out=_view(out), Lse=lse, Stats=stats)
    _launch("forward", query, value, rows, batch * heads, arguments)


def backward(grads, grad_out, grad_lse, out, stats, query, key, value, *options):
    """Fill grads: those of query, key and value, None for what is not needed (key and value go together)."""
    (batch, heads, rows, _), (_, kv_heads, keys, _) = query.shape, key.shape
    grad_query, grad_key, grad_value = grads
    arguments = _common(query, key, value, *options)
    table = stats.new_empty(batch, heads, rows, 4)
    prepare = dict(Out=_view(out), GradOut=_view(grad_out), GradLse=grad_lse, Stats=stats, Rows=table)
    prepare |= {name: arguments[name] for name in ("q_len", "score", "HEADS", "DV", "PRECISION")}
    _launch("prepare", query, value, rows, batch * heads, prepare)

    arguments |= dict(GradOut=_view(grad_out), Rows=table)
    if grad_query is not None:
        _launch("dq", query, value, rows, batch * heads, arguments | dict(GradQ=_view(grad_query)))
    if grad_key is not None:
        arguments |= dict(GradK=_view(grad_key), GradV=_view(grad_value))
        _launch("dkdv", query, value, keys, batch * kv_heads, arguments, by_keys=True)
