"""Attention by others: backends of torch's SDPA, FlexAttention, torch's packed sequences, flash-attn, FlashAttention-4
and xformers.

A provider is setup(case, tensors) -> call, as `calls.Call` has it; it raises Unsupported(why) if it cannot.
"""

import functools
import importlib
import inspect
import operator
import shutil
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from fusedattn.call.form import Arguments
from fusedattn.call.rules import checked
from fusedattn.naive import pairs
from fusedattn.naive.blocks import uncut

from .calls import Call, Unsupported, offsets_of, packing_of

COMPILERS = ("g++", "clang++", "cl")  # what torch compiles for a CPU with
_LACKS = {"bias": "it takes no bias", "documents": "it takes no mask of pairs", "weights": "it returns no weights"}
_LACKS |= {name: f"it has no {name}" for name in ("dropout", "softcap", "window")}
_TOKENS = ("padding", "lengths", "keys", "filled")
_LACKS |= dict.fromkeys(_TOKENS, "it takes no mask of tokens, only packed sequences")


def _no(case, *words):
    """Refuse a case that has one of these options."""
    for word in words:
        if word in case.words:
            raise Unsupported(_LACKS[word])


def _number(case, word):
    """The number of an option; 0 without it."""
    return float(case.words.get(word, 0))


def _window(case):
    """(left, right) as flash-attn has them: -1 is no limit."""
    return tuple(-1 if side is None else side for side in case.sides)


def sdpa(backend, case, tensors):
    words = case.words
    _no(case, "softcap", "weights")
    options = dict(dropout_p=_number(case, "dropout"), enable_gqa=case.Hq != case.Hkv)
    visible = None
    if tensors.bias is not None or tensors.masks or "window" in words:  # it takes no causal mask beside another
        masks = case.arguments(tensors.masks) | dict(dropout_p=0.0)
        call = checked(Arguments(*tensors[:3], **masks))
        visible = pairs.visible(call, uncut(call).blocks[0])
    elif case.causal and case.Sq != case.Sk:
        raise Unsupported("its causal mask is aligned to the top left, ours to the bottom right")
    else:
        options["is_causal"] = case.causal

    def attend(query, key, value, bias=None):
        if bias is not None and visible is not None:
            bias = bias.masked_fill(~visible, float("-inf"))
        return F.scaled_dot_product_attention(query, key, value, visible if bias is None else bias, **options)

    call = Call(_refusing(attend, _reasons), inside=functools.partial(sdpa_kernel, backend))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(*tensors.inputs)
    return call


def _refusing(attend, reasons=None):
    """A function of torch's whose refusals say why: reasons(attend, inputs), or the first line of the error."""

    def call(*inputs):
        try:
            return attend(*inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise Unsupported(reasons(attend, inputs) if reasons else str(error).partition("\n")[0]) from error

    return call


def _reasons(attend, inputs):
    """Why a backend of SDPA refuses: torch warns of what it misses, then raises "No available kernel"."""
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            attend(*inputs)
        except RuntimeError as error:
            last = str(error).partition("\n")[0]
    texts = [str(reason.message).partition(" (Triggered")[0].strip() for reason in reasons]
    # Of the other backends it only says that they are not enabled, which is what was asked for.
    return "; ".join([*(x for x in texts if not x.endswith(("not used because:", "runtime disabled."))), last])


def block_mask(case, tensors):
    """FlexAttention's mask of a case, as its users would write it; None where nothing is hidden."""
    device = tensors.query.device
    document = case.documents(device) if "documents" in case.words else None
    lengths = case.lengths(device) if case.padded or "keys" in case.words else None
    return _block_mask(case.sides, (case.Sq, case.Sk), device, document, lengths, case.padded)


def _block_mask(sides, shape, device, document, lengths=None, of_rows=False):
    """FlexAttention's mask of a window, documents (S,), and lengths (B,) of keys or of rows as well, or None."""
    from torch.nn.attention.flex_attention import create_block_mask

    (left, right), diagonal = sides, shape[1] - shape[0]
    conditions = [
        left is not None and (lambda b, row, column: column >= row + diagonal - left),
        right is not None and (lambda b, row, column: column <= row + diagonal + right),
        document is not None and (lambda b, row, column: document[row] == document[column]),
        lengths is not None and (lambda b, row, column: column < lengths[b]),
        of_rows and (lambda b, row, column: row < lengths[b]),
    ]
    if not (conditions := list(filter(None, conditions))):
        return None

    def seen(b, h, row, column):
        return functools.reduce(operator.and_, (condition(b, row, column) for condition in conditions))

    return create_block_mask(seen, None if lengths is None else len(lengths), None, *shape, device=device)


def flex_function(case, tensors):
    """The function that `flex` compiles: FlexAttention with the options of a case. A captured bias has a gradient."""
    from torch.nn.attention.flex_attention import flex_attention

    _no(case, "dropout", "weights")
    cap, grouped = _number(case, "softcap"), case.Hq != case.Hkv

    def attend(query, key, value, bias=None, block_mask=None):
        def modify(score, b, h, row, column):
            if cap:
                score = cap * torch.tanh(score / cap)
            return score if bias is None else score + bias[0, h, row, column]

        modified = modify if cap or bias is not None else None
        return flex_attention(query, key, value, modified, block_mask, enable_gqa=grouped)

    return attend


def flex(case, tensors):
    """FlexAttention as its users run it: compiled for the shape, with a block mask where there is a mask."""
    return functools.partial(_compiled(flex_function(case, tensors), tensors), block_mask=block_mask(case, tensors))


def _compiled(attend, tensors):
    if not tensors.query.is_cuda and not any(map(shutil.which, COMPILERS)):
        raise Unsupported(f"there is no C++ compiler here to compile it with: {', '.join(COMPILERS)}")
    torch._dynamo.reset()  # it compiles eight shapes and then no more
    torch._functorch.config.donated_buffer = False  # the backward is timed again and again on one graph
    return torch.compile(attend, dynamic=False)


def flex_packed(case, tensors):
    """FlexAttention on packed sequences, as documents of one."""
    _no(case, "bias", "documents")
    attend, packing = _compiled(flex_function(case, tensors), tensors), packing_of(case, tensors)
    document = torch.repeat_interleave(torch.arange(case.B, device=packing.lengths.device), packing.lengths)
    mask = _block_mask(case.sides, (packing.total, packing.total), document.device, document)
    return Call(functools.partial(attend, block_mask=mask), packing=packing)


def jagged(case, tensors):
    """torch's SDPA on packed sequences, as nested tensors of the jagged layout."""
    _no(case, "bias", "documents", "softcap", "weights", "window")
    packing = packing_of(case, tensors)
    lengths = dict(min_seqlen=int(packing.lengths.min()), max_seqlen=int(packing.lengths.max()))
    options = dict(dropout_p=_number(case, "dropout"), is_causal=case.causal, enable_gqa=case.Hq != case.Hkv)

    def attend(*packed):
        nest = torch.nested.nested_tensor_from_jagged
        nested = (nest(tensor, packing.offsets, **lengths).transpose(1, 2) for tensor in packed)
        return F.scaled_dot_product_attention(*nested, **options).transpose(1, 2).values()

    return Call(_refusing(attend), by_token=True, packing=packing)


def sliced(case, tensors):
    """torch's SDPA of a cache, sliced by hand to what is filled of it: as much of each sequence."""
    _no(case, "bias", "documents", "padding", "lengths", "keys", "softcap", "weights", "window")
    length, grouped = int(case.lengths("cpu").max()), case.Hq != case.Hkv

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key[:, :, :length], value[:, :, :length], enable_gqa=grouped)

    return attend


