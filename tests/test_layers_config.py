"""fusedattn.layers from a config: what they read, and what they refuse."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fusedattn import layers


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


def test_a_config_that_says_no_more_than_sizes():
    layer = layers.TransformerEncoderLayer.from_config(config())
    assert (layer.attention.dropout, layer.layer_norm_1.eps) == (0.0, 1e-5)
    assert layers.Embeddings.from_config(config()).layer_norm.eps == 1e-12
    layers.TransformerEncoder.from_config(bert_config())  # its own defaults are what the layers do


ENCODERS = (layers.TransformerEncoderLayer, layers.TransformerEncoder)


@pytest.mark.parametrize("make", [config, bert_config], ids=["any object", "BertConfig"])
@pytest.mark.parametrize(
    "name, value, refusing, taking",
    [
        ("hidden_act", "relu", (layers.FeedForward, *ENCODERS), (layers.Embeddings,)),
        ("hidden_act", "gelu_new", (layers.FeedForward, *ENCODERS), (layers.Embeddings,)),
        ("position_embedding_type", "relative_key", (layers.Embeddings, *ENCODERS), (layers.FeedForward,)),
        ("is_decoder", True, ENCODERS, (layers.FeedForward, layers.Embeddings)),
        ("add_cross_attention", True, ENCODERS, (layers.FeedForward, layers.Embeddings)),
    ],
)
def test_a_config_that_asks_for_something_else(make, name, value, refusing, taking):
    for kind in refusing:
        with pytest.raises(ValueError, match=rf"^config\.{name}: .*{value}"):
            kind.from_config(make(**{name: value}))
    for kind in taking:
        kind.from_config(make(**{name: value}))


def test_a_config_that_lacks_a_size():
    given = config()
    del given.intermediate_size
    with pytest.raises(TypeError, match="^config: expected an object with intermediate_size, got SimpleNamespace$"):
        layers.TransformerEncoder.from_config(given)
