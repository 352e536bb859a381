"""Tests `sdpa`, `enable_sdpa` and `disable_sdpa` of fusedattn.compat.torch, which replace torch's function."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as taken_before
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import fusedattn as fa
import fusedattn.compat.torch as compat
from fusedattn.call import private
from fusedattn.compat import _switch
from fusedattn.dispatch import backends

from ..close import assert_as_good, assert_like, exactly
from ..inside import Plain, same

OPERATOR = torch.ops.aten.scaled_dot_product_attention
X = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def answered(monkeypatch):
    """Return a list of the threads of calls that reached our function."""
    threads, ours = [], _switch.scaled_dot_product_attention

    def counted(*args, **kwargs):
        threads.append(threading.current_thread().name)
        return ours(*args, **kwargs)

    monkeypatch.setattr(_switch, "scaled_dot_product_attention", counted)
    yield threads
    compat.disable_sdpa()
    assert not private.function_modes()


@contextmanager
def enabled():
    compat.enable_sdpa()
    try:
        yield
    finally:
        compat.disable_sdpa()


def in_a_thread(function, *args):
    with ThreadPoolExecutor(1, "other") as pool:
        return pool.submit(function, *args).result()


WAYS = {
    "F": lambda *args, **options: F.scaled_dot_product_attention(*args, **options),
    "a reference taken before": taken_before,
    "torch._C": torch._C._nn.scaled_dot_product_attention,
    "an operator": OPERATOR,
    "an overload": OPERATOR.default,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("everywhere", [False, True], ids=["with", "enabled"])
def test_it_answers_every_call_with_the_arguments_of_torch(way, everywhere, answered):
    call, mask = WAYS[way], torch.ones(4, 4).tril().bool()
    calls = [
        ((X, X, X), {}),
        ((X, X[:, :1], X[:, :1], None, 0.0, True), dict(scale=0.3, enable_gqa=True)),
        ((X[0, 0], X[0, 0], X[0, 0], mask), {}),
    ]

    def outputs():
        return [call(*args, **options) for args, options in calls]

    with enabled() if everywhere else compat.sdpa():
        got = outputs()
    assert len(answered) == len(calls)
    assert_like(got, outputs)
    call(X, X, X)
    assert len(answered) == len(calls)


def test_enabled_it_answers_every_thread_with_gradients_and_autocast(answered):
    def step():
        x = X.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            low = F.scaled_dot_product_attention(x, x, x)
        out = taken_before(x, x, x, is_causal=True)
        return low, out, torch.autograd.grad(out.sin().sum(), x)[0]

    with ThreadPoolExecutor(1, "early") as early:
        want, exact = early.submit(step).result(), exactly(step)  # a thread that started before the switch
        assert not answered
        with enabled():
            compat.enable_sdpa()
            results = step(), in_a_thread(step), early.submit(step).result()
        assert answered == ["MainThread"] * 2 + ["other_0"] * 2 + ["early_0"] * 2
        for got in results:
            assert got[0].dtype == want[0].dtype == torch.bfloat16
            for each in list(zip(got, want, exact, strict=True))[1:]:
                assert_as_good(*each)
        compat.disable_sdpa()
        step(), in_a_thread(step), early.submit(step).result()
    assert len(answered) == 6


def test_a_with_is_for_its_thread_and_ends_with_an_error(answered):
    with pytest.raises(KeyError), compat.sdpa():
        in_a_thread(taken_before, X, X, X)
        assert not answered
        raise KeyError
    with pytest.raises(ValueError, match="is_causal: expected False, because attn_mask is given"), compat.sdpa():
        taken_before(X, X, X, torch.ones(4, 4).bool(), 0.0, True)
    taken_before(X, X, X)
    assert len(answered) == 1


def test_they_nest_in_any_order(answered):
    with compat.sdpa() as mode:
        with compat.sdpa(), mode:
            taken_before(X, X, X)
        compat.enable_sdpa()
        taken_before(X, X, X)
        compat.disable_sdpa()
        taken_before(X, X, X)
    assert len(answered) == 3
    taken_before(X, X, X)
    compat.enable_sdpa()
    with compat.sdpa():
        compat.disable_sdpa()
        in_a_thread(taken_before, X, X, X)
        assert len(answered) == 3
        taken_before(X, X, X)
    taken_before(X, X, X)
    assert len(answered) == 4
    compat.enable_sdpa()
    in_a_thread(compat.disable_sdpa)
    taken_before(X, X, X)
    assert len(answered) == 4


def test_other_modes_are_left_as_they_are(answered):
    class Watching(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is taken_before:
                seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    torch.set_default_device("cpu")  # before Watching: it must be the outermost mode
    with Watching():
        compat.enable_sdpa()
        taken_before(X, X, X)
        compat.disable_sdpa()
        taken_before(X, X, X)
        compat.enable_sdpa()
    torch.set_default_device(None)
    assert len(seen) == 2 and len(answered) == 1 and len(private.function_modes()) == 1


def test_torch_transforms_its_own_operator_in_other_threads(answered):
    compat.enable_sdpa()
    gradient = torch.func.grad(lambda x: taken_before(x, x, x).square().sum())
    assert_like(in_a_thread(gradient, X), torch.func.grad(lambda x: fa.reference.eager(x, x, x).square().sum()), X)
    assert not answered


@pytest.mark.parametrize("everywhere", [False, True], ids=["with", "enabled"])
def test_a_backend_that_computes_by_torch_is_not_answered_by_itself(everywhere, answered, monkeypatch):
    def run(call, *_):
        with torch._C.DisableTorchFunction():
            return F.scaled_dot_product_attention(*call[:3]), None, None

    monkeypatch.setitem(backends.BACKENDS, "naive", backends.BACKENDS["naive"]._replace(run=run))
    if everywhere:
        compat.enable_sdpa()
    with compat.sdpa():
        fa.attention(X, X, X)
        in_a_thread(fa.attention, X, X, X)
        assert not answered
        with pytest.raises(RuntimeError), torch._C.DisableTorchFunction():  # our function must come back after it
            taken_before(X, X[:, :2], X)
        taken_before(X, X, X)
        assert len(answered) == 1
        torch.compile(fa.attention, fullgraph=True, backend="aot_eager")(X, X, X)
    assert len(answered) == 1
    if everywhere:
        in_a_thread(taken_before, X, X, X)
        assert len(answered) == 2


def test_checkpoints_whose_backward_is_inside_compute_ours_again(answered):
    x, grads = X.clone().requires_grad_(), []
    for reentrant in (True, False):
        x.grad = None
        with compat.sdpa():
            checkpoint(taken_before, x, x, x, use_reentrant=reentrant).sin().sum().backward()
        grads.append(x.grad)
    assert len(answered) == 4
    for grad in grads:
        assert_like(grad, lambda: torch.autograd.grad(taken_before(x, x, x).sin().sum(), x)[0])


def test_nested_tensors_are_ours_or_refused_by_name(answered):
    rows = torch.randn(9, 3, 8)
    jagged = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 3, 8, 9])).transpose(1, 2)
    single = torch.nested.nested_tensor_from_jagged(rows[:, :1], jagged.offsets()).transpose(1, 2)
    with compat.sdpa():
        out = taken_before(jagged, jagged, jagged, is_causal=True)
        assert len(answered) == 1 and out.is_nested
        want = [taken_before(*[x.transpose(0, 1)] * 3, is_causal=True) for x in rows.split([3, 5, 1])]
        same(out.transpose(1, 2).values(), torch.cat([x.transpose(0, 1) for x in want]))
        old = torch.nested.nested_tensor([X[0]])
        for error, name, call in (
            (TypeError, "attn_mask", (jagged, jagged, jagged, torch.ones(1, 1).bool())),
            (ValueError, "key", (jagged, single, single)),
            (TypeError, "key", (X, jagged, jagged)),
            (TypeError, "key", (jagged, X, X)),
            (TypeError, "query", (old, old, old)),
            (TypeError, "key", (X[0, 0], X[0, 0].to_sparse(), X[0, 0])),
        ):
            with pytest.raises(error, match=f"^{name}: "):
                taken_before(*call)


class Answering(torch.Tensor):
    """Tensor class that computes attention itself, as DTensor does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "its own" if func is taken_before else super().__torch_function__(func, types, args, kwargs)


