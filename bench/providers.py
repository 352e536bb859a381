"""Who computes attention: ours, the eager formula, each backend of torch's SDPA forced by name, FlexAttention, and
flash-attn, FlashAttention-4 and xformers where they are installed.

A provider is setup(case, tensors) -> call, where call(query, key, value), or call(query, key, value, bias) of a case
that has one, is the output, or output and weights; it raises Unsupported(why) if it cannot. `step` makes of a call
what is timed.
"""

import contextlib
import functools
import importlib
import inspect
import operator
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedattn as fa
from fusedattn import backends
from fusedattn.call import Arguments
from fusedattn.checks import checked
from fusedattn.checks_varlen import Packed, checked_packed
from fusedattn.naive import visible as pairs_seen
from fusedattn.packing import Packing, packing

from . import cases, variants


class Unsupported(Exception):
    """A provider cannot take a case; the text says why."""


class Call(NamedTuple):
    """What a setup returns that wants more than a function does, whose tensors are (B, H, S, D)."""

    attend: Callable
    by_token: bool = False  # its tensors, but for a bias, are (B, S, H, D): it gets them so, contiguous
    inside: Callable = contextlib.nullcontext  # makes the context to call it in
    packing: Packing | None = None  # its tensors hold real tokens alone, (1, H, T, D), or (T, H, D) by token

    def __call__(self, *inputs):
        """As any other call, on tensors (B, H, S, D)."""
        with self.inside():
            return given_back(self, self.attend(*taken(self, inputs)))


def _call(setup):
    return setup if isinstance(setup, Call) else Call(setup)


def _laid(call, tensor):
    """A tensor (B, H, S, D) as a call takes it."""
    if not call.by_token and call.packing is None:
        return tensor
    tensor = tensor.transpose(1, 2)
    if call.packing is not None:
        tensor = call.packing.unpad(tensor)  # (T, H, D)
        tensor = tensor if call.by_token else tensor.transpose(0, 1)[None]
    return tensor.contiguous()


def _laid_back(call, tensor):
    """What a call gives in the place of a tensor (B, H, S, D), as such; past the end of a sequence it is 0."""
    if call.packing is not None:
        tensor = call.packing.pad(tensor if call.by_token else tensor[0].transpose(0, 1))
    return tensor.transpose(1, 2) if call.by_token or call.packing is not None else tensor


def taken(call, tensors):
    """Tensors (B, H, S, D), as a call takes them; a bias stays."""
    return (*(_laid(_call(call), tensor) for tensor in tensors[:3]), *tensors[3:])


def given_back(call, result):
    """An output, or the gradients of all inputs, as (B, H, S, D)."""
    if not isinstance(result, tuple):
        return _laid_back(_call(call), result)
    return (*(_laid_back(_call(call), tensor) for tensor in result[:3]), *result[3:])


def _square_if_causal(case):
    if case.causal and case.Sq != case.Sk:
        raise Unsupported("its causal mask is aligned to the top left, ours to the bottom right")


def _with_bias(function, options):
    """call(query, key, value[, bias]) of one that takes the arguments of `fusedattn.attention`."""

    def call(query, key, value, bias=None):
        return function(query, key, value, bias=bias, **options)

    return call


def _explain(case, tensors, backend=None):
    return fa.explain(*tensors[:3], bias=tensors.bias, backend=backend, **_arguments(case, tensors.masks))


def _arguments(case, masks):
    """Those of `fusedattn.attention`, all but the bias."""
    return case.arguments(masks) | dict(return_weights="weights" in case.words)


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


def fusedattn(case, tensors, backend=None):
    explanation = _explain(case, tensors, backend)
    if explanation.backend is None:
        raise Unsupported("; ".join(explanation.reasons[backend]))
    return _with_bias(fa.attention, _arguments(case, tensors.masks) | dict(backend=backend))


def by_variant(name, case, tensors):
    """Ours, by one form of one of its kernels."""
    if not variants.concerns(name, case):
        raise Unsupported("it is for another width")
    call = fusedattn(case, tensors, backend=variants.backend(name))
    return Call(call, inside=variants.inside(name))


