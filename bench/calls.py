"""What a provider makes of a case, a call, and what of a call is timed."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fusedattn.call.packing import Packing, packing


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


def packing_of(case, tensors):
    """Where the real tokens of a case lie when they are packed."""
    if case.Sq != case.Sk:
        raise Unsupported("it packs as many keys as queries")
    lengths = case.lengths(tensors.query.device)
    return packing(F.pad(lengths.cumsum(0), (1, 0)), int(lengths.sum()), case.Sq)


def offsets_of(packed):
    """(cu_seqlens of queries, of keys, the longest of queries, of keys), in flash-attn's order."""
    offsets, longest = packed.offsets.int(), int(packed.lengths.max())
    return offsets, offsets, longest, longest


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
