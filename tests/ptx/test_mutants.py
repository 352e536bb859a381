"""Compiled code that is broken in one place: executing calls at the edges shows each mistake."""

import functools
import random
import re

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from fusedattn.launch import run

from ..sample import matrix
from . import device
from .edges import CALLS
from .replay import recorded

# {mistake: (kernel, capability, pattern of a line of PTX, what it becomes)}
MISTAKES = {
    "a barrier left out": ("forward", 80, r"^\tbar(rier)?\.sync\s+\d+(, \d+)?;", ""),
    "a negated branch": ("decode", 80, r"@%p(\d+) bra", r"@!%p\1 bra"),
    "a proxy fence left out": ("forward", 90, r"^\tfence\.proxy\.async\.shared::cta;", ""),
    "a product not waited for": (
        *("hopper", 90, r"^\twgmma\.wait_group\.sync\.aligned\s+(\d+);"),
        lambda found: f"\twgmma.wait_group.sync.aligned {int(found[1]) + 1};",
    ),
    "an mbarrier not waited for": (
        *("hopper", 90, r"^\tmbarrier\.try_wait.*complete, .*, (%r\d+);", r"\tsetp.eq.s32 complete, \1, \1;"),
    ),
    "a bit of a swizzle": (
        *("forward", 80, r"^\txor\.b32 (.*), (\d+);"),
        lambda found: f"\txor.b32 {found[1]}, {int(found[2]) ^ 16};",
    ),
    "an address off by 16": (
        *("decode", 80, r"\[%r(\d+)\+(\d+)\]"),
        lambda found: f"[%r{found[1]}+{int(found[2]) ^ 16}]",
    ),
    "a transposed matrix": (
        *("forward", 80, r"ldmatrix\.sync\.aligned\.m8n8\.x4\.shared"),
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared",
    ),
    "a wrong lane": ("forward", 90, r"shfl\.sync\.bfly\.b32(.*), 1, 31", r"shfl.sync.bfly.b32\1, 4, 31"),
    "swapped halves": (
        *("forward", 90, r"cvt\.rn\.bf16x2\.f32 (.*), (%r\d+), (%r\d+);", r"cvt.rn.bf16x2.f32 \1, \3, \2;"),
    ),
    "the next part of a matrix": (
        *("forward", 90, r"^\tadd\.s64 (.*), 46116862(\d+);"),
        lambda found: f"\tadd.s64 {found[1]}, 46116862{int(found[2]) ^ 2};",
    ),
    "an arrival left out": ("hopper", 90, r"^\t@%p\d+ mbarrier\.arrive\.shared.*", ""),
    "a copy left out": ("decode", 80, r"^\t(@%p\d+ )?cp\.async\.(cg|ca|bulk\.tensor).*", ""),
    "copies not waited for": ("decode", 80, r"^\tcp\.async\.wait_group\s+\d+;", ""),
    "a bulk copy not waited for": ("hopper", 90, r"^\tcp\.async\.bulk\.wait_group\.read\s+0;", ""),
    "an unconditional copy": ("forward", 80, r"selp\.b32 (.*), 16, 0, (%p\d+)", r"selp.b32 \1, 16, 16, \2"),
    "stores by all": ("forward", 80, r"@%p\d+ st\.", "st."),
    "loads by all": ("decode", 80, r"@%p\d+ ld\.global", "ld.global"),
    "a sum not begun with 0": ("forward", 90, r"(wgmma\.mma_async.*), 0, 1, 1", r"\1, 1, 1, 1"),
    "< for <=": ("forward", 80, r"setp\.le\.s32", "setp.lt.s32"),
    "<= for <": ("forward", 80, r"setp\.lt\.s32", "setp.le.s32"),
    ">= for >": ("forward", 80, r"setp\.gt\.s32", "setp.ge.s32"),
    "an unsigned shift": ("forward", 80, r"\tshr\.s32", "\tshr.u32"),
}
FIRST, *REST = (pytest.param(*each, id=name.replace(" ", "_")) for name, each in MISTAKES.items())


@functools.cache
def replays(kernel, capability, number):
    """Return the launches of a kernel in one of its CALLS."""
    name = "decode" if kernel == "decode" else run.KERNELS[kernel].__name__
    return recorded(CALLS[kernel][number], capability, name)


def shown(kernel, capability, change, calls=None):
    """Return what shows that a change of a kernel's PTX is wrong, by the first call that does; or None."""
    original = replays(kernel, capability, 0)[0].ptx
    broken = change(original)
    try:
        for number in range(calls or len(CALLS[kernel])):
            for replay in replays(kernel, capability, number):
                if replay.ptx == original and (why := replay.again(broken)) is not None:
                    return f"call {number}: {why}"
        return None
    finally:
        device.forget(broken)


@pytest.mark.parametrize("kernel, capability, pattern, becomes", [FIRST, *matrix(*REST)])
def test_a_planted_mistake_is_seen(kernel, capability, pattern, becomes):
    def planted(ptx):
        lines = ptx.split("\n")
        places = [i for i, line in enumerate(lines) if line.startswith(("\t", "@")) and re.search(pattern, line)]
        (at,) = random.Random(0).sample(places, 1)
        return "\n".join([*lines[:at], re.sub(pattern, becomes, lines[at]), *lines[at + 1 :]])

    assert shown(kernel, capability, planted)


@pytest.mark.parametrize("kernel, capability", [pytest.param("decode", 80), *matrix(pytest.param("hopper", 90))])
def test_the_original_is_not_taken_for_a_mistake(kernel, capability):
    assert shown(kernel, capability, lambda ptx: ptx + "\n// the same", calls=3) is None
