"""Runs a call like an earlier one by "cpu" or "naive": nothing was recorded, and nothing is checked again."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..call.form import DIFFERENTIABLE, Call, in_memory, rank4, results, rows, watched
from ..call.layout import arrange
from ..cpu import flash
from ..cpu.parts import Rectangle
from ..naive import formula
from ..operators import attention
from ..private import TensorGuards, flash_attention_for_cpu, flash_attention_for_cpu_backward


def call_of(tensors: tuple, numbers: tuple) -> Call:
    """The Call of tensors as the caller gave them, and of the other fields of a Call."""
    query, key, value, bias, slopes, sinks, mask, key_mask, query_mask, seed, block_mask = tensors
    seed = seed if isinstance(seed, Tensor) else None  # one that is not a tensor drops nothing
    bias, slopes, sinks = rank4(bias), rows(slopes), rows(sinks)
    masks = rank4(mask), rows(key_mask), rows(query_mask)
    return Call(query, key, value, bias, slopes, sinks, *masks, seed, block_mask, *numbers)


class OnCpu:
    """Calls of one signature on a CPU, by a backend's run."""

    backend = "cpu"

    def __init__(self, call: Call, numbers: tuple, run: Callable):
        self.run = run
        self.wanted, self.numbers = numbers[-4:-2], call[_TENSORS:]
        save = numbers[-1] and any(isinstance(x, Tensor) and x.requires_grad for x in call[:DIFFERENTIABLE])
        self.save, self.scale, self.as_is = save, call.scale, call.query.is_contiguous()
        self.facts: dict[int, list] = {}  # of what is saved: five tensors, or seven
        self.guards: dict[int, Any] = {}  # that compare it, and a gradient of the output, in C++
        more = run is not attention.run_on_cpu or any(self.wanted) or (save and flash.is_few(call))
        self.causal = None if more else flash.at_once(call)
        # Autograd would refuse what is made here in inference mode.
        by_formula = run is formula.run and not any(self.wanted) and not torch.is_inference_mode_enabled()
        self.options, self.wide = formula.at_once(call) if by_formula else None, formula.wide(call)
        everything = Rectangle(0, call.query.shape[2], 0, call.key.shape[2])
        self.mask = flash.mask(call, everything, flash.offset(call)) if save and self.causal is not None else None

    def __call__(self, tensors: tuple):
        """What `attention` returns of a call with this signature."""
        query, key, value = tensors[:3]
        if self.options is not None:
            wide = query.to(self.wide), key.to(self.wide), value.to(self.wide)
            out = formula.formula(*wide, **self.options)[0].to(query.dtype)
        elif self.causal is None:
            out, lse, weights = self.run(call_of(tensors, self.numbers), *self.wanted)
            return results(4, out, lse, weights)
        elif self.save:
            return _at_once(self, query, key, value)
        else:
            out, _ = flash_attention_for_cpu(query, key, value, 0.0, self.causal, attn_mask=None, scale=self.scale)
        return out if self.as_is else arrange(out, query)

    def may_differentiate(self, grad_out: Tensor, saved: tuple) -> bool:
        """Whether the kernel may take these as they are. Raises if one came back with another shape or dtype."""
        count = len(saved)
        guards = self.guards.get(count)
        if guards is not None and guards.check(grad_out, *saved):
            return True
        before, after = self.facts[count], _facts(saved)
        attention.check_saved([x[:2] for x in before], [x[:2] for x in after])
        if before != after or not in_memory((grad_out,)) or not flash.in_rows(grad_out):
            return False
        tensors = grad_out, *saved
        if TensorGuards is not None and len(set(map(id, tensors))) == len(tensors):
            self.guards[count] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return True


class _AtOnce(torch.autograd.Function):
    """A call that is one call of PyTorch's kernel, by its OnCpu."""

    @staticmethod
    def forward(ctx, known: OnCpu, query: Tensor, key: Tensor, value: Tensor):
        centre = flash.centre(value)
        centred = value if centre is None else value - centre
        options = dict(attn_mask=known.mask, scale=known.scale)
        kept, lse = flash_attention_for_cpu(query, key, centred, 0.0, known.causal, **options)
        out = kept if centre is None else kept + flash.to_heads(centre, query.shape[1])
        out = out if known.as_is else arrange(out, query)
        ctx.known = known
        saved = query, key, value, out, lse, *(() if centre is None else (centre, kept))
        ctx.save_for_backward(*saved)
        if len(saved) not in known.facts:
            known.facts[len(saved)] = _facts(saved)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, out, lse, *more = saved = ctx.saved_tensors  # a checkpoint gives them once
        centre, kept = more or (None, out)
        known, need = ctx.known, ctx.needs_input_grad[1:]
        grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
        if not known.may_differentiate(grad_out, saved) or torch.is_grad_enabled() or watched():
            fields = call_of((query, key, value, *(None,) * (_TENSORS - 3)), known.numbers)
            stats = attention.cpu.stats(flash.Result(out, lse, kept))
            incoming = grad_out, None, None, out, out.new_empty(0), stats
            grads = attention.backward(*incoming, *fields, "cpu", [*need, *(False,) * (DIFFERENTIABLE - 3)])
        else:
            centred = value if centre is None else value - centre
            tensors = grad_out, query, key, centred, kept, lse
            options = dict(attn_mask=known.mask, scale=known.scale)
            grads = flash_attention_for_cpu_backward(*tensors, 0.0, known.causal, **options)
        if all(need):
            return None, *grads[:3]
        return None, *(grad if needed else None for grad, needed in zip(grads, need, strict=False))


def _facts(tensors) -> list:
    return [(x.shape, x.dtype, x.stride()) for x in tensors]


_TENSORS = Call._fields.index("cu_seqlens_q")  # of a Call that is not packed
# `apply` of the C++ class: Python's, in between, looks for wrappers that functorch left, of which none comes this far.
_at_once = super(torch.autograd.Function, _AtOnce).apply
