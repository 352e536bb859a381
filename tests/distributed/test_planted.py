"""Mistakes that are planted in the code of several processes: what the tests compare shows them."""

import contextlib
from unittest import mock

import pytest
import torch

from fusedattn.call.form import Origin
from fusedattn.distributed import ranks, ring, whole
from fusedattn.operators import partial

from .cases import Case
from .test_methods import TOLERANCE, differences

CAUSAL = Case("causal", dict(causal=True))
CAPPED = Case("softcap", dict(causal=True, softcap=1.5))  # whose sums are kept apart from their largest score
DROPOUT = Case("dropout", dict(dropout_p=0.3, seed=5))
GROUPS = Case("one key head, 16 bits", dict(causal=True), rows=64, heads=(4, 1))


def skips_the_last_block():
    """A hop less, forward."""
    every, forward = ring._Keys.__iter__, ring._forward

    def less(keys):
        found = list(every(keys))
        return iter([*found[:-1], (found[-1][0], None)])

    def wrong(*given):
        with mock.patch.object(ring._Keys, "__iter__", less):
            return forward(*given)

    return mock.patch.object(ring, "_forward", wrong)


def natural_for_binary():
    """The log of a part's sum is taken for a natural one."""
    add = partial.add

    def wrong(rows, here, out, largest, log2_sum):
        add(rows, here, out, largest, log2_sum * partial.LN2)

    return mock.patch.object(partial, "add", wrong)


def off_by_a_shard():
    """Keys are counted from the start of the next shard."""
    band = whole.Whole.band

    def wrong(self, row, key):
        fields = band(self, row, key)
        origin = Origin(*fields["origin"])
        return fields | dict(origin=list(origin._replace(key=origin.key + key.last - key.first)))

    return mock.patch.object(whole.Whole, "band", wrong)


def shifted_by_a_row():
    """The diagonal of a part lies a row further."""
    band = whole.Whole.band

    def wrong(self, row, key):
        fields = band(self, row, key)
        origin = Origin(*fields["origin"])
        return fields | dict(origin=list(origin._replace(shift=origin.shift + 1)))

    return mock.patch.object(whole.Whole, "band", wrong)


def forgets_what_comes_back():
    """Gradients of keys that others have computed are not added."""

    def wait(back):
        if back.coming is not None:
            back.coming.wait()
            back.coming = None

    return mock.patch.object(ring._Back, "wait", wait)


PLANTED = {
    skips_the_last_block: ("ring_attention", "zigzag", CAUSAL, "out"),
    natural_for_binary: ("ring_attention", None, CAPPED, "out"),
    off_by_a_shard: ("ring_attention", "zigzag", DROPOUT, "out"),
    shifted_by_a_row: ("gather_attention", None, CAUSAL, "out"),
    forgets_what_comes_back: ("ring_attention", None, CAUSAL, "grad of key"),
}


def planted(rank, size, name):
    """The difference of what is wrong with the mistake, and without."""
    (mistake,) = (each for each in PLANTED if each.__name__ == name)
    method, balance, case, where = PLANTED[mistake]
    before = differences(rank, size, case, method, balance, None)[where]
    with mistake():
        return before, differences(rank, size, case, method, balance, None)[where]


@pytest.mark.parametrize("name", [mistake.__name__ for mistake in PLANTED])
def test_a_planted_mistake_is_seen(pools, name):
    found = pools(2).run(planted, name)
    assert all(before < TOLERANCE for before, _ in found)
    assert max(after for _, after in found) > 1e-3


def sums_in_16_bits(rank, size, rounded):
    """The mean error of the gradient of keys in bfloat16, of which ranks add up parts, rounded before or not."""
    everything = ranks.all_to_all

    def wrong(ranks_, sent, shapes):
        found = everything(ranks_, sent, shapes)
        return [x.bfloat16().to(x.dtype) if x.is_floating_point() else x for x in found]

    with mock.patch.object(ranks, "all_to_all", wrong) if rounded else contextlib.nullcontext():
        return differences(rank, size, GROUPS, "gather_attention", None, None, torch.bfloat16, mean=True)["grad of key"]


def test_a_gradient_that_is_summed_in_16_bits_is_seen(pools):
    right, wrong = (sum(pools(4).run(sums_in_16_bits, rounded)) for rounded in (False, True))
    assert wrong > 1.1 * right
