"""Tests of the emulator by kernels of a few lines: results of right kernels, and reports on wrong kernels."""

import numpy as np
import pytest
import torch

from .handwritten import FOUR, ROW, execute, line_of
from .report import Fault
from .tensor_cores import MEASURED

COUNT = torch.arange(64, dtype=torch.int32)


def words(n=64):
    return torch.zeros(n, dtype=torch.int32)


# Code that half of the first warp skips, or all of it.
HALF = "setp.lt.u32 %p0, %t, 16; @%p0 bra over;\n{} // here\nover:"
WARP = HALF.replace("16", "32")
FAULTS = {
    "a load out of bounds": ("ld.global.b32 %r0, [%x_mine+4]; // here", "in no tensor"),
    "a store out of bounds": ("st.global.b32 [%x_mine+-4], %t; // here", "in no tensor"),
    "a misaligned load": ("ld.global.b32 %r0, [%x_mine+2]; // here", "misaligned global access of 4 bytes"),
    "a misaligned vector": ("ld.global.v2.b32 {%r0, %r1}, [%x_mine]; // here", "misaligned global access of 8 bytes"),
    "a shared load out of bounds": ("ld.shared.b32 %r0, [%mine+1024]; // here", "of 1024 bytes"),
    "a shared store out of bounds": ("st.shared.b32 [%mine+-4], %t; // here", "of 1024 bytes"),
    "a misaligned shared load": ("ld.shared.b32 %r0, [%mine+2]; // here", "misaligned shared access of 4 bytes"),
    "a barrier in part of a warp": (HALF.format("bar.sync 0;"), "of 32 lanes"),
    "a shuffle in part of a warp": (HALF.format("shfl.sync.bfly.b32 %r0, %t, 1, 31, -1;"), "of 32 lanes"),
    "a matrix in part of a warp": (HALF.format("ldmatrix.sync.aligned.m8n8.x1.b16 {%r0}, [%smem];"), "of 32 lanes"),
    "a barrier that a warp never reaches": (WARP.format("bar.sync 0;"), "32 threads wait at barrier 0"),
    "a barrier for fewer threads": ("bar.sync 1, 32; // here", "barrier 1 has 64 threads, of 32"),
    "lanes that redux does not name": ("redux.sync.add.s32 %r0, %t, 15; // here", "not the named lanes"),
    "an index past a table": ("brx.idx %t, all; // here\nall: .branchtargets over, over;\nover:", "past the table"),
    "an mbarrier that is none": ("mbarrier.arrive.shared.b64 _, [%smem], 1; // here", "no mbarrier"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_its_line(name):
    body, message = FAULTS[name]
    with pytest.raises(Fault, match=message) as caught:
        execute(body, x=words())
    assert f"line {line_of(body)}" in str(caught.value)


def test_a_loop_without_an_end_is_a_fault():
    with pytest.raises(Fault, match="has not ended"):
        execute("loop:\nbra loop;")


STORE, LOAD, AGAIN = "st.shared.b32 [%mine], %t;", "ld.shared.b32 %r1, [%r0];", "st.shared.b32 [%mine], %r1;"
OTHER = "xor.b32 %r0, %mine, 128;"  # the address of a word of the other warp
NEIGHBOUR = "xor.b32 %r0, %mine, 4;"  # the address of another word of the same warp
BLOCK = "mov.u32 %r2, %ctaid.x; setp.eq.u32 %p0, %r2, 0;"
OWN = "mul.wide.u32 %d0, %r2, 256; add.u64 %d0, %d0, %out_mine;"
ROUNDED = "cvt.rn.f32.u32 %f0, %t; fma.rn.f32 %f0, %f0, {}, 0f3F800000; st.shared.b32 [%smem], %f0;"
COPY = "cp.async.ca.shared.global [%mine], [%x_mine], 4; cp.async.commit_group;"
WAIT = "cp.async.wait_group {};"
ONE_WARP, TWO_BLOCKS, FRESH = dict(threads=32), dict(ctas=2), dict(fresh=["out"])
# name: (body, options of `execute`)
RIGHT = {
    "a load behind a barrier": (f"{STORE} bar.sync 0; {OTHER} {LOAD}", {}),
    "a load of the warp's own": (f"{STORE} {NEIGHBOUR} {LOAD}", {}),
    "a store behind a load and a barrier": (f"{STORE} bar.sync 0; {OTHER} {LOAD} bar.sync 0; {AGAIN}", {}),
    "a store of what is there": (f"{STORE} bar.sync 0; {OTHER} {LOAD} {STORE}", {}),
    "NaNs of two signs at one place": (
        "setp.lt.u32 %p0, %t, 3; selp.b32 %r0, 0x7FC00000, 0xFFC00000, %p0; st.shared.b32 [%smem], %r0;",
        ONE_WARP,
    ),
    "half NaNs of two signs at one place": (
        "setp.lt.u32 %p0, %t, 3; selp.b32 %r0, 0x7E01, 0xFE00, %p0; st.shared.b16 [%smem], %r0;",
        ONE_WARP,
    ),
    "the same number at one place of a tensor": ("mov.u32 %r0, 7; st.global.b32 [%out], %r0;", {}),
    "blocks that store at their own places": (f"{BLOCK} {OWN} st.global.b32 [%d0], %t;", TWO_BLOCKS),
    "a load of what was stored": ("st.global.b32 [%out_mine], %t; ld.global.b32 %r0, [%out_mine];", FRESH),
    "a copy behind a wait and a barrier": (f"{COPY} {WAIT.format(0)} bar.sync 0; {OTHER} {LOAD}", {}),
}
WRONG = {  # reported kind: {name: (body, options of `execute`)}; reported at the marked line
    "race": {
        "a load": (f"{STORE} {OTHER}\n{LOAD} // here", {}),
        "a store behind a load": (f"{STORE} bar.sync 0; {OTHER} {LOAD}\n{AGAIN} // here", {}),
        "a store over another warp's": (f"{STORE} {OTHER}\nst.shared.b32 [%r0], %t; // here", {}),
        "a copy behind a wait alone": (f"{COPY} {WAIT.format(0)} {OTHER}\n{LOAD} // here", {}),
        "a copy behind a barrier and a wait": (f"{COPY} bar.sync 0; {WAIT.format(0)} {OTHER}\n{LOAD} // here", {}),
    },
    "async": {
        "a store over a copy on its way": (f"{COPY}\n{STORE} // here\n{WAIT.format(0)}", {}),
        "the end of a block before a copy's": (f"\n{COPY} // here", {}),
        "a wait for too few": (f"\n{COPY} // here\n{WAIT.format(1)}", {}),
    },
    "lanes differ": {
        "two numbers at one place": ("st.shared.b32 [%smem], %t; // here", ONE_WARP),
        "numbers that differ by rounding": (ROUNDED.format("0f34000000") + " // here", ONE_WARP),
        "halves that differ by rounding": ("add.u32 %r0, %t, 0x3C00; st.shared.b16 [%smem], %r0; // here", ONE_WARP),
        "two numbers at one place of a tensor": ("st.global.b32 [%out], %t; // here", {}),
    },
    "race between CTAs": {
        "two stores": ("st.global.b32 [%out_mine], %t; // here", TWO_BLOCKS),
        "a load of what another stored": (
            f"{BLOCK} @%p0 st.global.b32 [%out_mine], %t;\nld.global.b32 %r1, [%out_mine]; // here",
            TWO_BLOCKS,
        ),
    },
    "uninitialised": {
        "a load": ("ld.global.b32 %r0, [%out_mine]; // here", FRESH),
        "an addition": ("red.global.gpu.relaxed.add.u32 [%out_mine], %t; // here", FRESH),
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_reported_of_what_is_right(name):
    body, launch = RIGHT[name]
    assert not str(execute(body, x=COUNT, out=words(128), **launch))


@pytest.mark.parametrize("kind, name", [(kind, name) for kind, rows in WRONG.items() for name in rows])
def test_a_hazard_is_reported_at_its_line(kind, name):
    body, launch = WRONG[kind][name]
    report = execute(body, x=COUNT + 1, out=words(128), **launch)
    assert {kind: list(lines) for kind, lines in report.found.items()} == {kind: [line_of(body)]}
    assert report.count(kind) >= 1 and kind in str(report)


# Of two copies, each a group, `there` have arrived when the kernel reads them.
@pytest.mark.parametrize("wait, there", [("", 0), (WAIT.format(2), 0), (WAIT.format(1), 1), (WAIT.format(0), 2)])
def test_a_copy_is_there_when_its_group_was_waited_for(wait, there):
    copies = COPY + COPY.replace("mine", "mine+256").replace("%x_mine+256", "%x_mine")
    out = words(128)
    load = "ld.shared.b32 {0}, [%mine+{1}]; st.global.b32 [%out_mine+{1}], {0};"
    execute(f"{copies} {wait} {load.format('%r1', 0)} {load.format('%r2', 256)} {WAIT.format(0)}", x=COUNT, out=out)
    assert out.view(2, 64).tolist() == [COUNT.tolist() if i < there else [-1] * 64 for i in range(2)]


# The registers of a lane (group g, member m) by the PTX manual: of A and C (row, column), of B (column, row).
g, m = np.divmod(np.arange(32)[:, None], 4)
PAIRS, FOURS, TWOS = np.arange(8), np.arange(4), np.arange(2)
OF_16 = (
    (g + PAIRS // 2 % 2 * 8, m * 2 + PAIRS % 2 + PAIRS // 4 * 8),
    (g + FOURS * 0, m * 2 + FOURS % 2 + FOURS // 2 * 8),
)
OF_32 = ((g + FOURS % 2 * 8, m + FOURS // 2 * 4), (g + TWOS * 0, m + TWOS * 4))
SUMS = g + FOURS // 2 * 8, m * 2 + FOURS % 2
KINDS = {
    "m16n8k16.row.col.f32.bf16.bf16.f32": (torch.bfloat16, 16, OF_16),
    "m16n8k16.row.col.f32.f16.f16.f32": (torch.float16, 16, OF_16),
    "m16n8k8.row.col.f32.tf32.tf32.f32": (torch.float32, 8, OF_32),
}


def product_of_a_warp(kind, a, b, c, **options):
    """Return the registers of c + a @ transposed b, computed by mma.sync."""
    _, _, (of_a, of_b) = KINDS[kind]
    body = f"{ROW} ld.global.v4.b32 {FOUR}, [%d1]; shr.u64 %d0, %d0, 1; add.u64 %d3, %y, %d0;"
    body += "ld.global.v2.b32 {%r5, %r6}, [%d3]; add.u64 %d0, %d0, %d0; add.u64 %d4, %z, %d0;"
    body += "ld.global.v4.b32 {%f0, %f1, %f2, %f3}, [%d4];"
    body += f"mma.sync.aligned.{kind} {{%f0, %f1, %f2, %f3}}, {FOUR}, {{%r5, %r6}}, {{%f0, %f1, %f2, %f3}};"
    out = torch.zeros(32, 4)
    tensors = dict(x=a[of_a].contiguous(), y=b[of_b].contiguous(), z=c[SUMS].contiguous(), out=out)
    execute(body + "st.global.v4.b32 [%d2], {%f0, %f1, %f2, %f3};", threads=32, **tensors, **options)
    return out


@pytest.mark.parametrize("tensor_core", [None, MEASURED[80]], ids=["rounded", "truncated"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_of_a_warp(kind, tensor_core):
    dtype, k, _ = KINDS[kind]
    a, b, c = torch.randn(16, k).to(dtype), torch.randn(8, k).to(dtype), torch.randn(16, 8)
    out = product_of_a_warp(kind, a, b, c, tensor_core=tensor_core)
    a, b = ((x.view(torch.int32) & ~0x1FFF).view(torch.float32) if dtype is torch.float32 else x for x in (a, b))
    torch.testing.assert_close(out, (c.double() + a.double() @ b.double().T).float()[SUMS], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("body", ["ld.global.b32 %r1, [%x_mine];", "st.global.b32 [%x_mine], %t;"], ids=["ld", "st"])
def test_bytes_of_no_element_are_reported(body):
    tensor = torch.zeros(8, 8, dtype=torch.int32)
    assert not execute(body, x=tensor).found
    assert execute(body, x=tensor[:, :7]).count("astray") == 8
