"""Tests of instructions that are new in sm_90, in small kernels: wgmma, mbarriers and TMA copies."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from .handwritten import FOUR, ROW, execute, line_of
from .memory import TensorMap
from .report import Fault
from .shared import SMEM_BASE


def edited(body, text, becomes):
    assert text in body
    return body.replace(text, becomes)


def permuted(row, byte, span):
    """Return the swizzled address of a byte in a row of `span` bytes; 16-byte groups swap within 128-byte lines."""
    return row * span + (byte // 16 ^ row * span // 128 % (span // 16)) * 16 + byte % 16


# Products of 64 rows of A and 64 columns of B, with 32 bytes of k. Each matrix has 8 KB of shared memory.

MODES = {16: 0, 128: 1, 64: 2, 32: 3}
COLUMNS, MATRIX = 64, 8192


def matrix(x, base, span, across):
    """Return (bytes of shared memory, wgmma descriptor) of a matrix (64, k), contiguous along k or across the rows."""
    size = x.itemsize
    r, k = np.indices(x.shape)
    if span == 16:
        lead, stride, first = 1024, 128, 0
        place = (k % 8 * 16 + r % 8 * size) if across else (r % 8 * 16 + k * size % 16)
        place += r // 8 * stride + k * size // 16 * lead
    elif across:
        lead, stride, first = 16 * span, 8 * span, 0
        wide = span // size
        place = permuted(k % 8, r % wide * size, span) + r // wide * lead + k // 8 * stride
    else:
        lead, stride, first = 16, 8 * span, span - 32  # the last 32 bytes of each row
        place = permuted(r % 8, first + k * size, span) + r // 8 * stride
    raw = np.zeros(MATRIX, np.uint8)
    raw[place[..., None] + np.arange(size)] = x.contiguous().view(torch.uint8).numpy().reshape(*x.shape, size)
    return raw, (SMEM_BASE + base + first) >> 4 | lead >> 4 << 16 | stride >> 4 << 32 | MODES[span] << 62


SUMS = "{" + ", ".join(f"%f{i}" for i in range(32)) + "}"
STAGE = "".join(
    f"ld.global.v4.b32 {FOUR}, [%d1+{i}]; st.shared.v4.b32 [%r0+{i}], {FOUR};" for i in range(0, 2 * MATRIX, 2048)
)
PRODUCT = f"""{ROW} {STAGE} ld.global.b32 %r20, [%y_mine]; ld.global.b32 %r21, [%y_mine+512];
ld.global.b32 %r22, [%y_mine+1024]; ld.global.b32 %r23, [%y_mine+1536]; mov.u64 %d3, A; mov.u64 %d4, B;
fence.proxy.async.shared::cta;
bar.sync 0;
{"".join(f"mov.b32 %f{i}, 0f3F800000;" for i in range(32))}
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {SUMS}, LEFT, %d4, 1, 1, 1FLIPS; // product
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %d0, %t, 128; add.u64 %d2, %out, %d0;
{"".join(f"st.global.v4.b32 [%d2+{4 * i}], {{%f{i}, %f{i + 1}, %f{i + 2}, %f{i + 3}}};" for i in range(0, 32, 4))}"""
# (row, k) of A and (row, column) of the sums in each thread's registers, by the PTX manual.
warp, g, m = np.arange(128)[:, None] // 32 * 16, np.arange(128)[:, None] // 4 % 8, np.arange(128)[:, None] % 4
i, n = np.arange(8), np.arange(32)
OF_A = warp + g + i // 2 % 2 * 8, m * 2 + i % 2 + i // 4 * 8
OF_SUMS = warp + g + n // 2 % 2 * 8, m * 2 + n % 2 + n // 4 * 8


def product(span=128, left="registers", across=False, change=lambda body: body, draw=torch.randn, **options):
    """Return (Report, result, expected result) of the wgmma product 1 + a @ b; `change` may edit the kernel's text."""
    a, b = draw(64, 16).bfloat16(), draw(COLUMNS, 16).bfloat16()
    of_a, at_a = matrix(a, 0, span, left == "across")
    of_b, at_b = matrix(b, MATRIX, span, across)
    flips = f", {int(across)}" if left == "registers" else f", {int(left == 'across')}, {int(across)}"
    body = PRODUCT.replace("A;", f"{at_a};").replace("B;", f"{at_b};").replace("FLIPS", flips)
    body = body.replace("LEFT", "{%r20, %r21, %r22, %r23}" if left == "registers" else "%d3")
    registers = a[OF_A].contiguous().view(torch.int32).T.contiguous()
    out, x = torch.zeros(128, 32), torch.from_numpy(np.concatenate((of_a, of_b)))
    report = execute(change(body), threads=128, smem=2 * MATRIX, x=x, y=registers, out=out, **options)
    return report, out, (1 + a.double() @ b.double().T).float()[OF_SUMS]


