"""What a caller can get wrong about packed sequences: a row each, and a call next to it that is right."""

import pytest
import torch

import fusedattn as fa
from fusedattn.call import packed

from ..sequences import offsets
from .test_rules import unreached

TQ, TK, HQ, HKV, D, DV = 7, 9, 4, 2, 6, 3
ROWS, KEYS = (3, 0, 4), (2, 3, 4)


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


def numbers(*values):
    return torch.tensor(values, dtype=torch.int32)


def call(**changed):
    shapes = dict(query=(TQ, HQ, D), key=(TK, HKV, D), value=(TK, HKV, DV))
    drawn = {name: torch.randn(shape) for name, shape in shapes.items()}
    return drawn | dict(cu_seqlens_q=offsets(ROWS), cu_seqlens_k=offsets(KEYS)) | changed


# argument, error, what the message says, what makes it wrong, what is right beside it
WRONG = [
    ("query", TypeError, "a tensor, got list", dict(query=[1.0]), {}),
    ("key", TypeError, "a tensor, got NoneType", dict(key=None), {}),
    ("value", TypeError, "a tensor, got int", dict(value=3), {}),
    ("query", TypeError, "a strided tensor", dict(query=torch.randn(TQ, HQ, D).to_sparse()), {}),
    ("key", TypeError, "a strided tensor", dict(key=torch.randn(TK, HKV, D).to_sparse()), {}),
    ("value", TypeError, "a strided tensor", dict(value=torch.randn(TK, HKV, DV).to_sparse()), {}),
    ("key", ValueError, "the device of query, cpu, got meta", dict(key=torch.randn(TK, HKV, D, device="meta")), {}),
    ("value", ValueError, "the device of query", dict(value=torch.randn(TK, HKV, DV, device="meta")), {}),
    ("query", TypeError, "a floating dtype", dict(query=torch.ones(TQ, HQ, D).long()), {}),
    ("key", TypeError, "the dtype of query, torch.float32", dict(key=torch.randn(TK, HKV, D).half()), {}),
    ("value", TypeError, "the dtype of query", dict(value=torch.randn(TK, HKV, DV).double()), {}),
    ("query", ValueError, "rank 3, (T, H, D), got (1, 7, 4, 6)", dict(query=torch.randn(1, TQ, HQ, D)), {}),
    ("key", ValueError, "rank 3", dict(key=torch.randn(TK, D)), {}),
    ("value", ValueError, "rank 3", dict(value=torch.randn(1, TK, HKV, DV)), {}),
    ("query", ValueError, "a head dimension", dict(query=torch.randn(TQ, HQ, 0), key=torch.randn(TK, HKV, 0)), {}),
    ("value", ValueError, "a head dimension", dict(value=torch.randn(TK, HKV, 0)), {}),
    ("key", ValueError, "the head dimension of query, 6", dict(key=torch.randn(TK, HKV, D + 1)), {}),
    ("value", ValueError, "as in key, (9, 2, 6)", dict(value=torch.randn(TK - 1, HKV, DV)), {}),
    ("value", ValueError, "as in key, (9, 2, 6)", dict(value=torch.randn(TK, 1, DV)), {}),
    (
        "key",
        ValueError,
        "divides the 4 of query, got 3 heads",
        dict(key=torch.randn(TK, 3, D), value=torch.randn(TK, 3, DV)),
        dict(key=torch.randn(TK, 1, D), value=torch.randn(TK, 1, DV)),
    ),
    *(
        row
        for side, total, right in (("q", TQ, ROWS), ("k", TK, KEYS))
        for name, tensor in ((f"cu_seqlens_{side}", {"q": "query", "k": "key"}[side]),)
        for row in (
            (name, TypeError, "a tensor, got list", {name: [0, 2]}, {}),
            (name, TypeError, "an int32 tensor, got torch.int64", {name: offsets(right).long()}, {}),
            (name, TypeError, "a strided tensor", {name: offsets(right).to_sparse()}, {}),
            (name, ValueError, "the device of query, cpu, got meta", {name: offsets(right).to("meta")}, {}),
            (name, ValueError, "shape (n + 1,)", {name: offsets(right)[None]}, {}),
            (name, ValueError, "shape (n + 1,)", {name: numbers()}, {}),
            (name, ValueError, "0 as its first, got 1", {name: numbers(1, 2, 3, total)}, {}),
            (name, ValueError, "no value below the one before it, got 2 after 3", {name: numbers(0, 3, 2, total)}, {}),
            (name, ValueError, f"rows of {tensor} as its last, {total}, got 6", {name: numbers(0, 3, 3, 6)}, {}),
        )
    ),
    ("cu_seqlens_k", ValueError, "as many as cu_seqlens_q has, 4", dict(cu_seqlens_k=numbers(0, TK)), {}),
    (
        "cu_seqlens_q",
        ValueError,
        "a sequence, for there are rows in query",
        dict(cu_seqlens_q=numbers(0), cu_seqlens_k=numbers(0)),
        {},
    ),
    (
        "cu_seqlens_k",
        ValueError,
        "a sequence, for there are rows in key",
        dict(query=torch.randn(0, HQ, D), cu_seqlens_q=numbers(0), cu_seqlens_k=numbers(0)),
        {},
    ),
    ("max_seqlen_q", TypeError, "an int or None, got float", dict(max_seqlen_q=4.0), dict(max_seqlen_q=4)),
    ("max_seqlen_q", TypeError, "an int or None, got bool", dict(max_seqlen_q=True), {}),
    ("max_seqlen_k", TypeError, "an int or None, got str", dict(max_seqlen_k="9"), dict(max_seqlen_k=9)),
    ("max_seqlen_q", ValueError, "0 or more, got -1", dict(max_seqlen_q=-1), {}),
    ("max_seqlen_q", ValueError, "below 2**31", dict(max_seqlen_q=2**64), dict(max_seqlen_q=2**31 - 1)),
    ("max_seqlen_k", ValueError, "0 or more, got -1", dict(max_seqlen_k=-1), {}),
    ("max_seqlen_k", ValueError, "below 2**31", dict(max_seqlen_k=2**31), {}),
    ("max_seqlen_q", ValueError, "at least the longest length in cu_seqlens_q", dict(max_seqlen_q=3), {}),
    ("max_seqlen_k", ValueError, "at least the longest length in cu_seqlens_k", dict(max_seqlen_k=3), {}),
    *(
        row
        for name, total in (("key_mask", TK), ("query_mask", TQ))
        for row in (
            (name, TypeError, "a bool tensor", {name: torch.ones(total)}, {name: bools(total)}),
            (name, TypeError, "a strided tensor", {name: bools(total).to_sparse()}, {}),
            (name, ValueError, "the device", {name: bools(total).to("meta")}, {}),
            (name, ValueError, f"shape ({total},), got (1, {total})", {name: bools(1, total)}, {}),
        )
    ),
    # What is asked of each sequence is asked of a batch of the longest.
    ("mask", ValueError, "broadcastable to (3, 4, 4, 4)", dict(mask=bools(5, 4)), dict(mask=bools(3, 1, 4, 4))),
    (
        "mask",
        ValueError,
        "(3, 4, 8, 4)",
        dict(mask=bools(4, 4), max_seqlen_q=8),
        dict(mask=bools(8, 4), max_seqlen_q=8),
    ),
    ("mask", ValueError, "rank 2 or that of query, 4", dict(mask=bools(3, 4, 4)), {}),
    (
        "bias",
        ValueError,
        "broadcastable to (3, 4, 4, 4)",
        dict(bias=torch.ones(7, 9)),
        dict(bias=torch.ones(1, 4, 1, 4)),
    ),
    (
        "alibi_slopes",
        ValueError,
        "(4,) or (3, 4)",
        dict(alibi_slopes=torch.ones(2, 4)),
        dict(alibi_slopes=torch.ones(3, 4)),
    ),
    ("sinks", ValueError, "shape (4,)", dict(sinks=torch.ones(3, 4)), dict(sinks=torch.ones(4))),
    ("window", ValueError, "no negative side", dict(window=(-1, 0)), dict(window=(0, 0))),
    ("dropout_p", ValueError, "from 0 to 1", dict(dropout_p=2), dict(dropout_p=0.5)),
    ("scale", ValueError, "a finite number", dict(scale=float("nan")), dict(scale=0)),
]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: f"{row[0]}: {row[2]}")
def test_a_wrong_argument_is_named(row):
    argument, error, text, changed, neighbour = row
    for attend in (fa.attention_varlen, fa.reference.attention_varlen):
        with pytest.raises(error) as raised:
            attend(**call(**changed))
        message = str(raised.value)
        assert message.startswith(f"{argument}: expected ") and ", got " in message and "\n" not in message
        assert text in message
        attend(**call(**neighbour))


