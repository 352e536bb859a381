"""Tests public functions and modules under torch.fx, and with classes and modes that define __torch_function__."""

import copy
import pickle

import pytest
import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

import fusedattn as fa
from fusedattn import layers
from fusedattn.compat import flash_attn as flash, torch as compat
from fusedattn.compat._bert_padding import unpad_input

from .inside import Plain, same
from .sample import one_in

Q, K, V = torch.randn(3, 2, 4, 7, 16).unbind()
BIAS, LSE = torch.randn(7, 7), torch.randn(2, 4, 7)
PACKED, OFFSETS = torch.randn(7, 4, 16), torch.tensor([0, 3, 7]).int()
LENGTHS = torch.tensor([3, 7]).int()
X, IDS = torch.randn(2, 5, 16), torch.tensor([[1, 2, 3], [4, 0, 6]])

# name: (public function, code that calls only this function, inputs)
CALLS = {
    "attention": (
        fa.attention,
        lambda q, k, v, bias: fa.attention(q, k, value=v, bias=bias, causal=True, return_lse=True),
        (Q, K, V, BIAS),
    ),
    "bias alone": (fa.attention, lambda bias: fa.attention(Q, K, V, bias=bias), (BIAS,)),
    "varlen": (
        fa.attention_varlen,
        lambda q, cu: fa.attention_varlen(q, q, q, cu, cu, max_seqlen_q=4, max_seqlen_k=4, window=(2, 0)),
        (PACKED, OFFSETS),
    ),
    "decode": (
        fa.attention_decode,
        lambda q, k, v, n: fa.attention_decode(q, k, v, cache_seqlens=n),
        (Q[:, :, :1], K, V, LENGTHS),
    ),
    "merge": (fa.merge, fa.merge, (Q, LSE, K, LSE + 1)),
    "naive": (fa.attention, lambda q, k, v: fa.reference.attention(q, k, v, softcap=3.0), (Q, K, V)),
    "eager": (fa.reference.eager, lambda q, k, v: fa.reference.eager(q, k, v, return_weights=True), (Q, K, V)),
    "sdpa": (
        compat.scaled_dot_product_attention,
        lambda q, k, v, mask: compat.scaled_dot_product_attention(q, k, v, mask, scale=0.3),
        (Q, K, V, BIAS),
    ),
    "flash": (
        flash.flash_attn_func,
        lambda q, k, v: flash.flash_attn_func(q, k, v, causal=True, window_size=(3, -1), return_attn_probs=True),
        (Q, K, V),
    ),
    "flash cache": (
        flash.flash_attn_with_kvcache,
        lambda q, k, n: flash.flash_attn_with_kvcache(q, k, k, cache_seqlens=n),
        (Q[:, :1], K, torch.tensor([3, 4]).int()),
    ),
    "unpad": (unpad_input, lambda x, mask: unpad_input(x, mask), (X, torch.ones(2, 5, dtype=torch.bool))),
    "shard": (fa.distributed.shard, lambda x: fa.distributed.shard(x, 1), (X,)),
    "ring": (
        fa.distributed.ring_attention,
        lambda q, k, v: fa.distributed.ring_attention(q, k, v, causal=True),
        (Q, K, V),
    ),
}
every_call = pytest.mark.parametrize("function, call, inputs", CALLS.values(), ids=CALLS)