def torch_varlen(case, tensors):
    """torch's own function of packed sequences, which is FlashAttention-2."""
    from torch.nn.attention.varlen import varlen_attn

    _no(case, "bias", "documents", "dropout", "softcap", "weights")
    options = dict(enable_gqa=True) if case.Hq != case.Hkv else {}
    if "window_size" in inspect.signature(varlen_attn).parameters:
        options["window_size"] = _window(case)
    else:  # torch 2.10
        _no(case, "window")
        options["is_causal"] = case.causal
    return _by_offsets(varlen_attn, options, case, tensors)


def _by_offsets(function, options, case, tensors):
    packing = packing_of(case, tensors)
    offsets = offsets_of(packing)
    return Call(lambda *inputs: function(*inputs, *offsets, **options), by_token=True, packing=packing)


PACKAGES = {  # {provider: (module, function) of a package that is not torch}
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


def is_installed(name):
    """Whether the package of a provider is here, as torch is."""
    try:
        return name not in PACKAGES or _installed(name) is not None
    except Unsupported:
        return False


def flash(case, tensors):
    """FlashAttention-2, the package flash-attn."""
    function = _installed("flash-attn")
    _no(case, *_TOKENS)
    return Call(functools.partial(function, **_flash_options(case)), by_token=True)


def flash_packed(case, tensors):
    """FlashAttention-2 on packed sequences."""
    return _by_offsets(_installed("flash-attn+packed"), _flash_options(case), case, tensors)


def _flash_options(case):
    _no(case, "bias", "documents", "weights")
    if case.Dv != case.D:
        raise Unsupported("it wants a value as wide as its key")
    options = dict(dropout_p=_number(case, "dropout"), softcap=_number(case, "softcap"))
    return options | dict(causal=case.causal, window_size=_window(case))


def fa4(case, tensors):
    """FlashAttention-4, which is written in CuTe."""
    function = _installed("fa4")
    _no(case, "bias", "documents", "dropout", "weights", *_TOKENS)
    options = dict(causal=case.causal, window_size=case.sides, softcap=_number(case, "softcap"))

    def attend(query, key, value):
        out = function(query, key, value, **options)
        return out[0] if isinstance(out, tuple) else out  # some versions return an lse or None beside it

    return Call(attend, by_token=True)


def xformers(case, tensors):
    function = _installed("xformers")
    masks = importlib.import_module("xformers.ops.fmha.attn_bias")
    _no(case, "documents", "softcap", "weights", *_TOKENS)
    left, right = case.sides
    if tensors.bias is not None and (left, right) != (None, None):
        raise Unsupported("it gives a bias beside a causal mask or a window no gradient")
    mask = None
    if case.causal and left is None:
        mask = masks.LowerTriangularMask() if case.Sq == case.Sk else masks.LowerTriangularFromBottomRightMask()
    elif (left, right) != (None, None):
        sides = (case.Sk if left is None else left, case.Sk if right is None else right)
        mask = masks.LocalAttentionFromBottomRightMask(*sides)
    group, rate = case.Hq // case.Hkv, _number(case, "dropout")

    def attend(query, key, value, bias=None):
        if bias is not None:
            bias = bias.expand(case.B, -1, -1, -1)  # it broadcasts nothing
        if group > 1:  # query heads that share a kv head are a dimension of their own
            query = query.unflatten(2, (case.Hkv, group))
            key, value = (x[:, :, :, None].expand(-1, -1, -1, group, -1) for x in (key, value))
            bias = None if bias is None else bias.unflatten(1, (case.Hkv, group))
        out = function(query, key, value, attn_bias=mask if bias is None else bias, p=rate)
        return out.flatten(2, 3) if group > 1 else out

    return Call(attend, by_token=True)
