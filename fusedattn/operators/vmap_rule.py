"""torch.vmap of the operators: mapped calls are folded into one call, or made one by one.

Dense calls join along the batch, packed calls become one call with all sequences; each drops different weights. Calls
are made one by one if seeds or mask_bits are mapped, or for packed sequences with sinks on the backend "cpu". So are
calls that need equal dropout: with randomness="same", or in derivatives of a call that was not mapped itself.
"""

import re
from typing import Any

import torch
from torch import Tensor

from ..call.checks import fail
from ..call.options import DIMS, Call, is_known

# {tensor with packed rows or keys: their axis}. In other tensors, the first dimension is the batch or 1.
_AXES = {name: dims.index(dims.strip("BHGD")) for name, dims in DIMS.items() if len(dims.strip("BHGD")) == 1}
_AXES |= dict.fromkeys(("out", "lse", "weights", "stats"), 2)


def _kind(name: str) -> str:
    """Return the name of the tensor that a gradient or a tangent belongs to."""
    return re.sub("^(.*:)?(grad_|tangent_|moved_)?", "", name)


def _folding(size: int, call: dict[str, Any], dims: dict[str, Any]) -> tuple[Any, Any, set[str]]:
    """Return fold (mapped calls to one call), unfold (its results), and names of inputs with batch size 1 per call."""
    mapped = {name: x for name, x in call.items() if isinstance(x, Tensor)}
    shapes = {n: x.shape if dims[n] is None else x.movedim(dims[n], 0).shape[1:] for n, x in mapped.items()}
    packed = "cu_seqlens_q" in shapes
    totals = {"cu_seqlens_q": shapes["query"][2], "cu_seqlens_k": shapes["key"][2]}
    batch = shapes["cu_seqlens_q"][0] - 1 if packed else shapes["query"][0]

    def fold(name: str, x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor) or name in ("seed", "mask_bits"):
            return x
        x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
        if (total := totals.get(name)) is not None:
            ends = x[:, [0, -1]]
            if is_known(ends) and bool((ends != ends.new_tensor([0, total])).any()):
                fail(ValueError, name, f"offsets from 0 to {total} under torch.vmap", ends.tolist())
            starts = x[:, :-1] + total * torch.arange(size, dtype=x.dtype, device=x.device)[:, None]
            end = x[-1:, -1] + (size - 1) * total if size else x.new_zeros(1)  # an outer torch.vmap checks it
            return torch.cat([starts.flatten(), end])
        if x.dim() == 2:
            return x[:1].flatten()  # an empty lse, weights or stats
        axis = _AXES.get(_kind(name))
        if packed and axis is not None:
            return x.movedim(0, axis).flatten(axis, axis + 1)
        # A tensor that broadcasts over the batch may differ between calls.
        return x.expand(size, batch, *x.shape[2:]).flatten(0, 1)

    def unfold(name: str, x: Tensor) -> Tensor:
        kind = _kind(name)
        if packed and x.dim() > 1 and kind in _AXES:
            axis, total = _AXES[kind], totals["cu_seqlens_k" if kind in ("key", "value") else "cu_seqlens_q"]
            return x.unflatten(axis, (size, total)).movedim(axis, 0)
        return x.reshape(size, batch if x.dim() > 1 else 0, *x.shape[1:])

    # The gradients of tensors that a call broadcasts over its batch are summed.
    shared = {name for name, shape in shapes.items() if len(shape) > 1 and shape[0] == 1}
    return fold, unfold, shared - (set(_AXES) if packed else set())


def vmap_rule(apply, names, results, info, in_dims, arguments):
    """Run `apply` of an autograd Function on mapped arguments. Return (results, their mapped dimensions)."""
    # names, results: names of the arguments (all fields of a Call among them) and of the results. A derivative has its
    # tensor's name, maybe with the prefix grad_, tangent_ or moved_, and with "number:" before that.
    values, fields = dict(zip(names, arguments, strict=True)), Call._fields
    # For a list argument torch passes a list of dimensions. Our lists hold no tensors.
    dims = {name: dim if isinstance(values[name], Tensor) else None for name, dim in zip(names, in_dims, strict=True)}
    is_mapped = any(dims[name] is not None for name in fields if name != "seed")
    one_by_one = values["seed"] is not None and (dims["seed"] is not None or not is_mapped or info.randomness == "same")
    one_by_one = one_by_one or dims["mask_bits"] is not None
    packed_sinks = not (values["cu_seqlens_q"] is None or values["sinks"] is None)
    # The backend "cpu" takes no sinks that differ between sequences.
    if (one_by_one or (packed_sinks and values.get("backend") == "cpu")) and info.batch_size:
        calls = []
        for n in range(info.batch_size):
            calls.append(apply(*(x if dims[name] is None else x.select(dims[name], n) for name, x in values.items())))
        stacked = [torch.stack(each) for each in zip(*calls, strict=True)]
    else:
        fold, unfold, shared = _folding(info.batch_size, {name: values[name] for name in fields}, dims)
        folded = [fold(name, x, dims[name]) for name, x in values.items()]
        stacked = [unfold(name, x) for name, x in zip(results, apply(*folded), strict=True)]
        summed = [_kind(name) in shared for name in results]
        stacked = [x.sum(1, keepdim=True) if s and x.numel() else x for x, s in zip(stacked, summed, strict=True)]
    return tuple(stacked), (0,) * len(stacked)