def cached(page, case, tensors):
    """Ours, of a cache that is full: in one piece, or in shuffled pages of so many keys."""
    if case.words:
        raise Unsupported("it is timed without options")
    device, kernel = tensors.query.device, "triton" if tensors.query.is_cuda else None
    lengths = torch.full((case.B,), case.Sk, dtype=torch.int32, device=device)
    options = dict(cache_seqlens=lengths, causal=case.causal, backend=kernel)
    if page is None:
        return lambda query, key, value: fa.attention_decode(query, key, value, **options)
    if case.Sk % page:
        raise Unsupported(f"its keys are no multiple of the page, {page}")
    table = torch.randperm(case.B * case.Sk // page, generator=torch.Generator().manual_seed(cases.SEED))
    table = table.view(case.B, -1).to(device, torch.int32)
    pool = []
    for whole in (tensors.key, tensors.value):
        pages = whole.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
        pool.append(torch.empty_like(pages, memory_format=torch.contiguous_format))
        pool[-1][table.flatten().long()] = pages
    return lambda query, key, value: fa.attention_decode(query, *pool, block_table=table, **options)


def planned(case, tensors):
    """Ours, with a plan of the masks that was made before."""
    if not tensors.masks:
        raise Unsupported("there is no mask to plan")
    return _with_bias(fa.attention, _arguments(case, {"mask": fa.plan(**tensors.masks)}))


def _packing(case, tensors):
    """Where the real tokens of a case lie when they are packed."""
    if case.Sq != case.Sk:
        raise Unsupported("it packs as many keys as queries")
    lengths = case.lengths(tensors.query.device)
    return packing(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), int(lengths.sum()), case.Sq)


def _offsets(packed):
    """(cu_seqlens of queries and of keys, their longest lengths), as everybody takes them, the first of whom were
    flash-attn."""
    offsets, longest = packed.offsets.int(), int(packed.lengths.max())
    return offsets, offsets, longest, longest


def _by_sequence(case, masks):
    """Arguments of `fusedattn.attention_varlen` that are not offsets: what pads a sequence is not there."""
    return case.arguments({name: mask for name, mask in masks.items() if name == "mask"})


def packed(case, tensors):
    """Ours, on packed sequences."""
    if "weights" in case.words:
        raise Unsupported("its weights are packed, those that they are held to are not")
    found = _packing(case, tensors)
    cu_q, cu_k, most_q, most_k = _offsets(found)
    options = _by_sequence(case, tensors.masks) | dict(max_seqlen_q=most_q, max_seqlen_k=most_k)

    def call(query, key, value, bias=None):
        return fa.attention_varlen(query, key, value, cu_q, cu_k, bias=bias, **options)

    return Call(call, by_token=True, packing=found)


def _packed_backend(case, tensors):
    """The backend that takes packed sequences of a case."""
    found = _packing(case, tensors)
    inputs = (_laid(Call(None, by_token=True, packing=found), tensor) for tensor in tensors[:3])
    options = _by_sequence(case, tensors.masks) | dict(bias=tensors.bias)
    return backends.choose(checked_packed(Packed(*inputs, *_offsets(found)), options, False)).name


def naive(case, tensors):
    """The formula as eager PyTorch computes it in the dtype of its inputs."""
    return _with_bias(fa.reference.eager, _arguments(case, tensors.masks))


def _visible(case, tensors):
    """The pairs that masks and window leave, a bool tensor that broadcasts to the scores; None is all of them."""
    options = case.arguments(tensors.masks) | dict(dropout_p=0.0)
    return pairs_seen(checked(Arguments(*tensors[:3], **options)), 0, case.Sq)


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
    attend, found = _compiled(flex_function(case, tensors), tensors), _packing(case, tensors)
    owner = torch.repeat_interleave(torch.arange(case.B, device=found.lengths.device), found.lengths)
    mask = _block_mask(owner.device, case.sides, None, (found.total, found.total), owner)
    return Call(functools.partial(attend, block_mask=mask), packing=found)


def jagged(case, tensors):
    """torch's SDPA on packed sequences, as nested tensors of the jagged layout."""
    _no(case, "bias", "documents", "softcap", "weights")
    if "window" in case.words:
        raise Unsupported("it has no window")
    found = _packing(case, tensors)
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
    found, (left, right) = _packing(case, tensors), case.sides
    offsets, options = _offsets(found), dict(enable_gqa=True) if case.Hq != case.Hkv else {}
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
    function, options, found = _installed("flash-attn+packed"), _flash_options(case), _packing(case, tensors)
    offsets = _offsets(found)
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