@pytest.mark.parametrize("across", [False, True], ids=["B along k", "B across"])
@pytest.mark.parametrize("left", ["registers", "shared", "across"])
@pytest.mark.parametrize("span", MODES)
def test_a_product_of_a_warpgroup(span, left, across):
    report, out, want = product(span=span, left=left, across=across)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert not str(report)


WAIT = "wgmma.wait_group.sync.aligned 0;"
FIRST = "setp.eq.u32 %p0, %t, 0; @%p0"
HAZARDS = {  # name: (reported kind, text of the kernel, its replacement, mark of the reported line)
    "no proxy fence": ("async", "fence.proxy.async.shared::cta;", "", "// product"),
    "no barrier": ("race", "bar.sync 0;", "", "// product"),
    "no wait": ("async", WAIT, "", "// product"),
    "a wait for too few": ("async", WAIT, "wgmma.wait_group.sync.aligned 1;", "// product"),
    "B written before the wait": ("async", WAIT, f"{FIRST} st.shared.b32 [%smem+8288], %t; // here\n{WAIT}", "// here"),
    "A written before the wait": ("async", WAIT, f"mov.b32 %r20, %t; {WAIT}", "// product"),
    "a sum written before the wait": ("async", WAIT, f"mov.b32 %f3, %t; {WAIT} // here\n", "// here"),
    "B written by a warp that has not seen the others wait": (
        "race",
        WAIT,
        f"bar.sync 0;\n{WAIT} {FIRST} st.shared.b32 [%smem+8288], %t; // here\n",
        "// here",
    ),
    "no wgmma.fence": ("unfenced", "wgmma.fence.sync.aligned;", "", "// product"),
}


@pytest.mark.parametrize("name", HAZARDS)
def test_a_hazard_of_a_product_is_reported(name):
    kind, old, new, mark = HAZARDS[name]
    bodies = []

    def change(body):
        bodies.append(edited(body, old, new))
        return bodies[0]

    report, *_ = product(change=change)
    assert line_of(bodies[0], mark) in report.found[kind]


@pytest.mark.parametrize("wait, right", [(WAIT, True), (WAIT.replace("0", "1"), False), ("", False)])
def test_sums_are_there_when_they_were_waited_for(wait, right):
    _, out, want = product(change=lambda body: body.replace(WAIT, wait))
    assert torch.allclose(out, want, rtol=1e-5, atol=1e-5) if right else out.isnan().all()


PRODUCT_FAULTS = {
    "part of a warpgroup": ("wgmma.mma", "setp.ge.u32 %p0, %t, 64; @%p0 bra over;\nwgmma.mma", "of 128 lanes"),
    "lanes that differ": ("wgmma.fence", "cvt.u64.u32 %d4, %t; wgmma.fence", "different descriptors"),
    "a matrix out of bounds": ("wgmma.fence", "mov.u64 %d4, 1073741824; wgmma.fence", "shared access"),
}


@pytest.mark.parametrize("name", PRODUCT_FAULTS)
def test_a_faulty_product_is_a_fault(name):
    old, new, message = PRODUCT_FAULTS[name]
    with pytest.raises(Fault, match=message):
        product(change=lambda body: body.replace(old, new) + "\nover:")


# mbarriers: warp 0 stores a word for each lane, and another one when warp 1 has loaded the first.

INIT = "setp.eq.u32 %p0, %t, 0; @%p0 mbarrier.init.shared::cta.b64 [%smem], {0}; "
INIT += "@%p0 mbarrier.init.shared::cta.b64 [%smem+8], {0}; fence.proxy.async.shared::cta; bar.sync 0;"
FULL, EMPTY = "mbarrier.arrive.shared::cta.b64 _, [%smem];", "mbarrier.arrive.shared::cta.b64 _, [%smem+8];"
TRY = "{0}:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [%smem{1}], {2};\n@!%p1 bra {0};"
HANDED_OVER = f"""{INIT.format(32)} and.b32 %r1, %t, 31; shl.b32 %r1, %r1, 2; add.u32 %r1, %r1, %smem;
setp.ge.u32 %p2, %t, 32; @%p2 bra second;
st.shared.b32 [%r1+64], %t; {FULL}
{TRY.format("emptied", "+8", 0)}
add.u32 %r2, %t, 100; st.shared.b32 [%r1+64], %r2; {FULL} bra over;
second:
{TRY.format("filled", "", 0)}
ld.shared.b32 %r3, [%r1+64]; st.global.b32 [%out_mine+-128], %r3; {EMPTY}
{TRY.format("again", "", 1)}
ld.shared.b32 %r4, [%r1+64]; st.global.b32 [%out_mine], %r4;
over:"""


