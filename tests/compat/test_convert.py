"""Tests `convert` of fusedattn.compat.torch, also of modules with computed parameters or another out_proj."""

import copy
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import fusedattn as fa
import fusedattn.compat.torch as compat

from ..close import assert_as_good, assert_like, exactly, flat
from ..inside import same, shake


class Custom(nn.MultiheadAttention):
    def forward(self, query, *rest, **options):
        return query * 2, None


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(16, 4, 32, **(dict(dropout=0.0, batch_first=True) | options))


def encoder(**options):
    return nn.TransformerEncoder(encoder_layer(**options), 2)


X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
PADDING = torch.arange(6) >= torch.tensor([[4], [6]])
CAUSAL = torch.ones(6, 6).triu(1).bool()
FLOATS = nn.Transformer.generate_square_subsequent_mask(6)
MASKED = X, X[:, :5], None, CAUSAL[:5, :5], None, PADDING, PADDING[:, :5], PADDING


def transformer(**options):
    return nn.Transformer(16, 4, 2, 2, 32, **(dict(dropout=0.0, batch_first=True) | options))


MODELS = {
    "transformer, sequence first": (lambda: transformer(batch_first=False), (X, X + 1), {}),
    "transformer, norm first": (lambda: transformer(norm_first=True, activation="gelu"), (X, X + 1), {}),
    "transformer, masks": (transformer, MASKED, dict(tgt_is_causal=True)),
    "encoder, hint": (encoder, (X, FLOATS), dict(is_causal=True)),
    "encoder, padded": (encoder, (X,), dict(src_key_padding_mask=PADDING)),
    "encoder, both": (encoder, (X, CAUSAL, PADDING), {}),
    "encoder, unbatched": (encoder, (X[0], CAUSAL), {}),
    "layer": (encoder_layer, (X,), dict(src_key_padding_mask=PADDING)),
}


@pytest.fixture
def counted(monkeypatch):
    """Return a list that gets an entry for each call of our attention, without hooks, which disable the fast path."""
    count, attend = [], compat.attend
    monkeypatch.setattr(compat, "attend", lambda *a, **k: (count.append(1), attend(*a, **k))[1])
    return count


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference"])
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_gives_the_same(name, mode, counted):
    make, inputs, options = MODELS[name]
    model = shake(make()).train(mode == "train")
    twin = compat.convert(copy.deepcopy(model))
    attentions = sum(isinstance(x, nn.MultiheadAttention) for x in model.modules())

    def results(model, inputs, options):
        out = model(*inputs, **options)
        # At padded positions torch's fast path writes zeros.
        found = {"out": out[~PADDING] if "padded" in name or name == "layer" else out}
        if mode in ("train", "eval"):
            found["gradients"] = flat(torch.autograd.grad(found["out"].square().sum(), list(model.parameters())))
        return found

    with torch.no_grad() if mode == "no_grad" else torch.inference_mode(mode == "inference"):
        got = results(twin, inputs, options)
        assert len(counted) == attentions
        want, exact = results(model, inputs, options), exactly(results, model, inputs, options)
    assert got.keys() == want.keys()
    for key, ours in got.items():
        assert_as_good(ours, want[key], exact[key], key)


def test_all_is_shared_and_nothing_is_renamed():
    model, seen = transformer(), []
    old = model.encoder.layers[0].self_attn.eval()
    old.register_buffer("extra", torch.ones(2))
    old.mark, old.dropout = "kept", 0.25
    old.in_proj_bias.requires_grad_(False)
    before_hook = old.register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    old.register_forward_hook(lambda module, inputs, out: seen.append("after"))

    def parts():
        named = model.named_parameters(), model.state_dict(keep_vars=True).items()
        return [name for name, _ in model.named_modules()], *([(name, id(x)) for name, x in each] for each in named)

    before = parts()
    assert model.encoder.use_nested_tensor and compat.convert(model) is model and not model.encoder.use_nested_tensor
    new = model.encoder.layers[0].self_attn
    assert type(new) is type(model.decoder.layers[1].multihead_attn) is compat.MultiheadAttention and parts() == before
    assert (new.mark, new.dropout, new.training, new.batch_first) == ("kept", 0.25, False, True)
    assert new.extra is old.extra and new.out_proj is old.out_proj and not new.in_proj_bias.requires_grad
    new(X, X, X)
    before_hook.remove()
    new(X, X, X)
    assert seen == ["before", "after", "after"]


