"""Every method on 2 and 4 processes equals one process: results and all gradients, float64 to 1e-11."""

import pytest
import torch

from .cases import Case, whole_and_shard

TOLERANCE = 1e-11

SLIDING = dict(window=(6, 3))
COMMON = (  # what every method takes
    Case("full"),
    Case("causal", dict(causal=True)),
    Case("window", SLIDING),
    Case("causal window", dict(causal=True, window=(9, None))),
    Case("a window of one key", dict(window=(0, 0))),
    Case("more rows than keys", dict(causal=True), rows=41, keys=23),
    Case("more keys than rows", dict(causal=True), rows=23, keys=41),
    Case("fewer rows than chunks", dict(causal=True), rows=3),
    Case("divisible", dict(causal=True), rows=32),
    Case("key mask", dict(causal=True), ("key_mask",)),
    Case("softcap", dict(causal=True, softcap=1.5)),
    Case("scale", dict(scale=-0.3)),
    Case("slopes", dict(causal=True), ("alibi_slopes",)),
    Case("slopes of each batch", SLIDING, ("own_slopes",)),
    Case("sinks", dict(causal=True), ("sinks",)),
    Case("dropout", dict(dropout_p=0.3, seed=5)),
    Case("dropout, causal", dict(dropout_p=0.3, seed=2**40 + 5, causal=True)),
    Case("as many key heads", dict(causal=True), heads=(4, 4)),
    Case("one key head", dict(causal=True), heads=(4, 1)),
    Case("all at once", dict(causal=True, dropout_p=0.2, seed=3, softcap=2.0), ("key_mask", "alibi_slopes", "sinks")),
)
PAIRS = (  # what needs all keys
    Case("mask", {}, ("mask",)),
    Case("mask of heads", dict(causal=True), ("head_mask",)),
    Case("bias", dict(causal=True), ("bias",)),
    Case("bias that heads share", {}, ("shared_bias",)),
    Case("query mask", dict(causal=True), ("query_mask", "key_mask")),
    Case("top left", dict(causal=True, align="top_left"), rows=41, keys=23),
    Case(
        "everything", dict(window=(20, 5), dropout_p=0.2, seed=3), ("mask", "bias", "key_mask", "query_mask", "sinks")
    ),
)
HEADS = (  # key heads that do not divide as query heads do
    Case("six heads, three key heads", dict(causal=True), heads=(12, 3)),
    Case("twelve heads, six key heads", dict(causal=True), ("bias",), heads=(12, 6)),
)
PLANS = [("ring_attention", balance, COMMON) for balance in (None, "zigzag")]
PLANS += [("gather_attention", balance, COMMON + PAIRS) for balance in (None, "zigzag")]
PLANS += [("ulysses_attention", None, COMMON + PAIRS + HEADS)]


def differences(rank, size, case, method, balance, backend, dtype=torch.float64, mean=False):
    """{name: the largest difference}, or the mean, of the rank's rows; of the whole gradient of what ranks share."""
    wanted, found, _ = whole_and_shard(case, method, dtype, balance, backend=backend)
    assert wanted.keys() == found.keys()
    different = {}
    for name, want in wanted.items():
        have = found[name]
        assert have.dtype == want.dtype and have.shape == want.shape, name
        same = (have == want) | (have.isnan() & want.isnan())
        error = torch.where(same, 0.0, (have.double() - want).abs())
        different[name] = float(error.mean() if mean else error.max()) if want.numel() else 0.0
    return different


def all_differences(rank, size, cases, method, balance, backend=None):
    return {case.name: differences(rank, size, case, method, balance, backend) for case in cases}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method, balance, cases", PLANS, ids=lambda x: x if isinstance(x, str) else "")
def test_methods_equal_one_process(pools, size, method, balance, cases):
    for found in pools(size).run(all_differences, cases, method, balance):
        wrong = {
            (case, name): difference
            for case, every in found.items()
            for name, difference in every.items()
            if not difference < TOLERANCE
        }
        assert not wrong
