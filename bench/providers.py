"""Providers of attention, by name: fusedattn, the eager formula, and other libraries.

A provider is a function of a case and its tensors. It returns a function of query, key, value and, if there is one, the
bias; or a Call, which adds a layout, context or parameters. It raises Unsupported(why) for cases it cannot compute.
"""

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask, flex_attention

import fusedattn as fa
from fusedattn.dispatch.backends import BACKENDS

from .cases import SEED

_OURS = "alibi", "sinks", "weights"
_NOT_WITH_A_CACHE = "bias", "documents", "random", "keys", "lengths", "window", "softcap", "dropout", *_OURS


class Unsupported(Exception):
    """Error of a provider that cannot compute a case; the text says why."""


class Call(NamedTuple):
    """One provider's function of query, key, value and bias for one case, and the layout of its tensors."""

    attend: Callable
    by_token: bool = False  # tensors are (B, S, H, D)
    real: torch.Tensor | None = None  # bool (B, S): tokens to pack into (T, H, D) if by_token, otherwise (1, H, T, D)
    inside: Callable = contextlib.nullcontext  # returns the context to call the function in
    parameters: tuple = ()  # further tensors that get gradients

    def pack(self, tensors):
        """Return tensors (B, H, S, D) in the layout that the function takes; a bias stays unchanged."""
        return (*map(self._pack, tensors[:3]), *tensors[3:])

    def _pack(self, x):
        if self.real is not None:
            x = x.transpose(1, 2)[self.real]
            return x if self.by_token else x.transpose(0, 1)[None].contiguous()
        return x.transpose(1, 2).contiguous() if self.by_token else x

    def unpack(self, x):
        """Return a result of the function as (B, H, S, D), with zeros at padding."""
        if self.real is None:
            return x.transpose(1, 2) if self.by_token else x
        x = x if self.by_token else x[0].transpose(0, 1)
        padded = x.new_zeros(*self.real.shape, *x.shape[1:])
        padded[self.real] = x
        return padded.transpose(1, 2)


def _refuse(case, *names):
    for name in names:
        if case.option(name) is not None:
            raise Unsupported(f"it has no {name}")


def _number(case, name):
    return float(case.option(name) or 0)


def _window(case):
    return tuple(-1 if side is None else side for side in case.sides)  # -1 is no limit


def explain(case, tensors, backend=None):
    return fa.explain(*tensors[:3], bias=tensors.bias, backend=backend, **case.arguments(tensors.masks))


def formula(function, case, tensors, **options):
    options |= case.arguments(tensors.masks)
    return lambda query, key, value, bias=None: function(query, key, value, bias=bias, **options)


def fusedattn(case, tensors, backend=None):
    explanation = explain(case, tensors, backend)
    if explanation.backend is None:
        raise Unsupported("; ".join(explanation.reasons[backend]))
    return formula(fa.attention, case, tensors, backend=backend)


def cached(page, case, tensors):
    """Return a function that decodes from a contiguous cache or, if `page` is not None, from pages of `page` keys."""
    _refuse(case, *_NOT_WITH_A_CACHE)
    device = tensors.query.device
    options = dict(cache_seqlens=case.lengths(device).int(), causal=case.causal)
    if page is None:
        return lambda query, key, value: fa.attention_decode(query, key, value, **options)
    if case.Sk % page:
        raise Unsupported(f"{case.Sk} keys are no multiple of the page, {page}")
    table = torch.randperm(case.B * case.Sk // page, generator=torch.Generator().manual_seed(SEED))
    table, pool = table.view(case.B, -1).to(device, torch.int32), []
    for whole in (tensors.key, tensors.value):
        pages = whole.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
        pool.append(torch.empty_like(pages, memory_format=torch.contiguous_format))
        pool[-1][table.flatten().long()] = pages
    return lambda query, key, value: fa.attention_decode(query, *pool, block_table=table, **options)


def _real(case, tensors):
    """Return a bool mask (B, S): True for real tokens, False for padding, which packing removes."""
    _refuse(case, "bias", "documents", "random", "keys", "filled", *_OURS)
    if case.Sq != case.Sk:
        raise Unsupported("packing needs as many keys as queries")
    return tensors.masks.get("key_mask", torch.ones(case.B, case.Sk, dtype=torch.bool, device=tensors.query.device))


def packed(function, options, case, tensors, names=("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")):
    """Return a Call that runs `function` on packed sequences (T, H, D). names: its arguments for their layout."""
    real = _real(case, tensors)
    lengths = real.sum(1)
    offsets, longest = F.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())
    options |= dict(zip(names, (offsets, offsets, longest, longest), strict=True))
    return Call(functools.partial(function, **options), by_token=True, real=real)