def test_a_class_of_tensors_that_answers_itself_does(answered):
    query = X.as_subclass(Answering)
    compat.enable_sdpa()
    with compat.sdpa():
        assert taken_before(query, X, X) == "its own"
        assert in_a_thread(taken_before, query, X, X) == "its own" and not answered
        assert type(taken_before(X.as_subclass(Plain), nn.Parameter(X), X)) is Plain and len(answered) == 1


def attentions(model):
    return sum(isinstance(module, nn.MultiheadAttention) for module in model.modules())


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_models_of_torch_leave_their_fast_path(mode, answered):
    model = nn.Transformer(16, 4, 2, 2, 32, dropout=0.0, batch_first=True).train(mode == "train")
    x, padding = torch.randn(2, 6, 16), torch.arange(6) >= torch.tensor([[4], [6]])
    run = lambda model: model(x, x, src_key_padding_mask=padding, memory_key_padding_mask=padding)  # noqa: E731
    with torch.set_grad_enabled(mode != "no_grad"):
        with compat.sdpa():
            out = run(model)
        assert len(answered) == attentions(model)
        assert_like(out, run, model)
    assert len(answered) == attentions(model)


class Watched:
    """Backend of torch.compile that records its graphs and runs them."""

    def __init__(self):
        self.graphs = []

    def __call__(self, graph, inputs):
        self.graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    def ours(self):
        """Return a bool for each graph: True if all of its attention is ours."""
        torchs = {*_switch._TORCHS, F.multi_head_attention_forward}
        return [not torchs & set(filter(callable, targets)) for targets in self.graphs]


