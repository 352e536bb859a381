"""fusedattn.layers: every wrong argument is named."""

import math

import pytest
import torch

from fusedattn import layers

LONG = torch.zeros(1, 4, dtype=torch.int64)


def decode(input=(1,), hidden=(1, 4), encoded=(1, 3, 5), dtype=torch.int64, floating=torch.float32, **options):
    step = torch.zeros(input, dtype=dtype), torch.zeros(hidden, dtype=floating), torch.zeros(encoded)
    return layers.AttentionDecoder(7, 3, 4, 5)(*step, **options)


@pytest.mark.parametrize(
    ("message", "error", "make"),
    [
        ("embed_dim: ", ValueError, lambda: layers.SinusoidalPositionalEncoding(0, 5)),
        ("max_len: ", TypeError, lambda: layers.SinusoidalPositionalEncoding(4, 5.0)),
        ("x: .*at most 3, got 4", ValueError, lambda: layers.SinusoidalPositionalEncoding(2, 3)(torch.zeros(1, 4, 2))),
        ("x: .*, 2\\)", ValueError, lambda: layers.SinusoidalPositionalEncoding(2, 3)(torch.zeros(1, 3, 1))),
        ("x: .*, 2\\)", ValueError, lambda: layers.SinusoidalPositionalEncoding(2, 3)(torch.zeros(3, 2))),
        ("x: .*floating", TypeError, lambda: layers.SinusoidalPositionalEncoding(4, 3)(LONG[None])),
        ("vocab_size: ", ValueError, lambda: layers.Embeddings(0, 8, 3)),
        ("max_position_embeddings: ", ValueError, lambda: layers.Embeddings(4, 8, 0)),
        ("dropout: ", ValueError, lambda: layers.Embeddings(4, 8, 3, 1.5)),
        ("dropout: ", TypeError, lambda: layers.FeedForward(4, 8, "0.1")),
        ("input_ids: .*at most 3, got 4", ValueError, lambda: layers.Embeddings(4, 8, 3)(LONG)),
        ("input_ids: .*int64", TypeError, lambda: layers.Embeddings(4, 8, 4)(LONG.float())),
        ("input_ids: .*int64", TypeError, lambda: layers.Embeddings(4, 8, 4)(LONG.bool())),
        ("input_ids: .*shape", ValueError, lambda: layers.Embeddings(4, 8, 4)(LONG[0])),
        ("input_ids: .*tensor", TypeError, lambda: layers.Embeddings(4, 8, 4)([[1]])),
        ("input_ids: .*0 to 3, got 4 to 4", ValueError, lambda: layers.Embeddings(4, 8, 4)(LONG + 4)),
        ("input_ids: .*0 to 3, got -1 to -1", ValueError, lambda: layers.Embeddings(4, 8, 4)(LONG - 1)),
        ("intermediate_size: ", ValueError, lambda: layers.FeedForward(4, 0)),
        ("x: .*4\\)", ValueError, lambda: layers.FeedForward(4, 8)(torch.zeros(3, 5))),
        ("x: .*4\\)", ValueError, lambda: layers.FeedForward(4, 8)(torch.tensor(1.0))),
        ("x: .*tensor", TypeError, lambda: layers.FeedForward(4, 8)([1.0] * 4)),
        ("num_attention_heads: .*hidden_size, 8", ValueError, lambda: layers.TransformerEncoderLayer(8, 3, 16)),
        ("num_attention_heads: ", ValueError, lambda: layers.TransformerEncoderLayer(8, 0, 16)),
        ("attention_dropout: ", ValueError, lambda: layers.TransformerEncoder(1, 8, 2, 16, attention_dropout=2)),
        ("dropout: ", ValueError, lambda: layers.TransformerEncoderLayer(8, 2, 16, -0.1)),
        ("scale: ", ValueError, lambda: layers.TransformerEncoderLayer(8, 2, 16, scale=math.nan)),
        ("backend: ", ValueError, lambda: layers.TransformerEncoderLayer(8, 2, 16, backend="fast")),
        (r"TransformerEncoderLayer\(\) .*'kdim'", TypeError, lambda: layers.TransformerEncoderLayer(8, 2, 16, kdim=3)),
        ("x: ", ValueError, lambda: layers.TransformerEncoderLayer(8, 2, 16)(torch.zeros(1, 3, 7))),
        ("x: ", ValueError, lambda: layers.TransformerEncoder(1, 8, 2, 16)(torch.zeros(3, 8))),
        ("mask: ", TypeError, lambda: layers.TransformerEncoderLayer(8, 2, 16)(torch.zeros(1, 3, 8), torch.ones(3, 3))),
        ("x: .*float32", TypeError, lambda: layers.TransformerEncoderLayer(8, 2, 16)(torch.zeros(1, 3, 8).double())),
        ("x: .*float32", TypeError, lambda: layers.FeedForward(4, 8)(torch.zeros(3, 4).half())),
        ("x: .*device", ValueError, lambda: layers.FeedForward(4, 8)(torch.zeros(3, 4, device="meta"))),
        ("num_hidden_layers: ", ValueError, lambda: layers.TransformerEncoder(0, 8, 2, 16)),
        ("num_heads: .*hidden_size, 4", ValueError, lambda: layers.AttentionDecoder(7, 3, 4, 5, num_heads=3)),
        ("num_attentions: ", ValueError, lambda: layers.AttentionDecoder(7, 3, 4, 5, 0)),
        ("encoder_size: ", ValueError, lambda: layers.AttentionDecoder(7, 3, 4, 0)),
        ("dropout: ", ValueError, lambda: layers.AttentionDecoder(7, 3, 4, 5, dropout=2)),
        ("dtype: .*floating", TypeError, lambda: layers.AttentionDecoder(7, 3, 4, 5, dtype=torch.int32)),
        ("dtype: .*floating", TypeError, lambda: layers.Embeddings(7, 4, 5, dtype=torch.int32)),
        ("dtype: .*floating", TypeError, lambda: layers.FeedForward(4, 8, dtype="half")),
        ("dtype: .*floating", TypeError, lambda: layers.TransformerEncoderLayer(8, 2, 16, dtype=torch.bool)),
        ("dtype: .*floating", TypeError, lambda: layers.SinusoidalPositionalEncoding(8, 2, dtype=torch.int32)),
        ("input: .*int64", TypeError, lambda: decode(dtype=torch.float32)),
        ("input: .*shape", ValueError, lambda: decode(input=(1, 1))),
        ("input: .*0 to 6, got 9 to 9", ValueError, lambda: decode_ids(9)),
        ("hidden: .*\\(1, 4\\), got \\(1, 1, 4\\)", ValueError, lambda: decode(hidden=(1, 1, 4))),
        ("hidden: .*\\(2, 4\\), got \\(1, 4\\)", ValueError, lambda: decode(input=(2,))),
        ("hidden: .*float32", TypeError, lambda: decode(floating=torch.float64)),
        ("encoder_outputs: ", ValueError, lambda: decode(encoded=(1, 3, 4))),
        ("encoder_outputs: .*batch size", ValueError, lambda: decode(encoded=(2, 3, 5))),
        ("key_mask: ", ValueError, lambda: decode(key_mask=torch.ones(1, 4).bool())),
    ],
)
def test_a_wrong_argument_is_named(message, error, make):
    with pytest.raises(error, match=f"^{message}"):
        make()


def decode_ids(token):
    return layers.AttentionDecoder(7, 3, 4, 5)(torch.tensor([token]), torch.zeros(1, 4), torch.zeros(1, 3, 5))
