"""Attention of some rows to keys that are split into parts, as `fusedattn.distributed` computes it."""

from unittest import mock

import torch

from fusedattn.call.options import Arguments
from fusedattn.call.rules import checked
from fusedattn.distributed import ranks
from fusedattn.distributed.global_call import GlobalCall
from fusedattn.distributed.parts import in_pieces
from fusedattn.distributed.shards import Chunk
from fusedattn.testing.compare import LEARNED, in_float64, with_gradients


def draw(dtype, rows, keys, columns=(24, 16), heads=(4, 2), batch=2, learned=()):
    """Return (random query, key, value and gradients of output and lse by name, options named in `learned`)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    d, dv = columns
    tensors = dict(query=normal(batch, heads[0], rows, d), key=normal(batch, heads[1], keys, d))
    tensors |= dict(value=normal(batch, heads[1], keys, dv), out=normal(batch, heads[0], rows, dv))
    wide = torch.promote_types(dtype, torch.float32)
    options = {name: normal(heads[0]).abs().to(wide) for name in learned if name != "bias"}
    if "bias" in learned:  # every second row has the lowest bias everywhere, so it is the mean of the values
        options["bias"] = normal(1, 1, rows, keys).to(wide)
        options["bias"][:, :, ::2] = torch.finfo(wide).min
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    return tensors | dict(lse=normal(batch, heads[0], rows).to(wide)), options


def by_parts(tensors, options, rows, cuts, backend, key_mask=None):
    """Return output, lse and gradients of some rows, from keys split at `cuts` and merged.

    Gradients of inputs and learned options are float32 (float64), summed over the parts.
    """
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    call = checked(Arguments(query, key, value, key_mask=key_mask, **options))
    shift, keys = 0 if call.top_left else key.shape[2] - query.shape[2], Chunk(0, key.shape[2], 0)
    bias = None if call.bias is None else call.bias[:, :, rows]
    call = call._replace(query=query[:, :, rows], bias=bias, top_left=True)
    need, chunks = dict(needs=["query", "key", "value", *options]), ([[Chunk(rows.start, rows.stop, 0)]], [[keys]])
    whole = GlobalCall(backend, ranks.Ranks(None, 0, 1), call, *chunks, shift, [need], True, False)

    def bring(whole, compute):
        spans = zip(cuts, cuts[1:], strict=False)
        every = [compute(None, whole.call, whole.pieces([Chunk(*span, span[0])])) for span in spans]
        return {name: sum(grads[name] for grads in every) for name in every[0]}

    forward, backward = in_pieces(bring)
    _, _, total = forward(whole)
    given = tensors["out"][:, :, rows], tensors["lse"][:, :, rows], None
    with mock.patch.object(ranks, "sum_of", lambda _, x: x):
        found = dict(out=total.out, lse=total.lse) | backward(whole, total, given)
    return {name: x.squeeze(0) if name in ("alibi_slopes", "sinks") else x for name, x in found.items()}


def at_once(function, tensors, options, rows, key_mask=None):
    """Return the same results as `by_parts` from one call of a function like `attention`."""
    only = torch.zeros_like(tensors["lse"], dtype=torch.bool)
    only[:, :, rows] = True
    given = tensors | dict(
        out=tensors["out"] * only[..., None].to(tensors["out"].dtype),
        lse=tensors["lse"] * only.to(tensors["lse"].dtype),
    )
    more = {} if key_mask is None else dict(key_mask=key_mask)
    found = with_gradients(function, given, options | more)
    return {name: x[:, :, rows] if name in ("out", "lse", "query", "bias") else x for name, x in found.items()}


def oracle(function, tensors, options, rows, key_mask=None):
    options = options | {name: options[name].double() for name in LEARNED if name in options}
    return at_once(function, in_float64(tensors), options, rows, key_mask)
