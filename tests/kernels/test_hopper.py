"""Tests of the schedules and scratch of Hopper's kernels. `tests/ptx` executes the kernels themselves."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

import triton
import triton.language as tl
from fusedattn.kernels.hopper import schedule

from ..inside import call_of

hopper = pytest.importorskip("fusedattn.launch.hopper_backward", reason="needs Gluon", exc_type=ImportError)


@triton.jit
def _deal(taken, lengths, blocks, planes, section, paired, before):
    order = schedule.Schedule(blocks, planes, section, paired)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for n in range(schedule.share(order, program, programs)):
        first, plane = schedule.take(order, n, program, programs, 2, BLOCK=10, first_plane=before)
        tl.atomic_add(taken + plane.index * blocks + first // 10, 1)
        tl.atomic_add(lengths + program * planes * blocks + (n >> paired), first // 10 + 1)


@pytest.mark.parametrize("paired", [0, 1])
def test_each_block_of_rows_is_taken_once(paired, device):
    for blocks, planes, section, programs in itertools.product((1, 5), (1, 2, 7), (1, 3), (1, 4, 35)):
        if paired and planes % 2:
            continue
        taken, before = torch.zeros(9 + planes, blocks, dtype=torch.int32, device=device), programs % 3
        lengths = torch.zeros(programs, planes * blocks, dtype=torch.int32, device=device)
        _deal[(programs,)](taken, lengths, blocks, planes, min(section, planes), paired, before)
        assert taken[before : before + planes].eq(1).all(), (blocks, planes, section, programs)
        assert taken.sum() == planes * blocks
        if paired:
            assert lengths[lengths > 0].eq(blocks + 1).all(), "pairs have equal lengths"
        else:
            assert lengths.count_nonzero(1).diff().abs().le(1).all(), "programs have equally many blocks, or one more"


def test_gradients_of_scores_are_stored_for_a_few_heads_at_a_time(tiles):
    """Score gradients are stored for as many heads as fit a memory limit, but for at least two if there are two."""
    query, key = (torch.empty(9, n, 128, 136, dtype=torch.bfloat16, device="meta") for n in (1, 1))
    for room, some in ((100, 9), (9, 9), (8, 8), (3, 3), (1, 2)):
        tiles("SCORES_BYTES", room * 128 * 128 * 2)
        call = call_of(query, key, key)
        assert hopper.heads_at_a_time(call) == some and hopper.new_scores(call)[0].shape == (some, 1, 128, 128)
    assert hopper.heads_at_a_time(call_of(query[:1], key[:1], key[:1])) == 1
    tiles("SCORES_BYTES", 128 * 128 * 2 * 5)
    wide = call_of(*(torch.empty(9, 1, 128, 320, dtype=torch.bfloat16, device="meta") for _ in range(3)))
    assert [x.shape[0] for x in hopper.new_scores(wide)] == [2, 2], "weights take as much"