def torch_packed(case, tensors):
    """Return the Call of torch's function for packed sequences, which runs FlashAttention-2."""
    from torch.nn.attention.varlen import varlen_attn

    _refuse(case, "dropout", "softcap")
    options = dict(enable_gqa=True) if case.Hq != case.Hkv else {}
    if "window_size" in inspect.signature(varlen_attn).parameters:
        options |= dict(window_size=_window(case))
    else:  # torch 2.10 has no windows
        _refuse(case, "window")
        options |= dict(is_causal=case.causal)
    return packed(varlen_attn, options, case, tensors, ("cu_seq_q", "cu_seq_k", "max_q", "max_k"))


def mask_of(create, case, device, real=None):
    """Return the mask that `create` (create_mask or create_block_mask) makes of a case; None if no pair is hidden."""
    (left, right), rows, keys, mods, batch = case.sides, case.Sq, case.Sk, [], 1
    document = case.documents(device) if "documents" in case.options else None
    if real is not None:
        document = torch.repeat_interleave(torch.arange(case.B, device=device), real.sum(1))
        rows = keys = len(document)
    elif any(word in case.options for word in ("keys", "lengths", "filled")):
        batch, lengths = case.B, case.lengths(device)
        mods.append(lambda b, h, row, column: column < lengths[b])
    if left is not None:
        mods.append(lambda b, h, row, column: column >= row + keys - rows - left)
    if right is not None:
        mods.append(lambda b, h, row, column: column <= row + keys - rows + right)
    if document is not None:
        mods.append(lambda b, h, row, column: document[row] == document[column])
    if "random" in case.words:
        shown = case.random(device)
        mods.append(lambda b, h, row, column: shown[row, column])
    return create(and_masks(*mods), batch, 1, rows, keys, device=device) if mods else None


def sdpa(backend, case, tensors):
    _refuse(case, "softcap", *_OURS)
    options = dict(dropout_p=_number(case, "dropout"), enable_gqa=case.Hq != case.Hkv)
    masked = tensors.bias is not None or tensors.masks or "window" in case.options or case.Sq != case.Sk
    causal = case.causal and not masked  # SDPA accepts is_causal or a mask, not both
    seen = None if causal else mask_of(create_mask, case, tensors.query.device)

    def attend(query, key, value, bias=None):
        mask = seen if bias is None else bias if seen is None else bias.masked_fill(~seen, float("-inf"))
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, **options)

    with torch.no_grad(), sdpa_kernel(backend), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attend(*tensors.inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch warns why each backend refuses, then raises "No available kernel"
            texts = [str(one.message).partition(" (Triggered")[0].strip() for one in caught]
            texts = [text for text in texts if not text.endswith(("not used because:", "runtime disabled."))]
            raise Unsupported("; ".join([*texts, str(error).partition("\n")[0]])) from error
    return Call(attend, inside=functools.partial(sdpa_kernel, backend))


def sliced(case, tensors):
    _refuse(case, *_NOT_WITH_A_CACHE)
    length, grouped = int(case.lengths("cpu").max()), case.Hq != case.Hkv

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key[:, :, :length], value[:, :, :length], enable_gqa=grouped)

    return attend


def flex_function(case):
    _refuse(case, "dropout", *_OURS)
    cap, grouped = _number(case, "softcap"), case.Hq != case.Hkv

    def attend(query, key, value, bias=None, block_mask=None):
        def modify(score, b, h, row, column):
            score = cap * torch.tanh(score / cap) if cap else score
            return score if bias is None else score + bias[0, h, row, column]

        modified = modify if cap or bias is not None else None
        return flex_attention(query, key, value, modified, block_mask, enable_gqa=grouped)

    return attend


