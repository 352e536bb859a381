"""Tests of control flow, steps of loops, and hazards, with a few lines of SASS."""

import re

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from . import flow, hazards, operands


def code(*lines):
    """Yield instructions as cuobjdump prints them. `LABEL: ` before an instruction makes it a target of jumps."""
    labels = {text.partition(": ")[0]: 16 * i for i, text in enumerate(lines) if ": " in text}
    for i, text in enumerate(lines):
        text = text.rpartition(": ")[2]
        target = text.rpartition(" ")[2]
        text = text.removesuffix(target) + f"{labels[target]:#x}" if target in labels else text
        yield f"        /*{16 * i:04x}*/      {text} ;"


def written(*lines):
    return "\n".join(code(*lines))


QK = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0"
PV = "HGMMA.64x64x16.F32.BF16 R88, R152, gdesc[UR8].tnspB, R88, gsb0"
LEAVE_ONE, LEAVE_NONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def test_steps_are_of_innermost_loops_with_many_products():
    masked = ["MASKED: NOP", *[QK] * 40, "@P0 BRA MASKED"]
    plain = ["PLAIN: NOP", *[QK] * 20, "@P0 BRA PLAIN"]
    copy = ["COPY: NOP", *["LDG.E R2, desc[UR4][R8.64]"] * 5, "@P0 BRA COPY"]
    few = ["FEW: NOP", QK, "@P0 BRA FEW"]
    loops = flow.steps(written("OUTER: NOP", *masked, *plain, *copy, *few, "@P1 BRA OUTER", "EXIT"))
    assert sorted(map(len, loops)) == [22, 42]
    assert flow.steps(written("EXIT")) == flow.steps("") == ()


def test_a_step_skips_masks_and_includes_waits():
    wait = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2"
    lines = [
        "BRX R4 -0x1a0",  # jumps to the code of both warpgroups, which nothing else jumps to
        *["LOOP: NOP", "@P3 BRA NEXT", wait, "@!P0 BRA SPIN", "NEXT: NOP", QK, "@P1 BRA P2, PLAIN"],
        *["FSEL R24, R24, -INF, P4", "STL [R1], R9", "LDL.LU R9, [R1]"] * 9,
        *["PLAIN: NOP", "@P4 BRA STORED", "STS [R2], R3", "STORED: MUFU.EX2 R24, R24", "@P5 BRA LOOP", "EXIT"],
        *["OTHER: NOP", QK, "BRA OTHER"],
        *["SPIN: NOP", wait, "@!P0 BRA SPIN", "BRA NEXT"],
    ]
    first, other = flow.steps(written(*lines))
    assert [text.partition(" ")[0] for text in first if not text.startswith("@")] == [
        *["NOP", "SYNCS.PHASECHK.TRANS64.TRYWAIT", "NOP", QK.partition(" ")[0], "NOP", "STS", "MUFU.EX2"]
    ]
    assert len(first) == 12 and len(other) == 3


def test_code_of_two_functions_is_refused():
    with pytest.raises(ValueError, match="more than one function"):
        flow.blocks(written("EXIT") + "\n" + written("EXIT"))


WRITES = {
    "FADD R152, R2, R3": 1,
    "@!PT FADD R152, R2, R3": 0,
    "LDG.E.64 R152, desc[UR4][R8.64]": 2,
    "LDSM.16.MT88.2 R152, [R2]": 2,
    "IMAD.WIDE.U32 R152, R3, 0x10, R4": 2,
    "SHF.R.U64 R152, R3, 0x1, R4": 1,
    "CS2R.32 R152, SR_CLOCKLO": 1,
    "DFMA R152, R2, R4, R6": 2,
    "HMMA.16816.F32 R152, R4, R8, R12": 4,
    "HGMMA.64x16x16.F32.BF16 R152, R4, gdesc[UR4], R152": 8,
    "LOP3.LUT P0, R152, R3, 0x1, RZ, 0xc0, !PT": 1,
    "ISETP.GE.AND P0, PT, R152, R3, PT": 0,
    "STG.E desc[UR4][R152.64], R3": 0,
    "LDGSTS.E.BYPASS.128 [R152], desc[UR36][R10.64]": 0,
    "UIADD3 UR152, UR4, 0x1, URZ": 0,
}


