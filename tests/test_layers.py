"""Tests the layers against textbook implementations of each variant, and the names of their parameters."""

import contextlib
import functools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fusedattn as fa
from fusedattn import layers

from .close import assert_like
from .inside import shake

BATCH, LENGTH, WIDTH, INSIDE = 2, 4, 6, 10


def assert_textbook(got, textbook, inputs):
    """Assert that results, and gradients of the first result, are as exact as those of `textbook()`."""

    def with_gradients(results):
        first = results[0]
        direction = torch.linspace(-1.0, 2.0, first.numel(), dtype=first.dtype, device=first.device)
        grads = torch.autograd.grad(first, inputs, direction.reshape(first.shape), retain_graph=True)
        assert not first.numel() or all(x.abs().sum() > 0 for x in grads)
        return [*results, *grads]

    assert_like(with_gradients(got), lambda: with_gradients(textbook()))


def affine(x, linear):
    return x @ linear.weight.T + linear.bias


def normed(x, norm, eps):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight + norm.bias


def fed(x, feed_forward):
    inside = affine(x, feed_forward.linear_1)
    return affine(inside * 0.5 * (1 + torch.erf(inside / math.sqrt(2))), feed_forward.linear_2)


def pairs(*shape):
    return (torch.rand(shape) < 0.6) | torch.eye(shape[-1], dtype=torch.bool)