def flex(case, tensors, real=None):
    """Return the Call of FlexAttention, compiled for the shape. With `real`, from `_real`, sequences are packed."""
    attend, device = flex_function(case), tensors.query.device
    if real is None:
        _refuse(case, "lengths", "filled")
    torch._dynamo.reset()  # otherwise it stops compiling after eight shapes
    torch._functorch.config.donated_buffer = False  # the backward runs many times on one graph
    compiled = torch.compile(attend, dynamic=False)
    return Call(functools.partial(compiled, block_mask=mask_of(create_block_mask, case, device, real)), real=real)


def flash(case, tensors):
    from flash_attn import flash_attn_func

    _refuse(case, "lengths", "filled", "keys")
    return Call(functools.partial(flash_attn_func, **_flash_options(case)), by_token=True)


def flash_packed(case, tensors):
    from flash_attn import flash_attn_varlen_func

    return packed(flash_attn_varlen_func, _flash_options(case), case, tensors)


def _flash_options(case):
    _refuse(case, "bias", "documents", "random", *_OURS)
    if case.Dv != case.D:
        raise Unsupported("it needs Dv = D")
    options = dict(dropout_p=_number(case, "dropout"), softcap=_number(case, "softcap"))
    return options | dict(causal=case.causal, window_size=_window(case))


def module(make, case, tensors):
    """Return the Call of the module make(theirs, causal). theirs: torch's module with fixed weights."""
    torch.manual_seed(SEED)  # draw the same weights each time
    width, like = case.Hq * case.D, dict(device=tensors.query.device, dtype=tensors.query.dtype)
    # torch's module takes its fast path only in eval mode, and without gradients.
    layer = make(torch.nn.MultiheadAttention(width, case.Hq, batch_first=True, **like), case.causal).eval()
    options = dict(need_weights=False)
    if case.causal and not isinstance(layer, fa.MultiHeadAttention):
        hidden = torch.ones(case.Sq, case.Sq, dtype=torch.bool, device=like["device"]).triu(1)
        options |= dict(attn_mask=hidden, is_causal=True)
    return Call(lambda x: layer(x, x, x, **options)[0], parameters=tuple(layer.parameters()))


def _our_module(theirs, causal):
    like = dict(device=theirs.in_proj_weight.device, dtype=theirs.in_proj_weight.dtype)
    layer = fa.MultiHeadAttention(theirs.embed_dim, theirs.num_heads, causal=causal, **like)
    weights, biases = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
    for projection, weight, bias in zip((layer.q_proj, layer.k_proj, layer.v_proj), weights, biases, strict=True):
        projection.load_state_dict(dict(weight=weight, bias=bias))
    layer.out_proj.load_state_dict(theirs.out_proj.state_dict())
    return layer


def setup(name, case, tensors):
    known = MODULES if "module" in case.words else PROVIDERS
    if name not in known:
        raise Unsupported("it is no module" if known is MODULES else "it computes modules alone")
    call = known[name](case, tensors)
    return call if isinstance(call, Call) else Call(call)


_SDPA = dict(cudnn=SDPBackend.CUDNN_ATTENTION, flash=SDPBackend.FLASH_ATTENTION)
_SDPA |= dict(efficient=SDPBackend.EFFICIENT_ATTENTION, math=SDPBackend.MATH)
PROVIDERS = {
    "fusedattn": fusedattn,
    **{f"fusedattn:{name}": functools.partial(fusedattn, backend=name) for name in BACKENDS},
    "fusedattn+packed": lambda case, tensors: packed(fa.attention_varlen, case.arguments({}), case, tensors),
    "fusedattn:cache": functools.partial(cached, None),
    **{f"fusedattn:pages={page}": functools.partial(cached, page) for page in (256, 16)},
    "sdpa": functools.partial(sdpa, [*_SDPA.values()]),  # the backend that torch chooses
    **{f"sdpa:{name}": functools.partial(sdpa, backend) for name, backend in _SDPA.items()},
    "sdpa+slice": sliced,
    "torch:varlen": torch_packed,
    "flash-attn": flash,
    "flash-attn+packed": flash_packed,
    "flex": flex,
    "flex+packed": lambda case, tensors: flex(case, tensors, _real(case, tensors)),
    "naive": functools.partial(formula, fa.reference.eager),
}
MODULES = {
    "fusedattn": functools.partial(module, _our_module),
    "fusedattn.compat": functools.partial(module, lambda theirs, causal: fa.compat.torch.convert(theirs)),
    "torch.nn": functools.partial(module, lambda theirs, causal: theirs),
}
