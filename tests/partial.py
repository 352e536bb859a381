"""Attention of some rows to keys that are split into parts, as `fusedattn.distributed` computes it."""

import torch

from fusedattn.call.options import Arguments, Origin
from fusedattn.call.rules import checked
from fusedattn.operators import partial
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
    shift = 0 if call.top_left else key.shape[2] - query.shape[2]
    grad_out, grad_lse = (tensors[name][:, :, rows] for name in ("out", "lse"))

    def part(begin, end):
        origin = Origin(shift + rows.start - begin, rows.start, begin, 0, query.shape[1])
        mask = None if key_mask is None else key_mask[:, begin:end]
        bias = None if call.bias is None else call.bias[:, :, rows, begin:end]
        inputs = dict(query=query[:, :, rows], key=key[:, :, begin:end], value=value[:, :, begin:end], key_mask=mask)
        return call._replace(**inputs, bias=bias, sinks=None, top_left=True, partial=True, origin=list(origin))

    parts = [part(*span) for span in zip(cuts, cuts[1:], strict=False)]
    total = partial.start(parts[0], partial.unit(parts[0], backend))
    for each in parts:
        out, stats = partial.forward(each, backend)
        assert out.dtype == stats.dtype == total.out.dtype
        partial.add(total, slice(None), out, stats)
    if call.sinks is not None:
        partial.add_sinks(total, call.sinks)
    need = [True, True, True, call.bias is not None, call.alibi_slopes is not None, False]
    every = [
        partial.backward(each, backend, grad_out.to(query.dtype), grad_lse, total.out, total.stats, need)
        for each in parts
    ]
    found = dict(out=total.out, lse=total.lse, query=sum(grads[0] for grads in every))
    found |= dict(zip(("key", "value"), (torch.cat([grads[n] for grads in every], 2) for n in (1, 2)), strict=True))
    if call.bias is not None:
        found["bias"] = torch.cat([grads[3] for grads in every], 3)
    if call.alibi_slopes is not None:
        found["alibi_slopes"] = sum(grads[4] for grads in every).squeeze(0)
    if call.sinks is not None:
        found["sinks"] = partial.of_sinks(call._replace(query=parts[0].query), total, grad_out, grad_lse).squeeze(0)
    return found


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
