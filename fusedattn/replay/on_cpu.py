"""Runs a call like an earlier one by "cpu" or "naive": nothing was recorded, and nothing is checked again."""

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..call.form import DIFFERENTIABLE, Call, rank4, results, rows, watched
from ..call.layout import arrange, dense
from ..cpu import centre as common, few, flash, kernel, run as cpu
from ..cpu.parts import Rectangle
from ..naive import formula
from ..operators import attention, backward, schema
from ..private import (
    TensorGuards,
    can_guard,
    current_node,
    flash_attention_for_cpu,
    flash_attention_for_cpu_backward,
    saved_by,
    saved_tensors_hooks,
)


def call_of(tensors: tuple, numbers: tuple) -> Call:
    """The Call of tensors as the caller gave them, and of the other fields of a Call."""
    query, key, value, bias, slopes, sinks, mask, key_mask, query_mask, seed, block_mask = tensors
    seed = seed if isinstance(seed, Tensor) and numbers[_DROPOUT] else None  # an int is there for nothing to drop
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
        self.save, self.scale = save, call.scale
        self.strides = dense(call.query, call.query.shape).stride()  # of the output
        self.facts: dict[int, list] = {}  # of what our own node saves: five tensors, or seven
        self.guards: dict[int, Any] = {}  # that compare it in C++
        long_way = any(self.wanted) or (save and cpu.is_narrow(call))
        self.causal = None if run is not attention.run_on_cpu or long_way else flash.at_once(call)
        self.few = few.is_few(call)
        # Autograd would refuse what is made here in inference mode.
        by_formula = run is attention.run_naively and not any(self.wanted) and not torch.is_inference_mode_enabled()
        self.options, self.wide = formula.at_once(call) if by_formula else None, formula.wide(call)
        if self.causal is not None:
            everything = Rectangle(0, call.query.shape[2], 0, call.key.shape[2], self.causal)
            self.mask = flash.mask(call, everything, flash.offset(call))
            self.added = few.added_to_few(call, everything, 0.0) if self.few else None

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
            centre = common.centre(value)
            if self.few or centre is not None or current_node is None or saved_tensors_hooks(False) is not None:
                return _at_once(self, centre, query, key, value)
            options = dict(attn_mask=self.mask, scale=self.scale)
            out, lse = flash_attention_for_cpu(query, key, value, 0.0, self.causal, **options)
            if kernel.passes_over(key.shape[2], lse):
                return _at_once(self, centre, query, key, value)
            out.grad_fn.register_prehook(self.before_backward)  # PyTorch's own node: one in Python takes 50 us more
        else:
            out, _ = self.attend(query, key, value)
        return self.arranged(out, query)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """(output, lse less the offset), in the kernel's order of dimensions."""
        assert self.causal is not None
        return kernel.attend(query, key, value, self.causal, self.mask, self.scale)

    def arranged(self, out: Tensor, query: Tensor) -> Tensor:
        """The output in the order of dimensions of query, which is how the kernel writes most."""
        return out if out.stride() == self.strides else arrange(out, query)

    def differentiate(self, tensors: tuple, grad_out: Tensor, need: list[bool]) -> tuple:
        """Gradients by the operator, whose own derivative and vmap are right."""
        query, key, value, out, lse, kept = tensors
        fields = call_of((query, key, value, *(None,) * (_TENSORS - 3)), self.numbers)
        stats = cpu.stats(flash.Result(out, lse, kept))
        incoming = grad_out, None, None, out, out.new_empty(0), stats
        return backward.backward(*incoming, *fields, "cpu", [*need, *(False,) * (DIFFERENTIABLE - 3)])[:3]

    def before_backward(self, grads: tuple) -> tuple | None:
        """Replaces the node's gradients by the operator's.

        Where something watches or differentiates the backward, and where scores are too large for the kernel's.
        """
        grad_out, *others = grads
        if grad_out is None or is_compiling():
            return None  # a compiler of backwards sees PyTorch's node, and has no derivative of it
        assert current_node is not None
        node, thread = current_node(), get_ident()
        saved = saved_by(node)
        if not (torch.is_grad_enabled() or watched() or cpu.too_large(saved[4])):
            return None
        need = [edge is not None for edge, _ in node.next_functions[:3]]
        gradients = self.differentiate((*saved, saved[3]), grad_out, need)

        def after_backward(instead: tuple, _) -> tuple | None:
            if get_ident() != thread:
                return None
            handle.remove()
            pairs = zip(instead, gradients, strict=False)
            return tuple([None if before is None else grad for before, grad in pairs]) + instead[3:]

        handle = node.register_hook(after_backward)
        return torch.zeros_like(saved[3]), *others  # the kernel computes what is not used

    def may_differentiate(self, saved: tuple) -> bool:
        """Whether the kernel may take these as they are. Raises if one came back with another shape or dtype."""
        count = len(saved)
        guards = self.guards.get(count)
        if guards is not None and can_guard(saved) and guards.check(*saved):
            return True
        before, after = self.facts[count], _facts(saved)
        schema.check_saved([x[:2] for x in before], [x[:2] for x in after])
        if before != after:
            return False
        if TensorGuards is not None and len(set(map(id, saved))) == count:
            self.guards[count] = TensorGuards(*saved, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        return True


class _AtOnce(torch.autograd.Function):
    """A call that is one call of PyTorch's kernel, where hooks take what is saved or values are centred."""

    @staticmethod
    def forward(ctx, known: OnCpu, centre: Tensor | None, query: Tensor, key: Tensor, value: Tensor):
        out, lse = known.attend(query, key, value)
        if centre is not None:
            kept, _ = known.attend(query, key, value - centre)
            kept, centre = common.with_centre(out, kept, lse, centre)
        out = known.arranged(out, query)
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
        known, need = ctx.known, ctx.needs_input_grad[2:]
        long_way = not known.may_differentiate(saved) or torch.is_grad_enabled() or watched()
        long_way = long_way or torch.is_autocast_enabled("cpu")  # which would round the formula's products
        if long_way or not known.few and cpu.too_large(lse):
            grads = known.differentiate((query, key, value, out, lse, kept), grad_out, need)
        elif known.few:
            grads = few.differentiate_few((query, key, value), known.scale, known.added, grad_out)
        else:
            centred = value if centre is None else value - centre
            tensors = grad_out, query, key, centred, kept, lse
            options = dict(attn_mask=known.mask, scale=known.scale)
            grads = flash_attention_for_cpu_backward(*tensors, 0.0, known.causal, **options)
        if all(need):
            return None, None, *grads
        return None, None, *(grad if needed else None for grad, needed in zip(grads, need, strict=True))


def _facts(tensors) -> list:
    return [(x.shape, x.dtype, x.stride()) for x in tensors]


_TENSORS = Call._fields.index("cu_seqlens_q")  # of a Call that is not packed
_DROPOUT = Call._fields.index("dropout_p") - _TENSORS
# `apply` of the C++ class: Python's, in between, looks for wrappers that functorch left, of which none comes this far.
_at_once = super(torch.autograd.Function, _AtOnce).apply
