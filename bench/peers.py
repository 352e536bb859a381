"""Attention by others: each backend of torch's SDPA, by name; FlexAttention; torch's own packed sequences; and
flash-attn, FlashAttention-4 and xformers where they are installed.
"""

import functools
import importlib
import inspect
import operator
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from fusedattn.call.form import Arguments
from fusedattn.call.rules import checked
from fusedattn.naive import formula

from .calls import Call, Unsupported, offsets_of, packing_of


def _square_if_causal(case):
    if case.causal and case.Sq != case.Sk:
        raise Unsupported("its causal mask is aligned to the top left, ours to the bottom right")


def _no(case, *words):
    """Refuse a case that has one of these options."""
    for word in words:
        if word in case.words:
            raise Unsupported(_LACKS[word])


_LACKS = {
    "bias": "it takes no bias",
    "documents": "it takes no mask of pairs",
    "padding": "it takes no mask of tokens, only packed sequences",
    "lengths": "it takes no mask of tokens, only packed sequences",
    "dropout": "it has no dropout",
    "softcap": "it has no softcap",
    "weights": "it returns no weights",
}


def _visible(case, tensors):
    """The pairs that masks and window leave, a bool tensor that broadcasts to the scores; None is all of them."""
    options = case.arguments(tensors.masks) | dict(dropout_p=0.0)
    return formula.visible(checked(Arguments(*tensors[:3], **options)), 0, case.Sq)


def sdpa(backend, case, tensors):
    words = case.words
    _no(case, "softcap", "weights")
    options = dict(dropout_p=float(words.get("dropout", 0)), enable_gqa=case.Hq != case.Hkv)
    visible = None
    if tensors.bias is not None or tensors.masks or "window" in words:
        visible = _visible(case, tensors)  # it takes no causal mask beside another
    else:
        _square_if_causal(case)
        options["is_causal"] = case.causal

    def attend(query, key, value, bias=None):
        if bias is not None and visible is not None:
            bias = bias.masked_fill(~visible, float("-inf"))
        return F.scaled_dot_product_attention(query, key, value, visible if bias is None else bias, **options)

    def call(*inputs):
        try:
            return attend(*inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise Unsupported(_said(attend, inputs)) from error

    found = Call(call, inside=functools.partial(sdpa_kernel, backend))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found(*tensors.inputs)
    return found


def _said(attend, inputs):
    """Why a backend of SDPA refuses: torch warns of what it misses, then raises "No available kernel"."""
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            attend(*inputs)
        except RuntimeError as error:
            last = str(error).partition("\n")[0]
    said = [str(reason.message).partition(" (Triggered")[0].strip() for reason in reasons]
    # Of the other backends it only says that they are not enabled, which is what was asked for.
    said = [each for each in said if not each.endswith(("not used because:", "runtime disabled."))]
    return "; ".join([*said, last])


def block_mask(case, tensors):
    """FlexAttention's mask of a case, from what its users would write; None where nothing is hidden."""

    device = tensors.query.device
    owner = case.documents(device) if "documents" in case.words else None
    lengths = case.lengths(device) if case.padded else None
    return _block_mask(device, case.sides, None if lengths is None else case.B, (case.Sq, case.Sk), owner, lengths)


def _block_mask(device, sides, batch, shape, owner, lengths=None):
    """FlexAttention's mask of a window, of the owners of tokens (S,), of lengths (B,); any may be None."""
    from torch.nn.attention.flex_attention import create_block_mask

    (left, right), shift = sides, shape[1] - shape[0]
    if all(x is None for x in (left, right, owner, lengths)):
        return None

    def seen(b, h, row, column):
        conditions = []
        if left is not None:
            conditions.append(column >= row + shift - left)
        if right is not None:
            conditions.append(column <= row + shift + right)
        if owner is not None:
            conditions.append(owner[row] == owner[column])
        if lengths is not None:
            conditions.append((row < lengths[b]) & (column < lengths[b]))
        return functools.reduce(operator.and_, conditions)

    return create_block_mask(seen, batch, None, *shape, device=device)


def flex_function(case, tensors):
    """What `flex` compiles: FlexAttention with the options of a case. The bias is captured, and so has a gradient."""
    from torch.nn.attention.flex_attention import flex_attention

    _no(case, "dropout", "weights")
    cap = float(case.words["softcap"]) if "softcap" in case.words else None
    grouped = case.Hq != case.Hkv

    def attend(query, key, value, bias=None, block_mask=None):
        def score(score, b, h, row, column):
            if cap is not None:
                score = cap * torch.tanh(score / cap)
            return score if bias is None else score + bias[0, h, row, column]

        modified = None if cap is None and bias is None else score
        return flex_attention(query, key, value, modified, block_mask, enable_gqa=grouped)

    return attend


def flex(case, tensors):
    """FlexAttention as it is meant to be used: compiled for the shape, with a block mask where there is a mask."""
    return functools.partial(_compiled(flex_function(case, tensors), tensors), block_mask=block_mask(case, tensors))


def _compiled(attend, tensors):
    if tensors.query.device.type != "cuda":
        raise Unsupported("compiled for CUDA only in this benchmark")
    torch._dynamo.reset()  # one shape at a time: more than eight of them would not be compiled any more
    torch._functorch.config.donated_buffer = False  # the backward is timed again and again on one graph
    return torch.compile(attend, dynamic=False)


def flex_packed(case, tensors):
    """FlexAttention on packed sequences, as documents of one."""
    _no(case, "bias", "documents")
    attend, found = _compiled(flex_function(case, tensors), tensors), packing_of(case, tensors)
    owner = torch.repeat_interleave(torch.arange(case.B, device=found.lengths.device), found.lengths)
    mask = _block_mask(owner.device, case.sides, None, (found.total, found.total), owner)
    return Call(functools.partial(attend, block_mask=mask), packing=found)


def jagged(case, tensors):
    """torch's SDPA on packed sequences, as nested tensors of the jagged layout."""
    _no(case, "bias", "documents", "softcap", "weights")
    if "window" in case.words:
        raise Unsupported("it has no window")
    found = packing_of(case, tensors)
    offsets, least, most = found.offsets, int(found.lengths.min()), int(found.lengths.max())
    options = dict(dropout_p=float(case.words.get("dropout", 0)), is_causal=case.causal, enable_gqa=case.Hq != case.Hkv)

    def attend(*packed):
        nested = (
            torch.nested.nested_tensor_from_jagged(each, offsets, min_seqlen=least, max_seqlen=most).transpose(1, 2)
            for each in packed
        )
        try:
            return F.scaled_dot_product_attention(*nested, **options).transpose(1, 2).values()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise Unsupported(str(error).partition("\n")[0]) from error

    return Call(attend, by_token=True, packing=found)


def torch_varlen(case, tensors):
    """torch's own function of packed sequences, which is FlashAttention-2."""
    from torch.nn.attention.varlen import varlen_attn

    _no(case, "bias", "documents", "dropout", "softcap", "weights")
    found, (left, right) = packing_of(case, tensors), case.sides
    offsets, options = offsets_of(found), dict(enable_gqa=True) if case.Hq != case.Hkv else {}
    if "window_size" in inspect.signature(varlen_attn).parameters:
        options["window_size"] = tuple(-1 if side is None else side for side in (left, right))
    elif left is None:  # torch 2.10
        options["is_causal"] = case.causal
    else:
        raise Unsupported("it has no window")
    return Call(lambda *inputs: varlen_attn(*inputs, *offsets, **options), by_token=True, packing=found)


PACKAGES = {  # where the function is of those that are not torch's
    "flash-attn": ("flash_attn", "flash_attn_func"),
    "flash-attn+packed": ("flash_attn", "flash_attn_varlen_func"),
    "fa4": ("flash_attn.cute.interface", "flash_attn_func"),
    "xformers": ("xformers.ops", "memory_efficient_attention"),
}


def _installed(name):
    module, function = PACKAGES[name]
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"{module}.{function} is not installed: {error}") from error


