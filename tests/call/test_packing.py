"""Tests that the query heads of a kv head share a tile if there are few queries."""

import pytest
import torch

import fusedattn as fa

from ..cases import Case
from ..close import assert_computes, assert_like

DECODE = Case("decode", B=2, Hq=6, Hkv=2, Sq=1, Sk=45)
PACKED = {
    "one query": DECODE,
    "one query, causal": DECODE._replace(causal=True, dtype=torch.bfloat16),
    "one query, keys hidden": DECODE._replace(key_mask="own"),
    "one query, strided": DECODE._replace(strided=True, D=5, Dv=24),
    "a cap": DECODE._replace(softcap=2.0),
    "a window as wide as all keys": DECODE._replace(window=(50, 0)),
    "a mask of all heads": DECODE._replace(mask="batch"),
    "a bias of keys": DECODE._replace(bias="rank 2"),
    "a few queries": DECODE._replace(Sq=5, Hkv=1),
    "a few queries that see all keys": DECODE._replace(Sq=3, window=(None, 2)),
}
APART = {
    "more queries than a tile has rows": DECODE._replace(Sq=25),
    "few queries, causal": DECODE._replace(Sq=3, causal=True),
    "a window": DECODE._replace(window=(20, 0)),
    "a mask of each head": DECODE._replace(mask="pairs"),
    "slopes": DECODE._replace(alibi="shared"),
    "sinks": DECODE._replace(sinks=True),
    "dropout": DECODE._replace(dropout=0.3),
    "queries hidden": DECODE._replace(B=3, query_mask="own"),
    "queries of heads in another order": DECODE._replace(Sq=3, strided=True),
    "a head each": DECODE._replace(Hkv=6),
}


@pytest.mark.parametrize("name", PACKED | APART)
@pytest.mark.one_in(6)
def test_heads_that_share_keys_share_a_tile(name, device, tiles, launched, poison):
    tiles.multiprocessors(2)
    case = (PACKED | APART)[name]
    tensors, options = case.draw(device)
    assert_computes(fa.attention, tensors, options, backend="triton")
    launched.clear()
    inputs = [tensors[name] for name in ("query", "key", "value")]
    out, lse = fa.attention(*inputs, **options, return_lse=True, backend="triton")
    heads = [given["heads"] for kernel, given in launched if kernel == "forward"]
    assert heads == [case.Hkv if name in PACKED else case.Hq]
    assert_like([out, lse], lambda: fa.reference.eager(*inputs, **options, return_lse=True))


def test_heads_stay_apart_where_multiprocessors_would_be_idle(device, tiles, launched):
    tiles.multiprocessors(5)
    tensors, options = DECODE.draw(device)
    fa.attention(tensors["query"], tensors["key"], tensors["value"], backend="triton")
    assert launched[0][1]["heads"] == DECODE.Hq