def test_a_shared_module_stays_one_and_subclasses_stay_as_they_are():
    class Watched(dict):
        def __setitem__(self, name, child):
            assert type(child) is compat.MultiheadAttention, "only replaced modules are assigned"
            super().__setitem__(name, child)

    attention, custom = nn.MultiheadAttention(16, 4), Custom(16, 4)
    model = nn.ModuleDict(dict(a=attention, b=nn.ModuleList([custom, attention]), c=attention))
    model._modules = Watched(model._modules)
    compat.convert(model)
    assert model["a"] is model["b"][1] is model["c"] and type(model["a"]) is compat.MultiheadAttention
    assert model["b"][0] is custom and type(custom) is Custom and not custom._forward_pre_hooks
    stack = nn.TransformerEncoder(encoder_layer(), 1)
    stack.layers[0].self_attn = Custom(16, 4, batch_first=True)
    assert compat.convert(stack).use_nested_tensor and type(stack.layers[0].self_attn) is Custom


def test_it_says_how_many_it_replaced_and_what_else_there_is_where_it_was_none(caplog):
    caplog.set_level("INFO", "fusedattn")

    def said(model):
        caplog.clear()
        compat.convert(model)
        (record,) = caplog.records
        return record.name, record.levelname, [int(n) for n in re.findall(r"\d+", record.getMessage())]

    model = nn.ModuleList([encoder(), nn.MultiheadAttention(16, 4)])
    model.append(model[1])
    assert said(model) == ("fusedattn", "INFO", [3])
    modules, hooks = list(model.modules()), [dict(x._forward_pre_hooks) for x in model.modules()]
    assert said(model) == ("fusedattn", "INFO", [0, 3])
    assert list(model.modules()) == modules and [dict(x._forward_pre_hooks) for x in modules] == hooks
    assert said(nn.MultiheadAttention(16, 4))[2] == [1]
    assert said(nn.Sequential(nn.Linear(2, 2)))[1] == "WARNING" and "compat.torch.sdpa()" in caplog.text
    assert said(nn.Sequential(Custom(16, 4))) == ("fusedattn", "WARNING", [1])


def test_a_bare_module_gives_one_that_shares_its_parameters():
    old = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    new = compat.convert(old)
    assert type(new) is compat.MultiheadAttention and type(old) is nn.MultiheadAttention and not new.training
    assert all(a is b for a, b in zip(old.parameters(), new.parameters(), strict=True))
    assert_like(new(X, X, X), lambda: old(X, X, X))
    with pytest.raises(TypeError, match="^model: "):
        compat.convert([old])