def handed_over(old="", new=""):
    """Return (Report, words that the second warp loaded) of the mbarrier kernel, with `old` replaced by `new`."""
    out = torch.zeros(64, dtype=torch.int32)
    return execute(edited(HANDED_OVER, old, new), out=out), out


def test_phases_of_an_mbarrier_hand_over():
    report, out = handed_over()
    assert not str(report) and out.tolist() == [*range(32), *range(100, 132)]


HANDOVERS = {  # name: (text of the kernel, its replacement, message)
    "no wait for empty": (TRY.format("emptied", "+8", 0), "", "deadlock: 32 .* an mbarrier"),
    "emptied in the other phase": (", [%smem+8], 0;", ", [%smem+8], 1;", "deadlock: 32 .* an mbarrier"),
    "filled in the other phase": (", [%smem], 0;", ", [%smem], 1;", "deadlock: 32 .*; 32 .* an mbarrier"),
    "filled again, in the other phase": (", [%smem], 1;", ", [%smem], 0;", "deadlock: 32 .* an mbarrier"),
    "no wait for full": (TRY.format("again", "", 1), "", "race"),
    "no arrival at empty": (f"{EMPTY}\n", "\n", "deadlock: 32 .* an mbarrier"),
    "one thread too few": (INIT.format(32), INIT.format(33), "deadlock: 32 .*; 32 .* an mbarrier"),
    "one thread too many": (f"{FULL} bra", f"{FULL.replace(';', ', 33;')} bra", "more arrive"),
    "no barrier behind the initialisation": (" bar.sync 0;", "", "race.* uses the mbarrier"),
    "no initialisation": (INIT.format(32), "", "no mbarrier"),
    "another address": (", [%smem], 0;", ", [%smem+16], 0;", "no mbarrier"),
    "an mbarrier that was invalidated": ("second:", "second: mbarrier.inval.shared::cta.b64 [%smem];", "no mbarrier"),
}


@pytest.mark.parametrize("name", HANDOVERS)
def test_a_handover_that_is_wrong_is_a_fault_or_a_race(name):
    old, new, message = HANDOVERS[name]
    try:
        said = str(handed_over(old, new)[0])
    except Fault as fault:
        said = str(fault)
    assert re.search(message, said)


PASSED_BY = f"""{INIT.format(1)} setp.lt.u32 %p2, %t, 256; @%p2 bra first;
{TRY.format("filled", "", 0)}
bra over;
first: @%p0 {FULL}
second: @%p0 {FULL}
over:"""


def test_a_phase_that_ends_before_a_warp_waits_for_it_is_found_by_another_order():
    execute(PASSED_BY, threads=384)
    with pytest.raises(Fault, match="deadlock: 128 threads wait at an mbarrier"):
        for seed in range(20):
            execute(PASSED_BY, threads=384, order=np.random.default_rng(seed))


# TMA boxes of 1 KB. The rows of the tensor are longer than the descriptor says.

HEIGHT, WIDTH, PITCH, UINT16 = 40, 72, 80, 1
LARGE = (HEIGHT * PITCH,) * 2  # strides of dimensions of one element
IN = "cp.async.bulk.tensor.4d.shared::cta.global.mbarrier::complete_tx::bytes"
PLACE = "[%box, {%r5, %r6, 0, 0}]"
BOX_IN = f"""{INIT.format(1)} {ROW} mov.b32 %r5, 0; mov.b32 %r6, 0;
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem], 1024;
@%p0 {IN} [%smem+1024], {PLACE}, [%smem]; // copy
{TRY.format("filled", "", 0)}
ld.shared.v4.b32 {FOUR}, [%r0+1024]; // load
st.global.v4.b32 [%d2], {FOUR};"""
BOX_OUT = f"""{ROW} mov.b32 %r5, 0; mov.b32 %r6, 0; setp.eq.u32 %p0, %t, 0;
ld.global.v4.b32 {FOUR}, [%d1]; st.shared.v4.b32 [%r0+1024], {FOUR};
fence.proxy.async.shared::cta;
bar.sync 0;
@%p0 cp.async.bulk.tensor.4d.global.shared::cta.bulk_group {PLACE}, [%smem+1024]; // copy
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
bar.sync 0;
st.shared.v4.b32 [%r0+1024], {{%t, %t, %t, %t}}; // store"""


def tensor_map(x):
    """Return a TMA descriptor of the first WIDTH of the PITCH elements in each row of x, with boxes of 1 KB."""
    block, shape, strides, swizzle = (1, 1, 8, 64), (1, 1, HEIGHT, WIDTH), (*LARGE, PITCH, 1), 3
    return SimpleNamespace(what=TensorMap(x.data_ptr(), swizzle, x.itemsize, UINT16, block, shape, strides, 0))


