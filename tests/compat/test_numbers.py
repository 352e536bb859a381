"""Numbers of NumPy in drop-ins, where what they replace takes them."""

import pytest
import torch

from fusedattn.compat import flash_attn, torch as for_torch

numpy = pytest.importorskip("numpy")


def test_they_count_as_pythons():
    x = torch.randn(1, 2, 8, 16)
    ours = for_torch.scaled_dot_product_attention
    assert torch.equal(ours(x, x, x, scale=numpy.float32(0.5), dropout_p=numpy.int64(0)), ours(x, x, x, scale=0.5))
    rows, offsets = torch.randn(8, 2, 16), torch.tensor([0, 5, 8], dtype=torch.int32)
    given = rows, rows, rows, offsets, offsets
    left = flash_attn.flash_attn_varlen_func(
        *given, numpy.int64(5), numpy.int64(5), softmax_scale=numpy.float32(0.5), window_size=(numpy.int32(1), -1)
    )
    assert torch.equal(left, flash_attn.flash_attn_varlen_func(*given, 5, 5, softmax_scale=0.5, window_size=(1, -1)))


def test_a_layers_sizes_become_pythons():
    layer = for_torch.MultiheadAttention(
        numpy.int64(16), numpy.int32(2), dropout=numpy.float32(0.5), kdim=numpy.int64(4)
    )
    assert {type(x) for x in (layer.embed_dim, layer.num_heads, layer.kdim, layer.head_dim)} == {int}
    assert type(layer.dropout) is float


def test_elsewhere_an_error_says_whose_number_it_is():
    x = torch.randn(1, 2, 8, 16)
    with pytest.raises(TypeError, match="need_weights: expected a bool, got numpy.bool"):
        for_torch.MultiheadAttention(16, 2)(x[0], x[0], x[0], need_weights=numpy.bool_(True))