def test_registers_that_instructions_write():
    assert {x: len(hazards.written(x)) for x in WRITES} == WRITES
    assert all(hazards.written(x)[0] == 152 for x, count in WRITES.items() if count)


WRITE, ARRIVE = "F2FP.BF16.F32.PACK_AB R153, R25, R24", "WARPGROUP.ARRIVE"
LOAD, GIVE = "LDS.64 R190, [R8+0x38000]", "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x38710], RZ"
USE, OPERAND, EXPECT = "FADD R2, R3, R190", "LDSM.16.M88.4 R24, [R44]", "@P0 SYNCS.ARRIVE.TRANS64 RZ, [UR4], R19"
PARTITION = "BAR.SYNC.DEFER_BLOCKING 0x1"


def again(*lines):
    return ["AGAIN: NOP", *lines, "@P1 BRA AGAIN"]


HAZARDS = {  # function: [(code, number of findings)]
    hazards.overwritten: [
        ([PV, WRITE, LEAVE_NONE], 1),
        ([PV, LEAVE_NONE, WRITE], 0),
        ([PV, "STS.128 [R152], R156", "FADD R2, R152, R153", LEAVE_NONE, WRITE], 0),  # reads are harmless
        ([PV, "LDS.128 R149, [R2]", LEAVE_NONE], 1),  # writes four registers; PV reads the last of them
        ([PV, "HGMMA.64x128x16.F32.BF16 R90, gdesc[UR8], R90, gsb0", LEAVE_NONE], 2),  # writes 64 registers
        ([QK, PV, LEAVE_ONE, WRITE, LEAVE_NONE], 1),  # the wait leaves the later group running
        ([PV, QK, LEAVE_ONE, WRITE, LEAVE_NONE], 0),
        ([PV, QK, "WARPGROUP.DEPBAR.LE gsb0, 0x2", WRITE], 1),
        ([PV.removesuffix(", gsb0"), LEAVE_NONE, WRITE], 1),  # the group is not committed
        ([PV, "@P0 " + LEAVE_NONE, WRITE], 1),
        ([PV, "@P0 BRA AFTER", LEAVE_NONE, "AFTER: NOP", WRITE], 1),  # one path does not wait
        (again(WRITE, PV) + [LEAVE_NONE], 1),  # the next step of the loop writes
        (again(WRITE, PV, LEAVE_NONE), 0),
        (again(QK, PV, LEAVE_ONE, "NOP", LEAVE_NONE, WRITE) + [PV, WRITE], 1),  # after the end of the loop
        ([PV, "CALL.REL.NOINC FUNCTION", LEAVE_NONE, "EXIT", "FUNCTION: NOP", WRITE, "RET.REL.NODEC R2 0x0"], 1),
    ],
    hazards.unfenced: [
        ([WRITE, ARRIVE, PV, LEAVE_NONE], 0),
        ([ARRIVE, WRITE, PV, LEAVE_NONE], 1),
        ([ARRIVE, PV, LEAVE_NONE, WRITE, PV, LEAVE_NONE], 1),  # the first fence does not count for the second product
        ([ARRIVE, PV, LEAVE_NONE, WRITE, ARRIVE, PV, LEAVE_NONE], 0),
        ([ARRIVE, "LDS.128 R149, [R2]", PV, LEAVE_NONE], 1),  # writes four registers, PV reads the last one
        ([ARRIVE, "FADD R88, R2, R3", PV, LEAVE_NONE], 1),  # PV adds to this register
        ([ARRIVE, "@P0 " + WRITE, PV], 1),
        ([ARRIVE, "@P0 BRA AFTER", WRITE, "AFTER: NOP", PV], 1),  # one path writes
        (again(PV, LEAVE_NONE, WRITE), 1),  # the next step has no fence
        (again(ARRIVE, PV, LEAVE_NONE, WRITE), 0),
    ],
    hazards.given_back: [
        (again(LOAD, GIVE, USE), 1),
        (again(LOAD, USE, GIVE), 0),
        (again(LOAD, "FADD R2, R3, R191", GIVE), 0),  # one use of two loaded registers is enough
        (again(LOAD, "BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", GIVE), 1),  # a barrier does not wait for loads
        (again("LDG.E.64 R190, desc[UR4][R2.64]", GIVE), 0),  # a load from global memory
        (again(LOAD, "@P0 BRA AFTER", USE, "AFTER: NOP", GIVE), 1),  # one path does not use the load
        ([LOAD, PARTITION, *again(GIVE)], 0),  # arguments of a partition, in memory that nothing overwrites
        (again(GIVE, LOAD), 1),  # the next step arrives before a use
        (again(USE, GIVE, LOAD), 0),
        # An arrival that starts a copy takes longer than a load, unless a product delays the load.
        ([LOAD, EXPECT], 0),
        ([QK, LOAD, EXPECT], 1),
        ([QK, LEAVE_NONE, LOAD, EXPECT], 0),
        ([QK, LEAVE_NONE, LOAD, GIVE], 1),
        ([QK, f"@P0 {LEAVE_NONE}", LOAD, EXPECT], 1),
        # Operands that are loaded once are not overwritten. Other loaded numbers may be.
        (again(OPERAND, GIVE), 1),
        (again(OPERAND, "HADD2.BF16 R2, R27, R3", GIVE), 0),
        ([OPERAND, GIVE], 0),
        ([LOAD, GIVE], 1),
        (again(PARTITION, OPERAND, GIVE), 0),
        (again(f"{PARTITION}, 0x80", OPERAND, GIVE), 1),
    ],
}

