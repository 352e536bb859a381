"""Who computes attention: ours, the eager formula, each backend of torch's SDPA forced by name, and FlexAttention.

A provider is setup(case, tensors) -> call, where call(query, key, value), or call(query, key, value, bias) of a case
that has one, is the output; it raises Unsupported(why) if it cannot. `step` makes of a call what is timed.
"""

import functools
import operator
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedattn as fa
from fusedattn.call import Arguments
from fusedattn.checks import checked


class Unsupported(Exception):
    """A provider cannot take a case; the text says why."""


def _square_if_causal(case):
    if case.causal and case.Sq != case.Sk:
        raise Unsupported("its causal mask is aligned to the top left, ours to the bottom right")


def _with_bias(function, options):
    """call(query, key, value[, bias]) of one that takes the arguments of `fusedattn.attention`."""

    def call(query, key, value, bias=None):
        return function(query, key, value, bias=bias, **options)

    return call


def _explain(case, tensors, backend=None):
    return fa.explain(*tensors[:3], bias=tensors.bias, backend=backend, **case.arguments(tensors.masks))


def fusedattn(case, tensors, backend=None):
    explanation = _explain(case, tensors, backend)
    if explanation.backend is None:
        raise Unsupported("; ".join(explanation.reasons[backend]))
    return _with_bias(fa.attention, case.arguments(tensors.masks) | dict(backend=backend))


def planned(case, tensors):
    """Ours, with a plan of the masks that was made before."""
    if not tensors.masks:
        raise Unsupported("there is no mask to plan")
    return _with_bias(fa.attention, case.arguments({"mask": fa.plan(**tensors.masks)}))


def naive(case, tensors):
    """The formula as eager PyTorch computes it in the dtype of its inputs."""
    return _with_bias(fa.reference.eager, case.arguments(tensors.masks))


def _visible(case, tensors):
    """The pairs that masks and window leave, a bool tensor that broadcasts to the scores; None is all of them."""
    options = case.arguments(tensors.masks) | dict(dropout_p=0.0)
    return fa.reference.visible(checked(Arguments(*tensors[:3], **options)), 0, case.Sq)


def sdpa(backend, case, tensors):
    words = case.words
    if "softcap" in words:
        raise Unsupported("it has no softcap")
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
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, visible if bias is None else bias, **options)

    def call(*inputs):
        try:
            return attend(*inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise Unsupported(_said(attend, inputs)) from error

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call(*tensors.inputs)
    return call


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
    from torch.nn.attention.flex_attention import create_block_mask

    device, (left, right), shift = tensors.query.device, case.sides, case.Sk - case.Sq
    owner = case.documents(device) if "documents" in case.words else None
    lengths = case.lengths(device) if "padding" in case.words else None
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

    batch = None if lengths is None else case.B
    return create_block_mask(seen, batch, None, case.Sq, case.Sk, device=device)


def flex_function(case, tensors):
    """What `flex` compiles: FlexAttention with the options of a case. The bias is captured, and so has a gradient."""
    from torch.nn.attention.flex_attention import flex_attention

    if "dropout" in case.words:
        raise Unsupported("it has no dropout")
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
    if tensors.query.device.type != "cuda":
        raise Unsupported("compiled for CUDA only in this benchmark")
    attend = flex_function(case, tensors)
    torch._dynamo.reset()  # one shape at a time: more than eight of them would not be compiled any more
    torch._functorch.config.donated_buffer = False  # the backward is timed again and again on one graph
    return functools.partial(torch.compile(attend, dynamic=False), block_mask=block_mask(case, tensors))


PROVIDERS = {
    "fusedattn": fusedattn,
    "sdpa:cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa:flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa:efficient": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "flex": flex,
    "naive": naive,
    "sdpa:math": functools.partial(sdpa, SDPBackend.MATH),
}
ANY = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Only where they are named: "sdpa" takes the backend that torch chooses, which is one of those above.
ASIDE = {"fusedattn+plan": planned, "sdpa": functools.partial(sdpa, ANY)}


def unchecked(case, name):
    """Why a provider's answer cannot be held to the rule, or ""."""
    ours = name == "naive" or name.startswith("fusedattn")
    return "" if ours or "dropout" not in case.words else "its dropout has bits of its own"


def find(name):
    """The provider of a name: one of PROVIDERS or ASIDE, or fusedattn:BACKEND for one backend of ours."""
    if name in PROVIDERS | ASIDE:
        return (PROVIDERS | ASIDE)[name]
    if name.startswith("fusedattn:"):
        return functools.partial(fusedattn, backend=name.removeprefix("fusedattn:"))
    raise ValueError(f"provider: expected one of {', '.join(PROVIDERS | ASIDE)} or fusedattn:BACKEND, got {name}")


def label(name, case, tensors):
    """A name as it stands in the CSV: our own says which of our backends took the case."""
    return f"{name}:{_explain(case, tensors).backend}" if name in ("fusedattn", "fusedattn+plan") else name


def step(mode, call, tensors):
    """What is timed: a closure that returns the output (forward) or the gradients of all inputs.

    forward needs no gradient; backward is alone, on a graph that is kept; forward_backward is both, as in training.
    """
    if mode == "forward":

        def forward():
            with torch.no_grad():
                return call(*tensors.inputs)

        return forward
    leaves = [tensor.detach().requires_grad_() for tensor in tensors.inputs]
    out = call(*leaves)
    grad_out = torch.empty_like(out).copy_(tensors.grad_out)  # as its output lies, so that nobody has to copy it
    if mode == "backward":
        return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    if mode == "forward_backward":
        del out
        return lambda: torch.autograd.grad(call(*leaves), leaves, grad_out)
    raise ValueError(f"mode: expected forward, backward or forward_backward, got {mode}")
