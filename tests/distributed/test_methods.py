"""Tests that each method gives the results of one process, for cases that cover all pairs of options."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedattn as fa
from fusedattn import distributed
from fusedattn.call.options import Call
from fusedattn.distributed import ulysses
from fusedattn.testing.compare import with_gradients

from ..cases import DISTINCT, FEATURES, Case, covering
from ..close import assert_close
from ..sequences import packed
from .conftest import on_ranks
from .whole import METHODS, by_shards, largest, put_together, summed_gradients

TOLERANCE = 1e-10  # largest difference in float64
RING = ["grouped heads", "causal", "window", "awkward", "expanded", "softcap", "slopes", "sinks", "dropout"]
RING += ["more keys", "key mask", "negative scale", "lse alone", "top left"]
SINGLE = ["more rows", "one row", "one key", "one kv head", "window of itself", "slopes of each batch"]
SHORT = [
    Case("fewer rows than chunks", Sq=3, Sk=3, causal=True),
    Case("chunks of one length", Sq=32, Sk=32, causal=True),
    Case("slopes", Sq=37, Sk=37, causal=True, alibi="shared"),
    Case("dropout", Sq=37, Sk=37, causal=True, dropout=0.3),
]
KEY_HEADS = [  # ulysses repeats key heads that the ranks cannot divide
    Case("three key heads", Hq=12, Hkv=3, causal=True),
    Case("six key heads", Hq=12, Hkv=6, bias="pairs"),
    Case("one key head, weights", Hq=4, Hkv=1, sinks=True, grads="out, lse and weights"),
]
PLANS = {
    "ring": ("ring_attention", {}),
    "ring, zigzag": ("ring_attention", dict(balance="zigzag")),
    "gather": ("gather_attention", {}),
    "gather, zigzag": ("gather_attention", dict(balance="zigzag")),
    "ulysses": ("ulysses_attention", {}),
}


def cases_of(method, features):
    """Return cases that together have each pair of options that a method supports, and some options alone."""
    names = RING if method == "ring_attention" else [name for name in DISTINCT if name != "weights"]
    names = DISTINCT if method == "ulysses_attention" else names
    every = covering(8, names) + SHORT + [Case(name)._replace(**FEATURES[name]) for name in features]
    heads = [case if case.Hq == 12 else case._replace(Hq=4, Hkv=4 * case.Hkv // case.Hq) for case in every]
    heads += KEY_HEADS if method == "ulysses_attention" else []
    return [case._replace(dtype=torch.float64) for case in heads]


def check_methods(plan, features, step=1):
    method, balance = PLANS[plan]
    wrong = {}
    for case in cases_of(method, features)[::step]:
        tensors, options = case.draw()
        wanted = with_gradients(fa.attention, tensors, options, case.grads, backend="naive")
        found = summed_gradients(by_shards(method, **balance), tensors, options, case.grads)
        assert found.keys() == wanted.keys()
        differences = {(case.name, name): largest([found[name]], [x]) for name, x in wanted.items()}
        wrong |= {where: difference for where, difference in differences.items() if not difference < TOLERANCE}
    assert not wrong, wrong


@on_ranks(4)
@pytest.mark.parametrize("plan", PLANS)
def test_four_processes_equal_one(rank, size, plan):
    check_methods(plan, SINGLE, {"ring": 3, "gather": 3, "gather, zigzag": 2}.get(plan, 1))


@on_ranks(2)
@pytest.mark.matrix
@pytest.mark.parametrize("plan", PLANS)
def test_two_processes_equal_one(rank, size, plan):
    method, _ = PLANS[plan]
    lacks = {"ring_attention": {"mask", "bias", "query_mask"}}.get(method, set())
    lacks |= {"grads"} if method != "ulysses_attention" else set()
    check_methods(plan, [name for name, fields in FEATURES.items() if not lacks & fields.keys()])


LENGTHS = 9, 0, 1, 14, 0, 13  # lengths of documents; none ends where a shard of 37 rows ends
DOCUMENTS = [
    Case("full", Hq=4, Hkv=2),
    Case("causal", Hq=4, Hkv=2, causal=True),
    Case("everything", causal=True, window=(7, None), softcap=2.0, dropout=0.2, bias="pairs", mask="heads", alibi="own")
    ._replace(sinks=True, key_mask="own", query_mask="own"),
    Case("shared pairs", window=(5, 2), bias="rank 2", mask="rank 2", alibi="shared"),
]  # fmt: skip


@on_ranks(4)
@pytest.mark.parametrize("balance", [None, "zigzag"])
@pytest.mark.parametrize("case", DOCUMENTS, ids=lambda case: case.name)
def test_documents_may_be_cut_anywhere(rank, size, balance, case):
    longest = max(LENGTHS)
    case = case._replace(B=len(LENGTHS), Sq=longest, Sk=longest, dtype=torch.float64)
    tensors, options = case.draw()
    for b, length in enumerate(LENGTHS):
        tensors["out"][b, :, length:] = tensors["lse"][b, :, length:] = 0

    def of_shards(query, key, value, cu_seqlens, _, max_seqlen_q=None, max_seqlen_k=None, **options):
        given = dict(query=query, key=key, value=value) | options
        for name in ("query", "key", "value", "key_mask", "query_mask"):
            if name in given:
                given[name] = distributed.shard(given[name], 0, balance=balance)
        given.pop("return_weights")
        out, lse = distributed.gather_attention_varlen(cu_seqlens=cu_seqlens, balance=balance, **given)
        return put_together(out, 0, balance=balance), put_together(lse, 1, balance=balance)

    wanted = with_gradients(packed(fa.attention_varlen, LENGTHS, LENGTHS, backend="naive"), tensors, options)
    found = summed_gradients(packed(of_shards, LENGTHS, LENGTHS), tensors, options)
    wrong = {name: largest([found[name]], [x]) for name, x in wanted.items()}
    assert all(difference < TOLERANCE for difference in wrong.values()), wrong


@on_ranks(4)
@pytest.mark.parametrize("method", METHODS)
def test_16_bits_are_as_exact_as_in_one_process(rank, size, method):
    balance = {} if method == "ulysses_attention" else dict(balance="zigzag")
    for Hkv in (1, 4):
        case = Case("16 bits", B=2, Hq=8, Hkv=Hkv, Sq=128, Sk=128, D=32, Dv=32, causal=True, dtype=torch.bfloat16)
        tensors, options = case.draw()
        assert_close(summed_gradients(by_shards(method, **balance), tensors, options), tensors, options)
        if method == "ulysses_attention":
            inputs = (tensors[name] for name in ("query", "key", "value"))
            results = by_shards(method)(*inputs, **options, return_lse=True, return_weights=True)
            assert results[2].dtype == torch.bfloat16


@on_ranks(2)
def test_ulysses_sends_masks_of_one_row_as_one_row(rank, size):
    inputs, pairs = torch.randn(3, 1, 2, 64, 8, dtype=torch.float64), torch.randn(2, 64, dtype=torch.float64)
    for same in (True, False):
        rows = (pairs[:1].expand(2, 64) if same else pairs).clone().requires_grad_(not same)
        whole, own = rows.repeat_interleave(32, 0), rows.detach()[[rank]].requires_grad_(not same)
        sent = mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single)
        operators = mock.Mock(wraps=ulysses.OPERATORS)
        with sent as sent, mock.patch.multiple(ulysses, OPERATORS=operators, flops=mock.DEFAULT):
            shards = (distributed.shard(x, 2) for x in inputs)
            found = put_together(distributed.ulysses_attention(*shards, bias=own, mask=own > -1), 2)
        wanted = fa.attention(*inputs, bias=whole, mask=whole > -1)
        assert largest([found], [wanted]) < TOLERANCE
        assert sum(call.args[1].nbytes for call in sent.call_args_list) < inputs.nbytes
        assert Call(*operators.forward.call_args.args[: len(Call._fields)]).mask.shape == (1, 1, 1 if same else 64, 64)
    grads = (torch.autograd.grad(out.square().sum(), x)[0] for out, x in ((found, own), (wanted, rows)))
    assert largest([next(grads)[0]], [next(grads)[rank]]) < TOLERANCE


@on_ranks(2)
@pytest.mark.parametrize("backend", ["naive", "cpu"])
def test_rows_of_the_lowest_bias_are_means(rank, size, backend):
    for dtype, bias_dtype in ((torch.float64,) * 2, (torch.float32,) * 2, (torch.float32, torch.float64)):
        tensors, _ = Case("lowest bias", Sq=8, Sk=8, dtype=dtype).draw()
        bias = torch.randn(8, 8, dtype=bias_dtype)
        bias[[3, 5]] = torch.finfo(bias_dtype).min
        with fa.use_backend(backend):
            found = summed_gradients(by_shards("gather_attention"), tensors, dict(bias=bias))
        assert_close(found, tensors, dict(bias=bias.clamp(torch.finfo(dtype).min)))  # the lowest in `dtype`, too


@on_ranks(2)
@pytest.mark.parametrize("method", ["ring_attention", "ulysses_attention"])
def test_kernels(rank, size, method):
    for fields in ({}, dict(alibi="shared", sinks=True, key_mask="own", dropout=0.2)):
        case = Case("kernels", Hq=2, Sq=20, Sk=20, Hkv=1, causal=True, **fields)
        tensors, options = case.draw()
        with fa.use_backend("triton"):
            assert_close(summed_gradients(by_shards(method), tensors, options), tensors, options)