PROVIDERS = {
    "fusedattn": fusedattn,
    "sdpa:cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa:flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa:efficient": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "flash-attn": flash,
    "fa4": fa4,
    "xformers": xformers,
    "flex": flex,
    "naive": naive,
    "sdpa:math": functools.partial(sdpa, SDPBackend.MATH),
    "fusedattn:naive": functools.partial(fusedattn, backend="naive"),
}
ANY = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Only where they are named: "sdpa" takes the backend that torch chooses, which is one of those above.
ASIDE = {
    "fusedattn+plan": planned,
    "sdpa": functools.partial(sdpa, ANY),
    "fusedattn:cache": functools.partial(cached, None),
    "fusedattn+packed": packed,
    "torch:varlen": torch_varlen,
    "flash-attn+packed": flash_packed,
    "sdpa+packed": jagged,
    "flex+packed": flex_packed,
}
ASIDE |= {f"fusedattn:pages={page}": functools.partial(cached, page) for page in (256, 16)}
OURS = ("fusedattn", "fusedattn+plan", "fusedattn+packed")  # whose rows say which of our backends took the case


def usual(device):
    """The names of those that are compared where none is named: on a GPU all that are installed."""
    if torch.device(device).type != "cuda":
        return ["fusedattn", "naive", "sdpa:math"]
    return [name for name in PROVIDERS if name not in PACKAGES or _is_installed(name)]


def usual_packed(device):
    """The same of packed sequences, ours with padding beside them."""
    if torch.device(device).type != "cuda":
        return ["fusedattn+packed", "fusedattn", "naive", "sdpa+packed"]
    others = ("torch:varlen", "flash-attn+packed", "sdpa+packed", "flex+packed")
    return ["fusedattn+packed", "fusedattn", *(name for name in others if name not in PACKAGES or _is_installed(name))]


def _is_installed(name):
    try:
        _installed(name)
    except Unsupported:
        return False
    return True


def unchecked(case, name):
    """Why a provider's answer cannot be held to the rule, or ""."""
    ours = name == "naive" or name.startswith("fusedattn")
    return "" if ours or "dropout" not in case.words else "its dropout has bits of its own"


def find(name):
    """The provider of a name: one of PROVIDERS or ASIDE, ours by fusedattn:BACKEND, or a variant."""
    if name in PROVIDERS | ASIDE:
        return (PROVIDERS | ASIDE)[name]
    if variants.known(name):
        return functools.partial(by_variant, name)
    if name.startswith("fusedattn:"):
        return functools.partial(fusedattn, backend=name.removeprefix("fusedattn:"))
    raise ValueError(f"provider: expected one of {', '.join(PROVIDERS | ASIDE)} or fusedattn:BACKEND, got {name}")


def label(name, case, tensors):
    """A name as it stands in the CSV: our own says which of our backends took the case."""
    if name not in OURS:
        return name
    taken_by = _packed_backend(case, tensors) if name == "fusedattn+packed" else _explain(case, tensors).backend
    return f"{name}:{taken_by}"


@contextlib.contextmanager
def around(mode, call):
    """What a bare step runs in: entering it is no part of attention, and on the host as long as a tiny call."""
    with _call(call).inside(), torch.set_grad_enabled(mode != "forward"):
        yield


def step(mode, call, tensors, bare=False):
    """What is timed: a closure that returns the output (forward) or the gradients of all inputs, as the call lays them.

    forward needs no gradient; backward is alone, on a graph that is kept; forward_backward is both, as in training.
    A bare one is to run inside of `around`, where it is made as well; any other one enters that itself.
    """
    if not bare:
        with around(mode, call):
            inner = step(mode, call, tensors, bare=True)

        def entered():
            with around(mode, call):
                return inner()

        return entered
    attend, inputs = _call(call).attend, taken(call, tensors.inputs)
    if mode == "forward":
        return lambda: attend(*inputs)

    def output():
        out = attend(*leaves)
        return out[0] if isinstance(out, tuple) else out  # the loss is of the output alone

    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = output()
    # As its output lies, so that nobody has to copy it.
    grad_out = torch.empty_like(out).copy_(taken(call, (tensors.grad_out,))[0])
    if mode == "backward":
        return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    if mode == "forward_backward":
        del out
        return lambda: torch.autograd.grad(output(), leaves, grad_out)
    raise ValueError(f"mode: expected forward, backward or forward_backward, got {mode}")