def test_models_that_were_not_converted_keep_their_fast_path(counted):
    before = torch.backends.mha.get_fastpath_enabled()
    other = encoder().eval()
    compat.convert(encoder())
    assert torch.backends.mha.get_fastpath_enabled() is before is True and other.use_nested_tensor
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = other(X, src_key_padding_mask=PADDING)
    assert (out[0, 4:] == 0).all() and not counted  # torch's fast path writes zeros at padding


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_converted_and_share_nothing(copied, counted):
    model = compat.convert(shake(encoder())).eval()
    with torch.no_grad():
        want = model(X, src_key_padding_mask=PADDING)
    twin = copied(model)
    counted.clear()
    with torch.no_grad():
        assert torch.equal(twin(X, src_key_padding_mask=PADDING), want)
        assert len(counted) == 2
        assert not {x.data_ptr() for x in twin.parameters()} & {x.data_ptr() for x in model.parameters()}
        # After a hook is removed, torch still does not take its fast path.
        for _ in range(3):
            twin.layers[0].self_attn.register_forward_pre_hook(lambda *_: None).remove()
        twin(X)
        assert len(counted) == 4
        for parameter in twin.parameters():
            parameter.zero_()
        assert torch.equal(model(X, src_key_padding_mask=PADDING), want)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_converted_models_compile():
    model = compat.convert(shake(nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    arguments = (X, X[:, :5], None, CAUSAL[:5, :5], None, PADDING)
    causal = dict(tgt_is_causal=True)  # otherwise torch 2.10 reads the mask, which breaks the graph
    out, want = compiled(*arguments, **causal), model(*arguments, **causal)
    same(out, want)
    same(*(torch.autograd.grad(x.square().sum(), list(model.parameters())) for x in (out, want)))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("attend", [compat.MultiheadAttention(16, 4, batch_first=True), fa.MultiHeadAttention(16, 4)])
@pytest.mark.one_in(2)
def test_inductor_compiles_no_kernel_for_self_attention(attend):
    """A compiled module only calls operators: each C++ kernel of Inductor would take a second to compile."""
    from torch._inductor.utils import run_and_get_code  # imports a compiler

    graphs = []
    compiled = torch.compile(attend.eval(), fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        compiled(X, X, X, need_weights=False)
        assert all(node.target is not getattr for node in graphs[0].graph.nodes)
        torch.compiler.reset()
        compiled = torch.compile(attend, fullgraph=True)
        out, (code,) = run_and_get_code(lambda: compiled(X, X, X, need_weights=False)[0])
    assert "fusedattn.forward" in code and "async_compile.cpp" not in code
    assert torch.equal(out, attend(X, X, X, need_weights=False)[0])


def attention(**options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(16, 2, batch_first=True, **options)


def computed(norm, name, **options):
    module = attention(**options)
    norm(module if "." not in name else module.out_proj, name.rpartition(".")[2])
    return module


COMPUTED = {
    f"{norm.__name__} of {name}": (norm, name, options)
    for norm in (parametrizations.weight_norm, parametrizations.spectral_norm)
    for name, options in (("in_proj_weight", {}), ("out_proj.weight", {}), ("q_proj_weight", dict(kdim=16, vdim=12)))
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm, name, options", COMPUTED.values(), ids=COMPUTED)
def test_computed_parameters(norm, name, options, training):
    theirs = computed(norm, name, **options).eval()
    ours = compat.convert(nn.ModuleList([copy.deepcopy(theirs)]))[0]
    assert isinstance(ours, compat.MultiheadAttention)
    if training and norm is parametrizations.weight_norm:  # spectral_norm changes the weight at each use
        theirs.train(), ours.train()

    def results(module):
        out, weights = module(X, X, X[..., : options.get("vdim", 16)])
        return out, weights, *torch.autograd.grad(out.square().sum(), list(module.parameters()))

    assert_like(results(ours), results, theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    again = compat.convert(copy.deepcopy(ours))
    assert type(again) is type(ours)
    assert_like(results(again), results, theirs)
    if "." not in name:
        parametrize.remove_parametrizations(ours, name)
        assert type(ours) is compat.MultiheadAttention
        assert_like(results(ours)[:2], lambda: results(theirs)[:2])


@pytest.mark.parametrize("mode", ["train", "no_grad", "compiled"])
def test_another_out_proj_is_called(mode):
    """A replaced out_proj is called; torch's fast path would read its weight, which an nn.Sequential lacks."""
    padding = torch.arange(6) >= torch.tensor([[6], [3]])
    model = compat.convert(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)).train(mode == "train")
    plain = copy.deepcopy(model)
    model.self_attn.out_proj = nn.Sequential(model.self_attn.out_proj)
    run = torch.compile(model, backend="eager") if mode == "compiled" else model
    with torch.set_grad_enabled(mode != "no_grad"):
        found = run(X, src_key_padding_mask=padding)[~padding]
        assert_like(found, lambda: plain(X, src_key_padding_mask=padding)[~padding])
