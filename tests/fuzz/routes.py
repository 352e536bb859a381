"""Routes: functions with the arguments of `attention`, rank 4, that compute it by another public function.

A Route makes such a function from a Dense, and lists its options and results. All have the same oracle.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

import fusedattn as fa
from fusedattn.compat import flash_attn as flash, torch as compat

from ..sequences import packed

ALL = frozenset(("out", "lse", "weights"))
MASKS = frozenset(("mask", "bias", "key_mask", "query_mask"))
EVERYTHING = MASKS | {"scale", "softcap", "slopes", "sinks", "causal", "window", "align", "dropout", "planned"}


class Route(NamedTuple):
    """A way to compute attention: make(case) returns the function; options and results are names that it supports."""

    make: Callable
    options: frozenset = EVERYTHING
    results: frozenset = ALL
    packed: bool = False
    heads: int | None = None  # the only supported number of heads
    batches: int | None = None


def _tuple(results):
    return results if isinstance(results, tuple) else (results,)


def _planned(options):
    masks = {name: options.pop(name) for name in ("mask", "key_mask", "query_mask") if name in options}
    return options | (dict(mask=fa.plan(**masks)) if masks else {})


def direct(case):
    def attend(query, key, value, **options):
        return fa.attention(query, key, value, **_planned(options) if case.planned else options)

    return attend


def of_lower_rank(case, rank):
    """Return a function that calls `attention` with inputs of rank 3 (one head) or 2 (one head, one batch)."""

    def lower(x):
        return x.squeeze(1) if rank == 3 else x.squeeze(1).squeeze(0)

    def attend(query, key, value, **options):
        for name in ("mask", "bias"):
            if name in options and options[name].dim() == 4:
                options[name] = lower(options[name])
        options = _planned(options) if case.planned else options
        results = _tuple(fa.attention(lower(query), lower(key), lower(value), **options))
        return tuple(x.unsqueeze(1) if rank == 3 else x[None, None] for x in results)

    return attend


def split(case):
    """Return a function that merges calls on two parts of the keys."""

    def attend(query, key, value, *, return_lse, return_weights, **options):
        half, length, found = case.values % (case.Sk + 1), case.Sk, []
        for start, end in ((0, half), (half, length)):
            own = dict(options)
            if found:
                own.pop("sinks", None)  # the sinks belong to the first part only
            for name in ("mask", "bias", "key_mask"):
                if name in own and (name == "key_mask" or own[name].shape[-1] != 1):
                    own[name] = own[name][..., start:end]
            found += fa.attention(query, key[:, :, start:end], value[:, :, start:end], return_lse=True, **own)
        return fa.merge(*found)[: 1 + return_lse]

    return attend


def varlen(case):
    def attend(query, key, value, *offsets, **options):
        if case.planned and "mask" in options:
            options["mask"] = fa.plan(options["mask"])
        return fa.attention_varlen(query, key, value, *offsets, **options)

    return packed(attend, *case.lengths)


def jagged(case):
    """Return a function that calls `attention` with nested tensors, made from packed tensors."""

    def attend(query, key, value, cu_seqlens_q, cu_seqlens_k, *, max_seqlen_q=None, max_seqlen_k=None, **options):
        rows, keys = cu_seqlens_q.long(), cu_seqlens_k.long()

        def nested(x, offsets):
            return torch.nested.nested_tensor_from_jagged(x, offsets)

        for name, offsets in (("key_mask", keys), ("query_mask", rows)):
            if name in options:
                options[name] = nested(options[name], offsets)
        tensors = (nested(x, offsets).transpose(1, 2) for x, offsets in ((query, rows), (key, keys), (value, keys)))
        out, *rest = (x.transpose(1, 2).values() for x in _tuple(fa.attention(*tensors, **options)))
        return (out, *(x.transpose(0, 1) for x in rest))

    return packed(attend, *case.lengths)


def mapped(case):
    """Return a function that calls torch.vmap over the batch; inputs that all batches share are not mapped."""
    per_batch = dict(mask=4, bias=4, key_mask=2, query_mask=2, alibi_slopes=2)

    def attend(query, key, value, **options):
        tensors = dict(query=query, key=key, value=value)
        over = dict.fromkeys(tensors, 0)
        for name in ("key", "value"):
            if case.B and 0 in getattr(case, name).expanded and name not in case.wanted:
                tensors[name], over[name] = tensors[name][0], None
        for name, x in list(options.items()):
            if isinstance(x, torch.Tensor):
                tensors[name] = options.pop(name)
                over[name] = 0 if x.dim() == per_batch.get(name) and x.shape[0] == case.B else None

        def one(given):
            own = {
                name: x[None] if name in ("query", "key", "value") or x.dim() == 3 and name in ("mask", "bias") else x
                for name, x in given.items()
            }
            return tuple(x[0] for x in _tuple(fa.attention(**own, **options)))

        return torch.vmap(one, (over,))(tensors)

    return attend


def sdpa(case):
    """Return a function that calls our drop-in of torch's SDPA, sometimes with another leading dimension."""

    def attend(query, key, value, *, return_lse, return_weights, **options):
        given = dict(attn_mask=options.get("mask", options.get("bias")), scale=options.get("scale"))
        given |= dict(is_causal=options["causal"], enable_gqa=case.group > 1)
        if case.values % 3 == 0:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            return (compat.scaled_dot_product_attention(query, key, value, **given)[0],)
        return (compat.scaled_dot_product_attention(query, key, value, **given),)

    return attend


def _as_flash(options, return_lse):
    window = tuple(-1 if side is None else side for side in options["window"] or (None, None))
    given = dict(softmax_scale=options.get("scale"), causal=options["causal"], window_size=window)
    given |= dict(softcap=options.get("softcap") or 0.0, alibi_slopes=options.get("alibi_slopes"))
    return given | dict(return_attn_probs=return_lse)


def flash_dense(case):
    def attend(query, key, value, *, return_lse, return_weights, **options):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out, *rest = _tuple(flash.flash_attn_func(q, k, v, **_as_flash(options, return_lse)))
        return out.transpose(1, 2), *rest[:1]

    return attend


def flash_packed(case):
    def attend(q, k, v, cu_q, cu_k, *, max_seqlen_q=None, max_seqlen_k=None, return_lse, return_weights, **options):
        longest = case.Sq if max_seqlen_q is None else max_seqlen_q, case.Sk if max_seqlen_k is None else max_seqlen_k
        results = flash.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, **_as_flash(options, return_lse))
        return _tuple(results)[:2]

    return packed(attend, *case.lengths)


FLASH = frozenset(("scale", "softcap", "slopes", "causal", "window"))
OUT, OUT_AND_LSE = frozenset(("out",)), frozenset(("out", "lse"))
ROUTES = {
    "attention": Route(direct),
    "attention_varlen": Route(varlen, packed=True),
    "rank 3": Route(lambda case: of_lower_rank(case, 3), heads=1),
    "rank 2": Route(lambda case: of_lower_rank(case, 2), heads=1, batches=1),
    "jagged": Route(jagged, EVERYTHING - {"planned"}, packed=True),
    "vmap": Route(mapped, EVERYTHING - {"planned"}),
    "merge": Route(split, MASKS | {"scale", "softcap", "sinks"}, OUT_AND_LSE),
    "sdpa": Route(sdpa, frozenset(("scale", "mask", "bias", "causal")), OUT),
    "flash": Route(flash_dense, FLASH, OUT_AND_LSE),
    "flash varlen": Route(flash_packed, FLASH, OUT_AND_LSE, packed=True),
}
