"""`flash_attn_varlen_func` with keys in pages, and sides of a window in tensors and arrays."""

import numpy as np
import pytest
import torch

from fusedattn.compat.flash_attn import flash_attn_func, flash_attn_varlen_func

QUERIES, KEYS = (3, 0, 5, 1), (7, 4, 5, 0)  # of each sequence
PAGE, PAGES, HEADS, DIM, DV = 3, 11, 2, 16, 8
TABLE = torch.tensor([[4, 0, 9], [1, 10, 0], [7, 2, 0], [0, 0, 0]], dtype=torch.int32)  # only the first 3, 2, 2 and 0
OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window_size=(2, 1)),
    "softcap": dict(softcap=2.0),
    "alibi": dict(alibi_slopes=torch.tensor([0.3, 0.1, 0.2, 0.4]), causal=True),
    "dropout": dict(dropout_p=0.0, return_attn_probs=True),
}


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.fixture
def drawn():
    """(q, pages of keys, pages of values); slots that no sequence has are NaN."""
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(sum(QUERIES), 4, DIM),
        torch.randn(PAGES, PAGE, HEADS, DIM),
        torch.randn(PAGES, PAGE, HEADS, DV),
    )
    unused = torch.ones(PAGES, PAGE, dtype=torch.bool)
    for sequence, length in enumerate(KEYS):
        for j in range(length):
            unused[TABLE[sequence, j // PAGE], j % PAGE] = False
    return [q, *(x.masked_fill(unused[..., None, None], float("nan")) for x in (k, v))]


def packed(pages):
    """The keys of each sequence, one sequence behind the other."""
    slots = [(int(TABLE[b, j // PAGE]), j % PAGE) for b, length in enumerate(KEYS) for j in range(length)]
    return torch.stack([pages[slot] for slot in slots])


def call(q, k, v, **options):
    return flash_attn_varlen_func(q, k, v, offsets(QUERIES), offsets(KEYS), max(QUERIES), max(KEYS), **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_pages_are_the_keys_that_they_hold(name, drawn):
    inputs = [x.requires_grad_() for x in drawn]
    got = call(*inputs, block_table=TABLE, **OPTIONS[name])
    want = call(inputs[0], *map(packed, inputs[1:]), **OPTIONS[name])
    results = [(a, b) for a, b in zip(got, want, strict=True)] if isinstance(got, tuple) else [(got, want)]
    assert all(map(torch.equal, *zip(*results, strict=True)))
    grads = [torch.autograd.grad(x[0].sum(), inputs) for x in zip(*results, strict=True)]
    assert all(map(torch.equal, *grads)) and all(x.isfinite().all() for x in grads[0])


def test_sequences_may_share_pages(drawn):
    q, k, v = drawn
    out = flash_attn_varlen_func(
        q[:4], k, v, offsets([2, 2]), offsets([6, 6]), 2, torch.tensor(6), block_table=TABLE[:1, :2].expand(2, 2)
    )
    one = flash_attn_varlen_func(q[2:4], k, v, offsets([2]), offsets([6]), 2, 6, block_table=TABLE[:1, :2])
    assert torch.equal(out[2:], one)


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(block_table=TABLE.long()), TypeError, "block_table: expected an int32"),
        (dict(block_table=[0]), TypeError, "block_table: "),
        (dict(block_table=TABLE[:2]), ValueError, "block_table: expected 4 rows"),
        (dict(block_table=TABLE[:, :2]), ValueError, "cu_seqlens_k: expected sequences of at most 6 keys"),
        (dict(block_table=TABLE + 2), ValueError, "block_table: expected pages from 0 to 10, got 11"),
        (dict(block_table=TABLE - 1), ValueError, "block_table: expected pages from 0 to 10, got -1"),
        (dict(k=torch.zeros(16, 2, DIM)), ValueError, "k: expected rank 4"),
        (dict(v=torch.zeros(PAGES, 4, HEADS, DV)), ValueError, "v: expected the pages of k"),
        (dict(cu_seqlens_k=offsets(KEYS).long()), TypeError, "cu_seqlens_k: expected an int32"),
        (dict(cu_seqlens_k=offsets([7, -3, 5, 7])), ValueError, "cu_seqlens_k: "),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_fit_is_named(changed, error, message, drawn):
    names = "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    given = dict(zip(names, (*drawn, offsets(QUERIES), offsets(KEYS), 5, 7), strict=True), block_table=TABLE)
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**given | changed)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list], ids=["tensor", "array", "list"])
def test_a_window_may_be_a_tensor_or_an_array(kind):
    q = torch.randn(1, 9, 2, 16)
    assert torch.equal(flash_attn_func(q, q, q, window_size=kind([3, 1])), flash_attn_func(q, q, q, window_size=(3, 1)))
    with pytest.raises(TypeError, match="^window_size: expected"):
        flash_attn_func(q, q, q, window_size=kind([3.0, 1.0]))