ROWS = [pytest.param(find, *row, id=find.__name__) for find, rows in HAZARDS.items() for row in rows]


@pytest.mark.parametrize("find, lines, expected", ROWS)
def test_hazards(find, lines, expected):
    found = find(written(*lines, "EXIT"))
    assert len(found) == expected
    if find is hazards.overwritten:
        assert all(re.search(r" writes R15[2-5], which 'HGMMA", text) for text in found)


EXP2 = "MUFU.EX2 R24, R24"


@pytest.mark.parametrize(
    "step, expected",
    [
        ([QK, PV, LEAVE_ONE, EXP2, EXP2, LEAVE_NONE], (2, 2)),
        ([QK, PV, LEAVE_ONE, LEAVE_NONE, EXP2], (0, 1)),
        ([QK, PV, LEAVE_ONE, EXP2, LEAVE_NONE, EXP2], (1, 2)),
        ([EXP2, LEAVE_NONE, "MUFU.RCP R2, R2", QK, PV, LEAVE_ONE], (1, 1)),  # the product runs across steps
        ([QK, LEAVE_NONE], (0, 0)),
    ],
)
def test_exponentials_under_a_product_are_counted(step, expected):
    assert hazards.overlapped(step) == expected


def test_additions_that_ptxas_may_fuse():
    product, moved = "mul.f32 %r3, %r1, %r2;", "mov.b32 %r4, %r3;"
    for addition in ("add.f32 %r5, %r3, %r6;", "@%p1 sub.f32 %r5, %r6, %r3;", "add.ftz.f32 \t%r5, %r6, %r4;"):
        (found,) = operands.fusible("\n".join(("\t.loc 1 2 3", product, moved, f"\t{addition}")))
        assert found == addition
    for line in ("add.rn.f32 %r5, %r3, %r6;", "add.f32 %r5, %r6, %r7;", "fma.rn.f32 %r5, %r1, %r2, %r3;"):
        assert operands.fusible(f"{product}\n{moved}\n{line}") == []
    written = "mul.f32 %r3, %r1, %r2;\nex2.approx.f32 %r3, %r3;\nadd.f32 %r5, %r3, %r6;"
    assert operands.fusible(written) == []
    assert operands.fusible("mul.rn.f32 %r3, %r1, %r2;\nadd.f32 %r5, %r3, %r6;") == []
