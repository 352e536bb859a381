"""Ways to one answer: functions with the arguments of `attention`, rank 4, each by another function or in another form.

Each takes a Dense and gives such a function, and says what of a Dense it can do. All are held to the same oracle.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

import fusedattn as fa
from fusedattn.compat import flash_attn as flash, torch as compat

from ..sequences import packed

ALL = frozenset(("out", "lse", "weights"))
SCORES = frozenset(("scale", "softcap", "slopes", "sinks"))
BAND = frozenset(("causal", "window", "align"))
MASKS = frozenset(("mask", "bias", "key_mask", "query_mask"))
EVERYTHING = SCORES | BAND | MASKS | {"dropout", "planned"}


class Route(NamedTuple):
    """make(case) is the function; options, what it takes; results, what it returns."""

    make: Callable
    options: frozenset = EVERYTHING
    results: frozenset = ALL
    forward: bool = False  # whether it has tangents that can be asked for
    packed: bool = False
    heads: int | None = None  # of query and key, where it takes no others
    batches: int | None = None
    more: tuple = ()  # besides: "ungrouped", "square", "one width", "top left"


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
    """(B, S, D) for one head, (S, D) for one of one batch."""

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


def _flip(x, axes):
    return x.flip([axis for axis in axes if axis < x.dim()])


def flipped(case):
    """Heads and batches in reverse order."""
    axes = dict(mask=(0, 1), bias=(0, 1), key_mask=(0,), query_mask=(0,), sinks=(0,))

    def attend(query, key, value, **options):
        for name, x in options.items():
            if name == "alibi_slopes":
                options[name] = x.flip(0, 1) if x.dim() == 2 else x.flip(0)
            elif name in axes and x.dim() > (2 if name in ("mask", "bias") else 1 if "mask" in name else 0):
                options[name] = _flip(x, axes[name])
        results = fa.attention(*(_flip(x, (0, 1)) for x in (query, key, value)), **options)
        return tuple(_flip(x, (0, 1)) for x in _tuple(results))

    return attend


def split(case):
    """The keys in two parts, merged."""

    def attend(query, key, value, *, return_lse, return_weights, **options):
        half, length, found = case.values % (case.Sk + 1), case.Sk, []
        for start, end in ((0, half), (half, length)):
            own = dict(options)
            if found:
                own.pop("sinks", None)  # one of the parts has them
            for name in ("mask", "bias", "key_mask"):
                if name in own and (name == "key_mask" or own[name].shape[-1] != 1):
                    own[name] = own[name][..., start:end]
            found += fa.attention(query, key[:, :, start:end], value[:, :, start:end], return_lse=True, **own)
        return fa.merge(*found)[: 1 + return_lse]

    return attend


def with_ones(case):
    """Masks that hide nothing where there are none, a window that is no bound, and a bias of zeros."""

    def attend(query, key, value, **options):
        ones = torch.ones(case.Sq, case.Sk, dtype=torch.bool)
        given = dict(mask=ones, key_mask=ones[0] if case.Sq else ones.new_ones(case.Sk))
        given |= dict(query_mask=ones.new_ones(case.Sq), bias=ones.new_zeros(1, 1, dtype=torch.float32))
        given = given | options
        if given["window"] is None:
            given["window"] = (case.Sq + case.Sk, case.Sq + case.Sk)
        return fa.attention(query, key, value, **given)

    return attend


def varlen(case):
    def attend(query, key, value, *offsets, **options):
        if case.planned and "mask" in options:
            options["mask"] = fa.plan(options["mask"])
        return fa.attention_varlen(query, key, value, *offsets, **options)

    return packed(attend, *case.lengths)


def jagged(case):
    """Nested tensors, of the packed ones that `packed` makes."""

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
    """torch.vmap over the batch; what all batches share is not mapped."""
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
    """torch's function: the same, with dimensions in front."""

    def attend(query, key, value, *, return_lse, return_weights, **options):
        given = dict(attn_mask=options.get("mask", options.get("bias")), scale=options.get("scale"))
        given |= dict(is_causal=options["causal"], enable_gqa=case.group > 1)
        if case.values % 3 == 0:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            return (compat.scaled_dot_product_attention(query, key, value, **given)[0],)
        return (compat.scaled_dot_product_attention(query, key, value, **given),)

    return attend


def _as_flash(options):
    window = tuple(-1 if side is None else side for side in options["window"] or (None, None))
    given = dict(softmax_scale=options.get("scale"), causal=options["causal"], window_size=window)
    given |= dict(softcap=options.get("softcap") or 0.0, alibi_slopes=options.get("alibi_slopes"))
    return given


def flash_dense(case):
    def attend(query, key, value, *, return_lse, return_weights, **options):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        given = _as_flash(options) | dict(return_attn_probs=return_lse)
        if "one width" in case.route and "square" in case.route:
            results = flash.flash_attn_qkvpacked_func(torch.stack((q, k, v), 2), **given)
        elif "one width" in case.route:
            results = flash.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **given)
        else:
            results = flash.flash_attn_func(q, k, v, **given)
        out, *rest = _tuple(results)
        return out.transpose(1, 2), *rest[:1]

    return attend


def flash_packed(case):
    def attend(q, k, v, cu_q, cu_k, *, max_seqlen_q=None, max_seqlen_k=None, return_lse, return_weights, **options):
        longest = case.Sq if max_seqlen_q is None else max_seqlen_q, case.Sk if max_seqlen_k is None else max_seqlen_k
        given = _as_flash(options) | dict(return_attn_probs=return_lse)
        if "one width" in case.route:
            kv = torch.stack((k, v), 1)
            results = flash.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, *longest, **given)
        else:
            results = flash.flash_attn_varlen_func(q, k, v, cu_q, cu_k, *longest, **given)
        return _tuple(results)[:2]

    return packed(attend, *case.lengths)


FLASH = frozenset(("scale", "softcap", "slopes", "causal", "window"))
OUT, OUT_AND_LSE = frozenset(("out",)), frozenset(("out", "lse"))
ROUTES = {
    "attention": Route(direct, forward=True),
    "attention_varlen": Route(varlen, packed=True, forward=True),
    "rank 3": Route(lambda case: of_lower_rank(case, 3), heads=1),
    "rank 2": Route(lambda case: of_lower_rank(case, 2), heads=1, batches=1),
    "jagged": Route(jagged, EVERYTHING - {"planned"}, packed=True),
    "vmap": Route(mapped, EVERYTHING - {"planned"}),
    "flipped": Route(flipped, EVERYTHING - {"planned", "dropout"}),
    "ones": Route(with_ones, EVERYTHING - {"planned"}),
    "merge": Route(split, MASKS | {"scale", "softcap", "sinks"}, OUT_AND_LSE),
    "sdpa": Route(sdpa, frozenset(("scale", "mask", "bias", "causal")), OUT, more=("top left",)),
    "flash": Route(flash_dense, FLASH, OUT_AND_LSE),
    "flash, one width": Route(flash_dense, FLASH, OUT_AND_LSE, more=("one width",)),
    "flash, one width, square": Route(flash_dense, FLASH, OUT_AND_LSE, more=("one width", "square", "ungrouped")),
    "flash varlen": Route(flash_packed, FLASH, OUT_AND_LSE, packed=True),
    "flash varlen, one width": Route(flash_packed, FLASH, OUT_AND_LSE, packed=True, more=("one width",)),
}
