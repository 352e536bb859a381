"""A provider's call of a case, and the step of it that is timed."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from fusedattn.call.packing import Packing, packing


class Unsupported(Exception):
    """A provider cannot take a case; the text says why."""


class Call(NamedTuple):
    """A function of query, key, value and, of a case that has one, bias, with the layout of its tensors."""

    attend: Callable
    by_token: bool = False  # tensors but a bias are (B, S, H, D), contiguous; else (B, H, S, D)
    inside: Callable = contextlib.nullcontext  # makes the context to call it in
    packing: Packing | None = None  # tensors hold real tokens alone: (1, H, T, D), or (T, H, D) by token

    def __call__(self, *inputs):
        """The output (B, H, S, D) of tensors (B, H, S, D)."""
        with self.inside():
            return unpacked(self, self.attend(*packed(self, inputs)))


def packed(call, tensors):
    """Tensors (B, H, S, D) in the layout of a call; a fourth, the bias, as it is."""

    def pack(tensor):
        if not call.by_token and call.packing is None:
            return tensor
        tensor = tensor.transpose(1, 2)
        if call.packing is not None:
            tensor = call.packing.unpad(tensor)  # (T, H, D)
            tensor = tensor if call.by_token else tensor.transpose(0, 1)[None]
        return tensor.contiguous()

    return (*map(pack, tensors[:3]), *tensors[3:])


def unpacked(call, result):
    """An output, or a tuple of gradients, of a call, as (B, H, S, D); past the end of a sequence it is 0."""

    def unpack(tensor):
        if call.packing is not None:
            tensor = call.packing.pad(tensor if call.by_token else tensor[0].transpose(0, 1))
        return tensor.transpose(1, 2) if call.by_token or call.packing is not None else tensor

    return (*map(unpack, result[:3]), *result[3:]) if isinstance(result, tuple) else unpack(result)


def packing_of(case, tensors):
    """The Packing of a case: the places of its real tokens."""
    if case.Sq != case.Sk:
        raise Unsupported("it packs as many keys as queries")
    if {"keys", "filled"} & set(case.words):
        raise Unsupported("it packs the queries of its keys alone")
    lengths = case.lengths(tensors.query.device)
    return packing(F.pad(lengths.cumsum(0), (1, 0)), int(lengths.sum()), case.Sq)


def offsets_of(packing):
    """(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), as flash-attn orders them."""
    offsets, longest = packing.offsets.int(), int(packing.lengths.max())
    return offsets, offsets, longest, longest


# How often a call was made before its backward is timed alone: in training it was, and what repeats takes less time.
REPEATED = 3


@contextlib.contextmanager
def step(mode, call, tensors):
    """The function that is timed: it returns the output (forward) or the gradients of all inputs, in the call's layout.

    forward needs no gradient; backward is alone, on a graph that is kept; forward_backward is both, as in training.
    Entering this context is no part of attention, and takes the host as long as a tiny call.
    """
    with call.inside(), torch.set_grad_enabled(mode != "forward"):
        inputs = packed(call, tensors.inputs)
        if mode == "forward":
            yield lambda: call.attend(*inputs)
            return
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]

        def output():
            out = call.attend(*leaves)
            return out[0] if isinstance(out, tuple) else out  # the loss is of the output alone

        for _ in range(REPEATED if mode == "backward" else 1):
            out = None  # one graph at a time
            out = output()
        # With the strides of the output, so that nobody has to copy it.
        grad_out = torch.empty_like(out).copy_(packed(call, (tensors.grad_out,))[0])
        if mode == "backward":
            yield lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        elif mode == "forward_backward":
            del out
            yield lambda: torch.autograd.grad(output(), leaves, grad_out)
        else:
            raise ValueError(f"mode: expected forward, backward or forward_backward, got {mode}")