def computed(function, call, inputs):
    grads = function not in (fa.attention_decode, flash.flash_attn_with_kvcache)
    inputs = [x.detach().clone().requires_grad_(grads and x.is_floating_point()) for x in inputs]
    results = call(*inputs)
    results = [x for x in (results if isinstance(results, tuple) else (results,)) if isinstance(x, torch.Tensor)]
    floating = [x for x in results if x.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    return results, torch.autograd.grad([x.sum() for x in floating], wanted) if floating else ()


@every_call
def test_a_traced_function_is_one_node(function, call, inputs):
    traced = fx.symbolic_trace(call)
    assert [x.target for x in traced.graph.nodes if x.op == "call_function"] == [function]
    want = computed(function, call, inputs)
    for made in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        same(computed(function, made, inputs), want)


def test_a_traced_plan_keeps_all_arguments():
    traced = fx.symbolic_trace(lambda mask: fa.plan(mask, batch=3))
    with pytest.raises(ValueError, match="^batch: "):
        traced(torch.ones(4, 4, dtype=torch.bool))


class Calls(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.norm, self.attention, self.linear = nn.LayerNorm(16), attention, nn.Linear(16, 16)

    def forward(self, x):
        x = self.norm(x)
        if isinstance(self.attention, nn.MultiheadAttention):
            return self.linear(self.attention(x, x, x, need_weights=False)[0])
        out = self.attention(x)
        return self.linear(out[0] if isinstance(out, tuple) else out)


class Decodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = layers.AttentionDecoder(7, 3, 6, 16)

    def forward(self, x):
        return self.decoder(IDS[:, 0].to(x.device), x[:, 0, :6], x)[0]


MODULES = {
    "converted": lambda: compat.convert(Calls(nn.MultiheadAttention(16, 4, batch_first=True))),
    "drop-in": lambda: Calls(compat.MultiheadAttention(16, 4, batch_first=True)),
    "read": lambda: pickle.loads(pickle.dumps(compat.convert(Calls(nn.MultiheadAttention(16, 4))))),
    "heads": lambda: Calls(fa.MultiHeadAttention(16, 4, num_kv_heads=2, causal=True)),
    "one head": lambda: Calls(fa.SelfAttention(16)),
    "encoder": lambda: Calls(layers.TransformerEncoder(2, 16, 4, 32)),
    "positions": lambda: Calls(layers.SinusoidalPositionalEncoding(16, 9, dtype=torch.float32)),
    "feed forward": lambda: layers.FeedForward(16, 32),
    "decoder": Decodes,
}
every_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


@every_module
def test_a_traced_module_computes_the_same(make):
    module = make()
    traced = fx.symbolic_trace(module)
    same(computed(None, traced, (X,)), computed(None, module, (X,)))
    got, want = (torch.autograd.grad(f(X).sum(), module.parameters(), allow_unused=True) for f in (traced, module))
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Seen(torch.Tensor):
    log: list = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.log.append(func)
        return super().__torch_function__(func, types, args, kwargs)


class Logging(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.log.append(func)
        return func(*args, **(kwargs or {}))


@every_call
def test_a_class_and_each_mode_see_a_function_once(function, call, inputs):
    want = computed(function, call, inputs)[0]
    Seen.log.clear()
    got = call(inputs[0].as_subclass(Seen), *inputs[1:])
    assert Seen.log == [function]
    got = [x for x in (got if isinstance(got, tuple) else (got,)) if isinstance(x, torch.Tensor)]
    assert all(type(x) is Seen for x in got)
    same([x.as_subclass(torch.Tensor) for x in got], want)
    with Logging() as outer, Logging() as inner:
        got = computed(None, lambda *x: call(*map(torch.Tensor.detach, x)), inputs)[0]
    assert [x for x in outer.log if x is function] == [x for x in inner.log if x is function] == [function]
    same(got, want)


class Answers(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "its own" if func is fa.attention else NotImplemented


def test_a_class_answers_or_says_that_it_does_not():
    bias = BIAS.as_subclass(Answers)
    assert fa.attention(Q, K, V, bias=bias) == fa.reference.attention(Q, K, V, bias=bias) == "its own"
    with pytest.raises(TypeError, match="no implementation found for 'fusedattn.*attention_varlen'"):
        fa.attention_varlen(PACKED.as_subclass(Answers), PACKED, PACKED, OFFSETS, OFFSETS)


def test_nested_tensors_are_taken_under_modes_too():
    parts = [torch.randn(n, 4, 16) for n in (3, 5)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    want = fa.attention(nested, nested, nested)
    with Logging() as mode:
        got = fa.attention(nested, nested, nested)
        sdpa = compat.scaled_dot_product_attention(nested, nested, nested)
    assert {fa.attention, compat.scaled_dot_product_attention} <= set(mode.log)
    assert fa.attention_varlen not in mode.log and torch.nested.nested_tensor not in mode.log
    assert torch.equal(got.values(), want.values()) and torch.equal(sdpa.values(), want.values())


# Two calls break the graph: the number of rows depends on data, or processes exchange messages.
WHOLE = [pytest.param(*call, id=name) for name, call in CALLS.items() if name not in ("unpad", "ring")]


@pytest.mark.parametrize("function, call, inputs", one_in(3, WHOLE))
def test_a_function_is_compiled_whole(function, call, inputs):
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    same(computed(function, compiled, inputs), computed(function, call, inputs))


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="torch 2.10 cannot compile its handle_torch_function")
@pytest.mark.parametrize("kind", [Seen, Plain])
def test_a_class_is_compiled_whole(kind):
    inputs = Q.as_subclass(kind), K, V
    got = torch.compile(fa.attention, fullgraph=True, backend="eager")(*inputs)
    assert type(got) is kind and torch.equal(got.as_subclass(torch.Tensor), fa.attention(Q, K, V))


def test_recompilations_of_a_function_leave_others_theirs():
    """torch.compile counts recompilations by code object, so public functions must share none."""
    functions = (fa.attention, Q, K, V), (fa.merge, Q, LSE, K, LSE + 1), (fa.reference.eager, Q, K, V)
    with torch._dynamo.config.patch(recompile_limit=1):
        for function, *inputs in (*functions, (fa.attention_varlen, *[PACKED] * 3, OFFSETS, OFFSETS)):
            torch.compile(function, fullgraph=True, backend="eager")(*inputs)