def flash(case, tensors):
    """FlashAttention-2, the package flash-attn."""
    function = _installed("flash-attn")
    _no(case, "padding", "lengths")
    return Call(functools.partial(function, **_flash_options(case)), by_token=True)


def flash_packed(case, tensors):
    """The same on packed sequences."""
    function, options, found = _installed("flash-attn+packed"), _flash_options(case), packing_of(case, tensors)
    offsets = offsets_of(found)
    return Call(lambda *inputs: function(*inputs, *offsets, **options), by_token=True, packing=found)


def _flash_options(case):
    _no(case, "bias", "documents", "weights")
    if case.Dv != case.D:
        raise Unsupported("it wants a value as wide as its key")
    window = tuple(-1 if side is None else side for side in case.sides)
    options = dict(dropout_p=float(case.words.get("dropout", 0)), softcap=float(case.words.get("softcap", 0)))
    return options | dict(causal=case.causal, window_size=window)


def fa4(case, tensors):
    """FlashAttention-4, which is written in CuTe."""
    function = _installed("fa4")
    _no(case, "bias", "documents", "padding", "lengths", "dropout", "weights")
    options = dict(causal=case.causal, window_size=case.sides, softcap=float(case.words.get("softcap", 0)))

    def call(query, key, value):
        found = function(query, key, value, **options)
        return found[0] if isinstance(found, tuple) else found  # some versions return an lse or None beside it

    return Call(call, by_token=True)


def xformers(case, tensors):
    function = _installed("xformers")
    masks = importlib.import_module("xformers.ops.fmha.attn_bias")
    _no(case, "documents", "padding", "lengths", "softcap", "weights")
    left, right = case.sides
    if tensors.bias is not None and (left, right) != (None, None):
        raise Unsupported("it gives a bias beside a causal mask or a window no gradient")
    fixed = None
    if case.causal and left is None:
        fixed = masks.LowerTriangularMask() if case.Sq == case.Sk else masks.LowerTriangularFromBottomRightMask()
    elif (left, right) != (None, None):
        sides = (case.Sk if left is None else left, case.Sk if right is None else right)
        fixed = masks.LocalAttentionFromBottomRightMask(*sides)
    group, rate = case.Hq // case.Hkv, float(case.words.get("dropout", 0))

    def call(query, key, value, bias=None):
        if bias is not None:
            bias = bias.expand(case.B, -1, -1, -1)  # it broadcasts nothing
        if group > 1:  # heads that share one of key and value are a dimension of their own
            query = query.unflatten(2, (case.Hkv, group))
            key, value = (x[:, :, :, None].expand(-1, -1, -1, group, -1) for x in (key, value))
            bias = None if bias is None else bias.unflatten(1, (case.Hkv, group))
        out = function(query, key, value, attn_bias=fixed if bias is None else bias, p=rate)
        return out.flatten(2, 3) if group > 1 else out

    return Call(call, by_token=True)


def is_installed(name):
    """Whether a provider's package is here, as torch is."""
    try:
        return name not in PACKAGES or _installed(name) is not None
    except Unsupported:
        return False
