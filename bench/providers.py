"""Who computes attention: ours, the eager formula, each backend of torch's SDPA forced by name, and FlexAttention.

A provider is setup(case, tensors) -> call, where call(query, key, value) is the output; it raises Unsupported(why) if
it cannot. `step` makes of a call what is timed.
"""

import functools
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusedattn as fa


class Unsupported(Exception):
    """A provider cannot take a case; the text says why."""


def _square_if_causal(case):
    if case.causal and case.Sq != case.Sk:
        raise Unsupported("its causal mask is aligned to the top left, ours to the bottom right")


def fusedattn(case, tensors, backend=None):
    options = dict(causal=case.causal, backend=backend)
    explanation = fa.explain(*tensors[:3], **options)
    if explanation.backend is None:
        raise Unsupported("; ".join(explanation.reasons[backend]))
    return functools.partial(fa.attention, **options)


def naive(case, tensors):
    """The formula as eager PyTorch computes it in the dtype of its inputs."""
    return functools.partial(fa.reference.eager, causal=case.causal)


def sdpa(backend, case, tensors):
    _square_if_causal(case)
    options = dict(is_causal=case.causal, enable_gqa=case.Hq != case.Hkv)

    def call(query, key, value):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, **options)

    with warnings.catch_warnings(record=True) as reasons, torch.no_grad():
        warnings.simplefilter("always")
        try:
            call(*tensors[:3])
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch warns of what it misses, then raises "No available kernel"
            said = [str(reason.message).partition(" (Triggered")[0].strip() for reason in reasons]
            # Of the other backends it only says that they are not enabled, which is what was asked for.
            said = [each for each in said if not each.endswith(("not used because:", "runtime disabled."))]
            raise Unsupported("; ".join([*said, str(error).partition("\n")[0]])) from error
    return call


def flex(case, tensors):
    """FlexAttention as it is meant to be used: compiled for the shape, with a block mask where there is a mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if tensors.query.device.type != "cuda":
        raise Unsupported("compiled for CUDA only in this benchmark")
    torch._dynamo.reset()  # one shape at a time: more than eight of them would not be compiled any more
    torch._functorch.config.donated_buffer = False  # the backward is timed again and again on one graph
    block_mask = None
    if case.causal:
        shift = case.Sk - case.Sq
        block_mask = create_block_mask(
            lambda b, h, row, key: key <= row + shift, None, None, case.Sq, case.Sk, device=tensors.query.device
        )
    options = dict(block_mask=block_mask, enable_gqa=case.Hq != case.Hkv)
    return functools.partial(torch.compile(flex_attention, dynamic=False), **options)


PROVIDERS = {
    "fusedattn": fusedattn,
    "sdpa:cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa:flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa:efficient": functools.partial(sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "flex": flex,
    "naive": naive,
    "sdpa:math": functools.partial(sdpa, SDPBackend.MATH),
}


def find(name):
    """The provider of a name: one of PROVIDERS, or fusedattn:BACKEND for one backend of ours."""
    if name in PROVIDERS:
        return PROVIDERS[name]
    if name.startswith("fusedattn:"):
        return functools.partial(fusedattn, backend=name.removeprefix("fusedattn:"))
    raise ValueError(f"provider: expected one of {', '.join(PROVIDERS)} or fusedattn:BACKEND, got {name}")


def label(name, case, tensors):
    """A name as it stands in the CSV: our own says which of our backends took the case."""
    return f"fusedattn:{fa.explain(*tensors[:3], causal=case.causal).backend}" if name == "fusedattn" else name


def step(mode, call, tensors):
    """What is timed: a closure that returns the output (forward) or the three gradients.

    forward needs no gradient; backward is alone, on a graph that is kept; forward_backward is both, as in training.
    """
    if mode == "forward":

        def forward():
            with torch.no_grad():
                return call(*tensors[:3])

        return forward
    leaves = [tensor.detach().requires_grad_() for tensor in tensors[:3]]
    out = call(*leaves)
    grad_out = torch.empty_like(out).copy_(tensors.grad_out)  # as its output lies, so that nobody has to copy it
    if mode == "backward":
        return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    if mode == "forward_backward":
        del out
        return lambda: torch.autograd.grad(call(*leaves), leaves, grad_out)
    raise ValueError(f"mode: expected forward, backward or forward_backward, got {mode}")