def by_name(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True) + 1


@pytest.mark.parametrize(
    ("function", "first", "everywhere"),
    [(by_name, True, True), (lambda x: OPERATOR.default(x, x, x, None, 0.0, True) + 1, False, False)],
)
def test_compiled_code_is_ours_inside_and_torchs_outside(function, first, everywhere):
    watched = Watched()
    compiled = torch.compile(function, fullgraph=True, backend=watched)
    for inside in (first, not first, first):
        ours = enabled() if everywhere else compat.sdpa()
        with ours if inside else nullcontext():
            out = compiled(X)
        assert_like(out, function, X)
    assert watched.ours() == [first, not first]


def test_a_with_inside_of_what_is_compiled():
    watched = Watched()

    def inside(x):
        with compat.sdpa():
            y = by_name(x)
        return y, by_name(x)

    ours, torchs = torch.compile(inside, fullgraph=True, backend=watched)(X)
    assert_like(ours, by_name, X)
    assert torch.equal(torchs, by_name(X)) and watched.graphs[0].count(taken_before) == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_models_of_torch_are_ours_with_gradients():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    watched = Watched()
    compiled = torch.compile(lambda x: model(x, x, x, need_weights=False)[0].sin().sum(), backend=watched)
    grads, x = [], X[0].clone().requires_grad_()
    for inside in (False, True, False):
        with compat.sdpa() if inside else nullcontext():
            grads += torch.autograd.grad(compiled(x), x)
    assert_like(grads[1], lambda: torch.autograd.grad(model(x, x, x, need_weights=False)[0].sin().sum(), x)[0])
    assert torch.equal(grads[0], grads[2]) and watched.ours() == [False, True]