SEVENS = "mov.b32 %r7, 7; st.shared.v4.b32 [%r0+1024], {%r7, %r7, %r7, %r7}; bar.sync 0;"


def test_a_box_that_nobody_waited_for_is_poison():
    x, out = torch.ones(HEIGHT, PITCH, dtype=torch.int16), torch.zeros(512, dtype=torch.int16)
    body = edited(BOX_IN, TRY.format("filled", "", 0), "").replace("mov.b32 %r5", f"{SEVENS} mov.b32 %r5")
    execute(body, smem=2048, x=x, out=out, box=tensor_map(x))
    assert (out == -1).all()


FENCE, WARP_0 = "fence.proxy.async.shared::cta;", "setp.ge.u32 %p1, %t, 32; @%p1 bra after;\n{}\nafter:"
AGAIN = f"@%p0 {IN} [%smem+1024], {PLACE}, [%smem]; // here"
BOX_HAZARDS = {  # name: (kernel, text, its replacement, reported kind, mark of the reported line)
    "no wait for a load": (BOX_IN, TRY.format("filled", "", 0), "", "race", "// load"),
    "nobody waits for a load": (BOX_IN, TRY.format("filled", "", 0), "", "async", "// copy"),
    "no fence of an mbarrier": (BOX_IN, FENCE, "", "unfenced mbarrier", "// copy"),
    "a load over what is read": (BOX_IN, "// load", f"\n{AGAIN}", "race", "// here"),
    "no proxy fence": (BOX_OUT, FENCE, "", "async", "// copy"),
    "a fence by one of two writers": (BOX_OUT, FENCE, WARP_0.format(FENCE), "async", "// copy"),
    "no barrier": (BOX_OUT, f"{FENCE}\nbar.sync 0;", "", "race", "// copy"),
    "no wait for a store": (BOX_OUT, "cp.async.bulk.wait_group.read 0;", "", "async", "// store"),
    "a wait for too few": (BOX_OUT, "wait_group.read 0;", "wait_group.read 1;", "async", "// store"),
    "a store that is not committed": (BOX_OUT, "cp.async.bulk.commit_group;", "", "async", "// copy"),
    "no barrier behind the wait": (BOX_OUT, ".read 0;\nbar.sync 0;", ".read 0;", "race", "// store"),
    "two blocks store one box": (BOX_OUT, "", "", "race between CTAs", "// copy"),
}


@pytest.mark.parametrize("name", BOX_HAZARDS)
def test_a_hazard_of_a_box_is_reported(name):
    kernel, old, new, kind, mark = BOX_HAZARDS[name]
    x = torch.arange(HEIGHT * PITCH, dtype=torch.int16).view(HEIGHT, PITCH)
    out = torch.zeros(HEIGHT, PITCH, dtype=torch.int16)
    body = edited(kernel, old, new)
    box = tensor_map(x if kernel is BOX_IN else out)
    report = execute(body, smem=2048, ctas=1 + ("blocks" in name), x=x, out=out, box=box)
    assert line_of(body, mark) in report.found[kind]


BOX_FAULTS = {
    "more bytes than come": (", 1024;", ", 1040;", {}, "deadlock"),
    "fewer bytes than come": (", 1024;", ", 1008;", {}, "deadlock"),
    "a barrier at which all arrive": ("@%p0 mbarrier.arrive", "mbarrier.arrive", {}, "more arrive"),
    "a box that is not aligned": ("[%smem+1024]", "[%smem+1040]", {}, "not a multiple of 128"),
    "a box out of bounds": ("[%smem+1024]", "[%smem+1152]", {}, "shared access"),
    "a tensor that is not aligned": ("", "", dict(base=8), "refuses this descriptor"),
    "a row that is not aligned": ("", "", dict(strides=(*LARGE, PITCH + 1, 1)), "refuses this descriptor"),
    "a box wider than its swizzle": ("", "", dict(block=(1, 1, 4, 128)), "refuses this box"),
}


@pytest.mark.parametrize("name", BOX_FAULTS)
def test_a_box_that_cannot_be_copied_is_a_fault(name):
    old, new, fields, message = BOX_FAULTS[name]
    x, out = torch.zeros(HEIGHT, PITCH, dtype=torch.int16), torch.zeros(512, dtype=torch.int16)
    what = tensor_map(x).what
    box = SimpleNamespace(what=what._replace(**fields | dict(base=what.base + fields.get("base", 0))))
    with pytest.raises(Fault, match=message):
        execute(edited(BOX_IN, old, new), smem=2048, x=x, out=out, box=box)
