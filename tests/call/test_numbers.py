"""NumPy's numbers count as Python's."""

import pytest
import torch

import fusedattn as fa
from fusedattn.compat import torch as for_torch

numpy = pytest.importorskip("numpy")


def test_they_do_in_options():
    x = torch.randn(1, 2, 8, 16)
    options = dict(scale=0.5, softcap=3.0, window=(2, 1), dropout_p=0.5, seed=3)
    of_numpy = dict(scale=numpy.float32(0.5), softcap=numpy.float64(3), window=(numpy.int32(2), numpy.int64(1)))
    of_numpy |= dict(dropout_p=numpy.float16(0.5), seed=numpy.int64(3))
    for _ in range(4):  # the last ones are replays
        assert torch.equal(fa.attention(x, x, x, **of_numpy), fa.attention(x, x, x, **options))
    rows, offsets = torch.randn(8, 2, 16), torch.tensor([0, 5, 8], dtype=torch.int32)
    longest = dict(max_seqlen_q=numpy.int32(5), max_seqlen_k=numpy.int64(5))
    got = fa.attention_varlen(rows, rows, rows, offsets, offsets, return_weights=True, **longest)[1]
    assert torch.equal(got, fa.attention_varlen(rows, rows, rows, offsets, offsets, return_weights=True)[1])


@pytest.mark.parametrize("layer", [fa.MultiHeadAttention, for_torch.MultiheadAttention], ids=["ours", "torch's"])
def test_they_do_as_sizes(layer):
    made = layer(numpy.int64(16), numpy.int32(2), dropout=numpy.float32(0.5), kdim=numpy.int64(4))
    assert {type(x) for x in (made.embed_dim, made.num_heads, made.kdim, made.head_dim)} == {int}
    assert type(made.dropout) is float