def test_every_rule_has_a_row(monkeypatch):
    calls = [call(**changed) for _, _, _, changed, _ in WRONG]
    assert unreached(monkeypatch, packed, [packed.TENSORS, *packed.OPTIONS.values()], fa.attention_varlen, calls) == []


def test_a_backend_is_checked():
    with pytest.raises(ValueError, match="backend: expected None or one of"):
        fa.attention_varlen(**call(backend="cuda"))


@pytest.mark.parametrize(
    "options", [{}, dict(softcap=3.0), dict(dropout_p=0.2, seed=1), dict(backend="naive")], ids=str
)
def test_weights_have_a_column_for_each_key_that_there_may_be(options):
    """Whoever takes the call: also where no sequence is as long as it is said to be."""
    found = fa.attention_varlen(**call(max_seqlen_q=30, max_seqlen_k=40, return_weights=True, **options))[1]
    assert found.shape == (HQ, TQ, 40) and not found[..., 30:].any()
    want = fa.reference.attention_varlen(**call(max_seqlen_q=30, max_seqlen_k=40, return_weights=True))[1]
    assert want.shape == found.shape


def test_values_on_a_device_are_not_fetched():
    """Tensors without data have no values: a check that looked would fail."""
    given = {name: x.to("meta") for name, x in call().items()}
    out = fa.attention_varlen(**given, max_seqlen_q=4, max_seqlen_k=4)
    assert out.shape == (TQ, HQ, DV)
