"""convert of fusedattn.compat.torch."""

import copy
import io
import pickle
import re
import warnings

import pytest
import torch
from torch import nn

import fusedattn as fa
import fusedattn.compat.torch as compat

from ..close import assert_as_good, assert_like, exactly, flat
from ..inside import same


class Block(nn.Module):
    """As a vision transformer has it: patches, a class token, attention before the norm."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.norm_1, self.norm_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, images):
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        y = self.norm_1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm_2(x))


class Custom(nn.MultiheadAttention):
    def forward(self, query, *rest, **options):
        return query * 2, None


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(16, 4, 32, **(dict(dropout=0.0, batch_first=True) | options))


def encoder(**options):
    return nn.TransformerEncoder(encoder_layer(**options), 2)


def shaken(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
PADDING = torch.arange(6) >= torch.tensor([[4], [6]])
CAUSAL = torch.ones(6, 6).triu(1).bool()
FLOATS = nn.Transformer.generate_square_subsequent_mask(6)


def transformer(**options):
    return nn.Transformer(16, 4, 2, 2, 32, **(dict(dropout=0.0, batch_first=True) | options))


MODELS = {
    "transformer, sequence first": (lambda: transformer(batch_first=False), (X, X + 1), {}),
    "transformer, norm first": (lambda: transformer(norm_first=True, activation="gelu"), (X, X + 1), {}),
    "transformer, masks": (
        transformer,
        (X, X[:, :5], None, CAUSAL[:5, :5], None, PADDING, PADDING[:, :5], PADDING),
        dict(tgt_is_causal=True),
    ),
    "encoder, hint": (encoder, (X, FLOATS), dict(is_causal=True)),
    "encoder, padded": (encoder, (X,), dict(src_key_padding_mask=PADDING)),
    "encoder, both": (encoder, (X, CAUSAL, PADDING), {}),
    "encoder, unbatched": (encoder, (X[0], CAUSAL), {}),
    "layer": (encoder_layer, (X,), dict(src_key_padding_mask=PADDING)),
    "ViT": (Block, (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)),), {}),
}


def valid(out, name):
    """What torch defines: the fast path of torch leaves zeros at padded positions."""
    return out[~PADDING] if "padded" in name or name == "layer" else out


@pytest.fixture
def counted(monkeypatch):
    """How often our attention ran, without a hook, which would keep torch off its fast path."""
    count, attend = [], compat.attend
    monkeypatch.setattr(compat, "attend", lambda *a, **k: (count.append(1), attend(*a, **k))[1])
    return count


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad", "inference"])
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_gives_the_same(name, mode, counted):
    make, inputs, options = MODELS[name]
    model = shaken(make()).train(mode == "train")
    twin = compat.convert(copy.deepcopy(model))
    attentions = sum(isinstance(x, nn.MultiheadAttention) for x in model.modules())

    def results(model, inputs, options):
        out = model(*inputs, **options)
        found = {"out": valid(out, name)}
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


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_fully_padded_samples_are_finite_in_every_mode(mode):
    model = compat.convert(encoder())
    for training in (True, False):
        model.train(training)
        with mode():
            out = model(X, src_key_padding_mask=torch.ones(2, 6).bool())
        assert out.isfinite().all()
        if out.requires_grad:
            out.sum().backward()
            assert all(p.grad.isfinite().all() for p in model.parameters())


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
    attention, custom = nn.MultiheadAttention(16, 4), Custom(16, 4)
    model = nn.ModuleDict(dict(a=attention, b=nn.ModuleList([custom, attention]), c=attention))
    compat.convert(model)
    assert model["a"] is model["b"][1] is model["c"] and type(model["a"]) is compat.MultiheadAttention
    assert model["b"][0] is custom and type(custom) is Custom and not custom._forward_pre_hooks
    stack = nn.TransformerEncoder(encoder_layer(), 1)
    stack.layers[0].self_attn = Custom(16, 4, batch_first=True)
    assert compat.convert(stack).use_nested_tensor and type(stack.layers[0].self_attn) is Custom


def test_a_second_call_changes_nothing():
    model = compat.convert(encoder())
    modules = list(model.modules())
    hooks = [dict(x._forward_pre_hooks) for x in modules]
    state = [dict(x.__dict__) for x in modules]
    assert compat.convert(model) is model
    assert list(model.modules()) == modules and [dict(x._forward_pre_hooks) for x in modules] == hooks
    assert [x.__dict__ for x in modules] == state
    single = model.layers[0].self_attn
    assert compat.convert(single) is single


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
    assert said(model) == ("fusedattn", "INFO", [0, 3])
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
    assert (out[0, 4:] == 0).all() and not counted  # the zeros are those of a nested tensor


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_save])
def test_copies_are_converted_and_share_nothing(copied, counted):
    model = compat.convert(shaken(encoder())).eval()
    with torch.no_grad():
        want = model(X, src_key_padding_mask=PADDING)
    twin = copied(model)
    counted.clear()
    with torch.no_grad():
        assert torch.equal(twin(X, src_key_padding_mask=PADDING), want)
        assert len(counted) == 2
        assert not {x.data_ptr() for x in twin.parameters()} & {x.data_ptr() for x in model.parameters()}
        # A hook that comes and goes after loading leaves what keeps torch off its fast path.
        for _ in range(3):
            twin.layers[0].self_attn.register_forward_pre_hook(lambda *_: None).remove()
        twin(X)
        assert len(counted) == 4
        for parameter in twin.parameters():
            parameter.zero_()
        assert torch.equal(model(X, src_key_padding_mask=PADDING), want)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_converted_layer_is_few_nodes():
    """An encoder with dropout compiles in the time of torch's: attention is one node, not its formula."""
    layer = encoder_layer(dropout=0.1)
    nodes = []

    def count(graph, _):
        nodes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    torch.compile(compat.convert(layer).train(), fullgraph=True, backend=count)(X).sum().backward()
    assert len(nodes) == 1 and nodes[0] < 60


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("mode", ["train", "no_grad"])
def test_converted_models_compile(mode):
    model = compat.convert(shaken(nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    model.train(mode == "train")
    arguments = (X, X[:, :5], None, CAUSAL[:5, :5], None, PADDING)
    causal = dict(tgt_is_causal=True)  # else torch 2.10 looks whether the mask is, and that is no whole graph
    with torch.set_grad_enabled(mode == "train"):
        out, want = compiled(*arguments, **causal), model(*arguments, **causal)
    same(out, want)
    if mode == "train":
        same(*(torch.autograd.grad(x.square().sum(), list(model.parameters())) for x in (out, want)))


def test_a_converted_model_computes_by_the_backend_that_is_named(device):
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4, batch_first=True), 1).to(device).eval()
    model = compat.convert(copy.deepcopy(theirs))
    x = torch.randn(1, 3, 4, device=device)
    padding = torch.tensor([[False, False, True]], device=device)
    with torch.no_grad():
        with fa.use_backend("triton"):
            got = model(x, src_key_padding_mask=padding)
        assert_like(got, lambda: theirs(x, src_key_padding_mask=padding))
    if device == "cpu":
        wide = compat.convert(nn.MultiheadAttention(300, 1))
        with fa.use_backend("triton"), pytest.raises(NotImplementedError):
            wide(*[torch.randn(2, 1, 300)] * 3)
