"""Sequences of unequal lengths as padded tensors, computed one at a time or by one packed call.

Functions here take padded tensors and the options of `attention`, and return padded results.
"""

import torch

import fusedattn as fa

from .inside import leaves

# the dimensions of rows and of keys
AXES = dict(mask=(2, 3), bias=(2, 3), key_mask=(None, 1), query_mask=(1, None), alibi_slopes=(None, None))


def offsets(lengths, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def draw_packed(rows, keys, device="cpu", heads=(4, 2), dims=(16, 8), dtype=torch.float32):
    generator = torch.Generator(device).manual_seed(5)
    shapes = (sum(rows), heads[0], dims[0]), (sum(keys), heads[1], dims[0]), (sum(keys), heads[1], dims[1])
    shapes = *shapes, (sum(rows), heads[0], dims[1])
    *inputs, grad = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)
    return *leaves(*inputs), grad


def _sliced(option, axes, b, rows, keys):
    """Return an option, which broadcasts to a batch, for sequence b alone."""
    if option.dim() == 2 and axes == (2, 3):
        option = option[None, None]
    if option.dim() == 1:
        option = option[None]
    option = option[b : b + 1] if option.shape[0] > 1 else option
    for axis, length in zip(axes, (rows, keys), strict=True):
        if axis is not None and (option.shape[axis] > 1 or axis == 1):  # token masks do not broadcast along tokens
            option = option.narrow(axis, 0, length)
    return option


def _padded(results, rows, keys):
    """Pad output, lse and weights of one sequence to the longest rows and keys, by 0, -inf and 0."""
    out, *rest = results
    pad = torch.nn.functional.pad
    more = rows - out.shape[1]
    found = [pad(out, (0, 0, 0, more))]
    if rest:
        found.append(pad(rest[0], (0, more), value=float("-inf")))
    if len(rest) > 1:
        found.append(pad(rest[1], (0, keys - rest[1].shape[2], 0, more)))
    return found


def by_sequence(function, rows, keys):
    """Return a function like `attention` that calls `function` once for each sequence."""

    def attend(query, key, value, **options):
        found = []
        for b, (i, j) in enumerate(zip(rows, keys, strict=True)):
            own = {name: _sliced(x, AXES[name], b, i, j) if name in AXES else x for name, x in options.items()}
            # Dropout depends on the batch index, so repeat the sequence up to index b and take the last result.
            batch = [x[b : b + 1, :, :length] for x, length in ((query, i), (key, j), (value, j))]
            if options.get("dropout_p"):
                batch = [x.expand(b + 1, -1, -1, -1) for x in batch]
                if "alibi_slopes" in own:  # slopes do not broadcast
                    own["alibi_slopes"] = own["alibi_slopes"].expand(b + 1, -1)
            results = function(*batch, **own)
            results = results if isinstance(results, tuple) else (results,)
            found.append(_padded([x[-1] for x in results], query.shape[2], key.shape[2]))
        return tuple(torch.stack(each) for each in zip(*found, strict=True))

    return attend


def packed(function, rows, keys, **call):
    """Return a function like `attention` that packs all sequences and calls a function like `attention_varlen`."""

    def attend(query, key, value, **options):
        def pack(tensor, lengths):
            whole = torch.cat([tensor[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])
            if tensor.is_contiguous():
                return whole
            total, heads, dim = whole.shape  # memory has heads first, an odd offset, and NaN around
            apart = whole.new_full((heads, total + 2, dim + 3), float("nan"))
            return apart[:, 1:-1, 1:-2].copy_(whole.transpose(0, 1)).transpose(0, 1)

        for name, lengths in (("key_mask", keys), ("query_mask", rows)):
            if name in options:
                mask = options[name].expand(len(rows), -1)
                options[name] = torch.cat([mask[b, :n] for b, n in enumerate(lengths)])
        most = dict(max_seqlen_q=query.shape[2], max_seqlen_k=key.shape[2]) if len(rows) % 2 else {}
        inputs = pack(query, rows), pack(key, keys), pack(value, keys)
        starts = offsets(rows, query.device), offsets(keys, query.device)
        results = function(*inputs, *starts, **most, **options, **call)
        results = results if isinstance(results, tuple) else (results,)
        out, *rest = results
        each = [out.transpose(0, 1), *rest]  # all with heads first
        split = zip(*(x.split(list(rows), 1) for x in each), strict=True)
        found = [_padded(parts, query.shape[2], key.shape[2]) for parts in split]
        return tuple(torch.stack(each) for each in zip(*found, strict=True))

    return attend


def attention_varlen(rows, keys, backend=None):
    return packed(fa.attention_varlen, rows, keys, backend=backend)