KEYS = torch.tensor([[True, True, False, True], [True, True, True, True]])
# name: (heads, options, draw() -> (mask, key_mask)); tests/test_modules.py has the formula of each option
VARIANTS = {
    "several heads": (2, {}, lambda: (None, None)),
    "options": (3, dict(scale=0.3, causal=True, head_dim=4, value_head_dim=5), lambda: (None, KEYS)),
    "mask of rank 2": (2, {}, lambda: (pairs(4, 4), None)),
    "mask of rank 3 and key_mask": (1, {}, lambda: (pairs(2, 4, 4), KEYS)),
    "mask of rank 4": (2, {}, lambda: (pairs(2, 2, 4, 4), None)),
    "dropout of weights": (2, dict(attention_dropout=0.5), lambda: (None, KEYS)),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.one_in(3)
def test_a_textbook_encoder_layer(name, backend, device):
    heads, options, draw = VARIANTS[name]
    dtype = torch.float32 if device == "cuda" else torch.float64
    mask, key_mask = (None if x is None else x.to(device) for x in draw())
    layer = shake(layers.TransformerEncoderLayer(WIDTH, heads, INSIDE, **options, device=device, dtype=dtype))
    given = dict(head_dim=WIDTH // heads) | options
    given = dict(value_head_dim=given["head_dim"], dropout=given.pop("attention_dropout", 0.0)) | given
    assert {name: getattr(layer.attention, name) for name in given} == given
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype, device=device, requires_grad=True)
    with fa.use_backend(backend):
        torch.manual_seed(7)
        got = layer(x, mask, key_mask=key_mask)

    def textbook():
        torch.manual_seed(7)
        with fa.use_backend("naive"):
            out, _ = layer.attention(normed(x, layer.layer_norm_1, 1e-5), mask=mask, key_mask=key_mask)
        want = x + out
        return [want + fed(normed(want, layer.layer_norm_2, 1e-5), layer.feed_forward)]

    # A bias of the key projection changes no weight, so its gradient is mere rounding.
    inputs = [x, *(p for name, p in layer.named_parameters() if "k_proj.bias" not in name)]
    assert_textbook([got], textbook, inputs)


def stepped(decoder, input, hidden, encoder_outputs, key_mask):
    """Compute one step of the decoder by the formula, each gate of its GRU in turn."""
    embedded = decoder.embedding.weight[input]
    with fa.use_backend("naive"):
        found = [
            layer(hidden[:, None], encoder_outputs, key_mask=key_mask, need_weights=True)
            for layer in decoder.attentions
        ]
    context = affine(torch.cat([out.squeeze(1) for out, _ in found], 1), decoder.fc_attn)
    rnn = decoder.rnn
    x = (torch.cat([embedded, context], 1) @ rnn.weight_ih_l0.T + rnn.bias_ih_l0).chunk(3, 1)
    h = (hidden @ rnn.weight_hh_l0.T + rnn.bias_hh_l0).chunk(3, 1)
    reset, update = torch.sigmoid(x[0] + h[0]), torch.sigmoid(x[1] + h[1])
    state = (1 - update) * torch.tanh(x[2] + reset * h[2]) + update * hidden
    weights = torch.stack([weights.squeeze(2) for _, weights in found], 1)
    return affine(torch.cat([state, context, embedded], 1), decoder.fc), state, weights


@pytest.mark.parametrize(
    "heads, dropout, scale, backend",
    [(1, 0.0, None, "naive"), (3, 0.5, None, "naive"), (2, 0.0, 6**-0.5, "naive"), (2, 0.5, None, "triton")],
)
def test_a_textbook_decoder(heads, dropout, scale, backend, device):
    dtype = torch.float32 if device == "cuda" else torch.float64
    sizes = dict(vocab_size=7, embed_size=3, hidden_size=6, encoder_size=5, num_attentions=2)
    sizes |= dict(num_heads=heads, dropout=dropout, scale=scale)
    decoder = shake(layers.AttentionDecoder(**sizes, device=device, dtype=dtype))
    assert {(each.num_heads, each.dropout, each.scale) for each in decoder.attentions} == {(heads, dropout, scale)}
    hidden = torch.randn(2, 6, dtype=dtype, device=device, requires_grad=True)
    encoded = torch.randn(2, 4, 5, dtype=dtype, device=device, requires_grad=True)
    steps, key_mask = torch.tensor([[1, 6], [0, 1], [5, 2]], device=device), KEYS.to(device)
    steps = steps[:1] if backend == "triton" else steps

    def results(step):
        state, found = hidden, []
        for number, tokens in enumerate(steps):
            torch.manual_seed(7 + number)
            found.append(step(tokens, state, encoded, key_mask=key_mask))
            state = found[-1][1]
        return [found[-1][0], *found]

    # cuDNN's GRU rounds more than the formula does.
    with fa.use_backend(backend), torch.backends.cudnn.flags(enabled=False):
        got = results(functools.partial(decoder, need_weights=True))
    assert got[-1][2].shape == (2, 2, heads, 4) and (got[-1][2] == 0).any()
    inputs = [hidden, encoded, *(p for name, p in decoder.named_parameters() if "k_proj.bias" not in name)]
    textbook = functools.partial(results, functools.partial(stepped, decoder))
    assert_textbook(got, textbook, inputs)
    assert_textbook([got[-1][1]], lambda: [textbook()[-1][1]], inputs[:2])


@torch.no_grad()
def test_decoder_without_a_mask_and_dropout_in_training_alone():
    decoder = shake(layers.AttentionDecoder(7, 3, 4, 5, dropout=0.5)).eval()
    tokens, hidden, encoded = torch.tensor([1, 2], dtype=torch.int32), torch.randn(2, 4), torch.randn(2, 9, 5)
    logits, state, weights = decoder(tokens, hidden, encoded, need_weights=True)
    assert logits.shape == (2, 7) and state.shape == (2, 4) and weights.shape == (2, 2, 1, 9)
    assert_like(weights.sum(-1), torch.ones(2, 2, 1, dtype=torch.float64))
    assert torch.equal(decoder(tokens, hidden, encoded, key_mask=torch.ones(2, 9).bool())[0], logits)
    got = decoder(tokens, hidden.T.contiguous().T, encoded)[1]  # an input of any strides is right
    assert_like(got, lambda decoder: decoder(tokens, hidden, encoded)[1], decoder)
    decoder.train()
    torch.manual_seed(3)
    logits, _, weights = decoder(tokens, hidden, encoded, need_weights=True)
    torch.manual_seed(3)
    again, _, none = decoder(tokens, hidden, encoded)
    assert torch.equal(again, logits) and none is None and (weights == 0).any()
    assert decoder(tokens[:0], hidden[:0], encoded[:0])[0].shape == (0, 7)


@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_positions_are_sines_and_cosines(width):
    layer = layers.SinusoidalPositionalEncoding(width, 30)
    want = torch.empty(30, width, dtype=torch.float64)
    for i in range(30):
        for column in range(width):
            angle = i / 10000 ** (2 * (column // 2) / width)
            want[i, column] = math.cos(angle) if column % 2 else math.sin(angle)
    x = torch.randn(3, 21, width, dtype=torch.float64)
    assert_like(layer(x), x + want[:21])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        zeros = torch.zeros(1, 30, width, dtype=dtype)
        assert layer(zeros).dtype == dtype and torch.equal(layer(zeros)[0], layer.pe.to(dtype))


def test_positions_are_a_buffer_and_no_state():
    layer = layers.SinusoidalPositionalEncoding(4, 10)
    assert list(layer.parameters()) == [] and [name for name, _ in layer.named_buffers()] == ["pe"]
    longer = layers.SinusoidalPositionalEncoding(4, 20)
    longer.load_state_dict(layer.state_dict())
    layer.load_state_dict(longer.state_dict())
    assert len(longer.pe) == 20
    assert layer.to(torch.float16).pe.dtype == torch.float16 and layer.to("meta").pe.is_meta
    layer.to_empty(device="cpu").reset_parameters()
    assert torch.equal(layer.pe, longer.pe[:10].half())
    assert layers.SinusoidalPositionalEncoding(4, 10, dtype=torch.float32).pe.dtype == torch.float32
    x = torch.randn(1, 3, 4, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_embeddings():
    layer = shake(layers.Embeddings(9, WIDTH, 5, dtype=torch.float64))
    ids = torch.tensor([[1, 0, 8], [8, 8, 2]])

    def textbook():
        summed = layer.token_embeddings.weight[ids] + layer.position_embeddings.weight[:3]
        return [normed(summed, layer.layer_norm, 1e-12)]

    assert torch.equal(layer(ids.int()), layer(ids))
    assert_textbook([layer(ids)], textbook, list(layer.parameters()))
    assert layer(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, WIDTH)  # as many tokens as positions
    assert layer(ids[:, :0]).shape == (2, 0, WIDTH)


@pytest.mark.parametrize("shape", [(), (3,), (2, 4), (2, 3, 4), (0, 4)], ids=str)
def test_feed_forward_takes_any_leading_dimensions(shape):
    layer = shake(layers.FeedForward(WIDTH, INSIDE, dtype=torch.float64))
    x = 3 * torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)
    assert_textbook([layer(x)], lambda: [fed(x, layer)], [x, *layer.parameters()])


def test_dropout_comes_last_and_in_training_alone():
    inputs = torch.randn(2, 30, 8), torch.randint(50, (2, 30))
    for layer, x in zip((layers.FeedForward(8, 16, 0.5), layers.Embeddings(50, 8, 30, 0.5)), inputs, strict=True):
        got = layer(x)
        dropped = got == 0
        assert 0.3 < dropped.float().mean() < 0.7
        assert torch.equal(got[~dropped], 2 * layer.eval()(x)[~dropped])


def test_an_encoder_is_its_layers_one_after_the_other(backend, device):
    encoder = shake(layers.TransformerEncoder(2, 8, 2, 16, causal=True, backend=backend, device=device))
    assert [each.attention.backend for each in encoder.layers] == [backend] * 2
    x, mask, key_mask = (y.to(device) for y in (torch.randn(2, 4, 8), pairs(4, 4), KEYS))
    got = encoder(x, mask, key_mask=key_mask)
    for layer in encoder.layers:
        layer.attention.backend = None
    whole = mask & torch.ones(4, 4, device=device).tril().bool() & key_mask[:, None]
    with fa.use_backend("naive"):
        assert_like(got, lambda: functools.reduce(lambda x, layer: layer(x, whole), encoder.layers, x))


def test_numpys_numbers_compile():
    np = pytest.importorskip("numpy")
    n, p, x, ids = np.int64, np.float64(0.1), torch.randn(2, 7, 8), torch.randint(5, (2, 7))
    for layer, given in (
        (fa.SelfAttention(n(8), dropout=p, scale=p), x),
        (fa.MultiHeadAttention(n(8), n(4), num_kv_heads=n(2), window=(n(3), n(0)), dropout=p, scale=p), x),
        (layers.SinusoidalPositionalEncoding(n(8), n(9)), x),
        (layers.TransformerEncoder(n(2), n(8), n(2), n(16), p, layer_norm_eps=p), x),
        (layers.Embeddings(n(5), n(8), n(9), p, layer_norm_eps=p), ids),
    ):
        torch.compile(layer, fullgraph=True, backend="eager")(given)


def both(*names):
    return [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]


ATTENTION = both(*(f"{name}_proj" for name in ("q", "k", "v", "out")))
LAYER = both("layer_norm_1", "layer_norm_2", "feed_forward.linear_1", "feed_forward.linear_2")
LAYER += [f"attention.{name}" for name in ATTENTION]
GRU = [f"rnn.{kind}_{way}_l0" for kind in ("weight", "bias") for way in ("ih", "hh")]
DECODER = ["embedding.weight", *GRU, *both("fc_attn", "fc")]
DECODER += [f"attentions.{i}.{name}" for i in (0, 1) for name in ATTENTION]
EMBEDDINGS = ["token_embeddings.weight", "position_embeddings.weight", *both("layer_norm")]

NAMED = [
    (lambda: fa.MultiHeadAttention(8, 2, bias=False), ATTENTION[::2]),
    (lambda: layers.Embeddings(9, 8, 5), EMBEDDINGS),
    (lambda: layers.TransformerEncoder(2, 8, 2, 16), [f"layers.{i}.{name}" for i in (0, 1) for name in LAYER]),
    (lambda: layers.AttentionDecoder(9, 3, 8, 5, 2), DECODER),
]


@pytest.mark.parametrize("make, names", NAMED)
def test_names_of_the_state(make, names):
    first, second = make(), shake(make())
    assert sorted(first.state_dict()) == sorted(names)
    first.load_state_dict(second.state_dict())
    assert all(torch.equal(x, y) for x, y in zip(first.parameters(), second.parameters(), strict=True))
    assert sorted(name for name, _ in first.named_parameters()) == sorted(names)


def config(**changed):
    sizes = dict(vocab_size=40, hidden_size=8, max_position_embeddings=12, num_hidden_layers=2, num_attention_heads=2)
    return SimpleNamespace(**sizes | dict(intermediate_size=16, hidden_dropout_prob=0.25) | changed)


def bert_config(**changed):
    transformers = pytest.importorskip("transformers")
    return transformers.BertConfig(**vars(config(**changed)))


@pytest.mark.parametrize("make", [config, bert_config], ids=["any object", "BertConfig"])
def test_a_config_in_place_of_numbers(make):
    given = make(attention_probs_dropout_prob=0.125, layer_norm_eps=1e-3)
    embeddings = layers.Embeddings.from_config(given)
    assert embeddings.token_embeddings.weight.shape == (40, 8)
    assert embeddings.position_embeddings.weight.shape == (12, 8)
    assert (embeddings.dropout.p, embeddings.layer_norm.eps) == (0.25, 1e-3)
    encoder = layers.TransformerEncoder.from_config(given, backend="naive", causal=True)
    single = layers.TransformerEncoderLayer.from_config(given, backend="naive", causal=True)
    assert len(encoder.layers) == 2
    for layer in (*encoder.layers, single):
        assert (layer.attention.num_heads, layer.attention.dropout, layer.attention.backend) == (2, 0.125, "naive")
        assert layer.attention.causal and (layer.layer_norm_1.eps, layer.layer_norm_2.eps) == (1e-3, 1e-3)
        assert layer.feed_forward.dropout.p == 0.25 and layer.feed_forward.linear_1.weight.shape == (16, 8)
    feed_forward = layers.FeedForward.from_config(given, dropout=0.5, dtype=torch.float64)
    assert feed_forward.dropout.p == 0.5 and feed_forward.linear_2.weight.dtype == torch.float64
    model = nn.Sequential(embeddings, encoder).eval()
    assert model(torch.randint(40, (2, 12))).shape == (2, 12, 8)


def test_a_config_that_says_no_more_than_sizes_or_lacks_one():
    layer = layers.TransformerEncoderLayer.from_config(config())
    assert (layer.attention.dropout, layer.layer_norm_1.eps) == (0.0, 1e-5)
    assert layers.Embeddings.from_config(config()).layer_norm.eps == 1e-12
    given = config()
    del given.intermediate_size
    with pytest.raises(TypeError, match="^config: expected an object with intermediate_size, got SimpleNamespace$"):
        layers.TransformerEncoder.from_config(given)


@pytest.mark.parametrize("make", [config, bert_config], ids=["any object", "BertConfig"])
@pytest.mark.parametrize(
    "name, value, takes",
    [
        ("hidden_act", "relu", [layers.Embeddings]),
        ("hidden_act", "gelu_new", [layers.Embeddings]),
        ("position_embedding_type", "relative_key", [layers.FeedForward]),
        ("is_decoder", True, [layers.FeedForward, layers.Embeddings]),
        ("add_cross_attention", True, [layers.FeedForward, layers.Embeddings]),
    ],
)
def test_a_config_that_asks_for_something_else(make, name, value, takes):
    for kind in (layers.TransformerEncoderLayer, layers.TransformerEncoder, layers.FeedForward, layers.Embeddings):
        refused = pytest.raises(ValueError, match=rf"^config\.{name}: .*{value}")
        with contextlib.nullcontext() if kind in takes else refused:
            kind.from_config(make(**{name: value}))


def decode(token=1, **sizes):
    return layers.AttentionDecoder(7, 3, 4, 5, **sizes)(torch.tensor([token]), torch.zeros(1, 4), torch.zeros(1, 3, 5))


def attend(*shapes, dtype=torch.float32, **sizes):
    return fa.MultiHeadAttention(8, 2, **sizes)(torch.zeros(1, 3, 8), *(torch.zeros(x, dtype=dtype) for x in shapes))


LONG = torch.zeros(1, 4, dtype=torch.int64)
WRONG = [  # tests/test_hostile.py has every kind of value for each argument
    ("x: .*at most 3, got 4", ValueError, lambda: layers.SinusoidalPositionalEncoding(2, 3)(torch.zeros(1, 4, 2))),
    ("x: .*2", ValueError, lambda: layers.SinusoidalPositionalEncoding(2, 3)(torch.zeros(1, 3, 1))),
    ("input_ids: .*at most 3, got 4", ValueError, lambda: layers.Embeddings(4, 8, 3)(LONG)),
    ("input_ids: .*0 to 3, got 4 to 4", ValueError, lambda: layers.Embeddings(4, 8, 4)(LONG + 4)),
    ("input_ids: .*0 to 3, got -1 to -1", ValueError, lambda: layers.Embeddings(4, 8, 4)(LONG - 1)),
    ("input: .*0 to 6, got 9 to 9", ValueError, lambda: decode(9)),
    (r"query: .*\(1, length, 6\).* key .*\(1, 3, 8\)", ValueError, lambda: attend(kdim=6)),
    (r"query: .*\(1, 3, 4\).* value .*\(1, 3, 8\)", ValueError, lambda: attend(vdim=4)),
    (r"key: .*\(1, 3, 4\).* value .*\(1, 3, 6\)", ValueError, lambda: attend((1, 3, 6), kdim=6, vdim=4)),
    (r"value: .*\(1, 3, 4\).*\(1, 2, 4\)", ValueError, lambda: attend((1, 3, 6), (1, 2, 4), kdim=6, vdim=4)),
    (r"key: .*\(3, 3\).* mask", ValueError, lambda: attend((3, 3), dtype=torch.bool)),
    ("num_heads: .*hidden_size, 4", ValueError, lambda: decode(num_heads=3)),
    ("num_attention_heads: .*hidden_size, 8", ValueError, lambda: layers.TransformerEncoderLayer(8, 3, 16)),
    (r"TransformerEncoderLayer\(\) .*'kdim'", TypeError, lambda: layers.TransformerEncoderLayer(8, 2, 16, kdim=3)),
    ("dtype: .*torch.float16.*, got 'float16'", TypeError, lambda: decode(dtype="float16")),
    ("dtype: ", TypeError, lambda: decode(dtype=torch.int32)),
    ("dtype: ", TypeError, lambda: layers.Embeddings(7, 4, 5, dtype=torch.int32)),
    ("dtype: ", TypeError, lambda: layers.FeedForward(4, 8, dtype=torch.int32)),
    ("dtype: ", TypeError, lambda: layers.TransformerEncoderLayer(8, 2, 16, dtype=torch.int32)),
    ("dtype: ", TypeError, lambda: layers.SinusoidalPositionalEncoding(8, 2, dtype=torch.int32)),
]


@pytest.mark.parametrize("message, error, make", WRONG)
def test_a_wrong_argument_is_named(message, error, make):
    with pytest.raises(error, match=f"^{message}"):
        make()
