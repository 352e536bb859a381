"""Compiled code, read: the ways through it, one step of its loops, and what it does while a product runs."""

import pytest

pytest.importorskip("triton", reason="kernels need Triton")

from . import flow, fusing, hazards


def code(*lines):
    """Instructions as cuobjdump prints them; LABEL: before one is what others jump to."""
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


def test_a_turn_is_of_the_shortest_loop_that_multiplies():
    masked = ["MASKED: NOP", *[QK] * 40, "@P0 BRA MASKED"]
    plain = ["PLAIN: NOP", *[QK] * 20, "@P0 BRA PLAIN"]
    copy = ["COPY: NOP", *["LDG.E R2, desc[UR4][R8.64]"] * 5, "@P0 BRA COPY"]
    few = ["FEW: NOP", QK, "@P0 BRA FEW"]
    loops = flow.steps(written("OUTER: NOP", *masked, *plain, *copy, *few, "@P1 BRA OUTER", "EXIT"))
    assert sorted(map(len, loops)) == [22, 42]
    assert flow.steps(written("EXIT")) == flow.steps("") == ()


def test_a_turn_goes_around_the_mask_and_through_the_waits():
    wait = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2"
    lines = [
        "BRX R4 -0x1a0",  # to where nothing else leads: both warpgroups
        *["LOOP: NOP", "@P3 BRA NEXT", wait, "@!P0 BRA SPIN", "NEXT: NOP", QK, "@P1 BRA P2, PLAIN"],
        *["FSEL R24, R24, -INF, P4"] * 9,
        *["PLAIN: NOP", "@P4 BRA STORED", "STS [R2], R3", "STORED: MUFU.EX2 R24, R24", "@P5 BRA LOOP", "EXIT"],
        *["OTHER: NOP", QK, "BRA OTHER"],
        *["SPIN: NOP", wait, "@!P0 BRA SPIN", "BRA NEXT"],
    ]
    first, other = flow.steps(written(*lines))
    assert [text.partition(" ")[0] for text in first if not text.startswith("@")] == [
        *["NOP", "SYNCS.PHASECHK.TRANS64.TRYWAIT", "NOP", QK.partition(" ")[0], "NOP", "STS", "MUFU.EX2"]
    ]
    assert len(first) == 12 and len(other) == 3


def test_two_functions_are_not_read_as_one():
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


def test_what_instructions_write():
    assert {x: len(hazards.written(x)) for x in WRITES} == WRITES
    assert all(hazards.written(x)[0] == 152 for x, count in WRITES.items() if count)


WRITE = "F2FP.BF16.F32.PACK_AB R153, R25, R24"


@pytest.mark.parametrize(
    "lines, expected",
    [
        ([PV, WRITE, LEAVE_NONE], 1),
        ([PV, LEAVE_NONE, WRITE], 0),
        ([PV, "STS.128 [R152], R156", "FADD R2, R152, R153", LEAVE_NONE, WRITE], 0),  # reads
        ([PV, "LDS.128 R149, [R2]", LEAVE_NONE], 1),  # the last of four
        ([PV, "HGMMA.64x128x16.F32.BF16 R90, gdesc[UR8], R90, gsb0", LEAVE_NONE], 2),  # the last of 64
        # The wait leaves the younger group running: which of the two is it?
        ([QK, PV, LEAVE_ONE, WRITE, LEAVE_NONE], 1),
        ([PV, QK, LEAVE_ONE, WRITE, LEAVE_NONE], 0),
        ([PV, QK, "WARPGROUP.DEPBAR.LE gsb0, 0x2", WRITE], 1),
        ([PV.removesuffix(", gsb0"), LEAVE_NONE, WRITE], 1),  # of a group that is not complete
        ([PV, "@P0 " + LEAVE_NONE, WRITE], 1),
        ([PV, "@P0 BRA AFTER", LEAVE_NONE, "AFTER: NOP", WRITE], 1),  # on one of two ways
        (["LOOP: NOP", WRITE, PV, "@P0 BRA LOOP", LEAVE_NONE], 1),  # in the next step
        (["LOOP: NOP", WRITE, PV, LEAVE_NONE, "@P0 BRA LOOP"], 0),
        (["LOOP: NOP", QK, PV, LEAVE_ONE, "NOP", LEAVE_NONE, WRITE, "@P0 BRA LOOP", PV, WRITE], 1),  # behind it
        ([PV, "CALL.REL.NOINC FUNCTION", LEAVE_NONE, "EXIT", "FUNCTION: NOP", WRITE, "RET.REL.NODEC R2 0x0"], 1),
    ],
)
def test_registers_that_a_product_may_still_read_are_not_written(lines, expected):
    found = hazards.overwritten(written(*lines, "EXIT"))
    assert len(found) == expected
    assert all(f"writes R{each.register}, which 'HGMMA" in str(each) for each in found)
    assert {each.register for each in found} <= set(range(152, 156))


ARRIVE = "WARPGROUP.ARRIVE"


@pytest.mark.parametrize(
    "lines, expected",
    [
        ([WRITE, ARRIVE, PV, LEAVE_NONE], 0),
        ([ARRIVE, WRITE, PV, LEAVE_NONE], 1),
        ([ARRIVE, PV, LEAVE_NONE, WRITE, PV, LEAVE_NONE], 1),  # the fence before the first is not one for the second
        ([ARRIVE, PV, LEAVE_NONE, WRITE, ARRIVE, PV, LEAVE_NONE], 0),
        ([ARRIVE, "LDS.128 R149, [R2]", PV, LEAVE_NONE], 1),  # the last of four
        ([ARRIVE, "FADD R88, R2, R3", PV, LEAVE_NONE], 1),  # its sums
        ([ARRIVE, "@P0 " + WRITE, PV], 1),
        ([ARRIVE, "@P0 BRA AFTER", WRITE, "AFTER: NOP", PV], 1),  # on one of two ways
        (["LOOP: NOP", PV, LEAVE_NONE, WRITE, "@P0 BRA LOOP"], 1),  # in the next step
        (["LOOP: NOP", ARRIVE, PV, LEAVE_NONE, WRITE, "@P0 BRA LOOP"], 0),
    ],
)
def test_what_a_product_reads_is_written_before_its_fence(lines, expected):
    found = hazards.unfenced(written(*lines, "EXIT"))
    assert len(found) == expected
    assert all("was written after the fence" in str(each) for each in found)


LOAD, GIVE = "LDS.64 R190, [R8+0x38000]", "@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x38710], RZ"


@pytest.mark.parametrize(
    "lines, expected",
    [
        ([LOAD, GIVE, "FADD R2, R3, R190"], 1),
        ([LOAD, "FADD R2, R3, R190", GIVE], 0),
        ([LOAD, "FADD R2, R3, R191", GIVE], 0),  # of both registers at once
        ([LOAD, "BAR.SYNC.DEFER_BLOCKING 0x0, 0x80", GIVE], 1),  # threads meet, their loads may not have read
        (["LDSM.16.M88.4 R24, [R44]", GIVE], 1),
        (["LDSM.16.M88.4 R24, [R44]", "HADD2.BF16 R2, R27, R3", GIVE], 0),
        (["LDG.E.64 R190, desc[UR4][R2.64]", GIVE], 0),  # from memory that nobody gives back
        ([LOAD, "@P0 BRA AFTER", "FADD R2, R3, R190", "AFTER: NOP", GIVE], 1),  # on one of two ways
        ([GIVE, LOAD], 1),  # in the next step
        (["FADD R2, R3, R190", GIVE, LOAD], 0),
    ],
)
def test_what_is_given_back_has_been_read(lines, expected):
    found = hazards.given_back(written("AGAIN: NOP", *lines, "@P1 BRA AGAIN", "EXIT"))
    assert len(found) == expected
    assert all("has not read" in str(each) for each in found)


EXP2 = "MUFU.EX2 R24, R24"


@pytest.mark.parametrize(
    "step, expected",
    [
        ([QK, PV, LEAVE_ONE, EXP2, EXP2, LEAVE_NONE], (2, 2)),
        ([QK, PV, LEAVE_ONE, LEAVE_NONE, EXP2], (0, 1)),
        ([QK, PV, LEAVE_ONE, EXP2, LEAVE_NONE, EXP2], (1, 2)),
        ([EXP2, LEAVE_NONE, "MUFU.RCP R2, R2", QK, PV, LEAVE_ONE], (1, 1)),  # the loop begins in the middle
        ([QK, LEAVE_NONE], (0, 0)),
    ],
)
def test_exponentials_under_a_product_are_counted(step, expected):
    assert hazards.overlapped(step) == expected


def test_additions_that_ptxas_may_fuse():
    product, moved = "mul.f32 %r3, %r1, %r2;", "mov.b32 %r4, %r3;"
    for addition in ("add.f32 %r5, %r3, %r6;", "@%p1 sub.f32 %r5, %r6, %r3;", "add.ftz.f32 \t%r5, %r6, %r4;"):
        (found,) = fusing.left("\n".join(("\t.loc 1 2 3", product, moved, f"\t{addition}")))
        assert found == addition
    for line in ("add.rn.f32 %r5, %r3, %r6;", "add.f32 %r5, %r6, %r7;", "fma.rn.f32 %r5, %r1, %r2, %r3;"):
        assert fusing.left(f"{product}\n{moved}\n{line}") == []
    written = "mul.f32 %r3, %r1, %r2;\nex2.approx.f32 %r3, %r3;\nadd.f32 %r5, %r3, %r6;"
    assert fusing.left(written) == [] and fusing.left("mul.rn.f32 %r3, %r1, %r2;\nadd.f32 %r5, %r3, %r6;") == []


OPERAND = "LDSM.16.M88.4 R24, [R44]"


def test_a_copy_that_begins_takes_longer_than_a_load_that_nothing_keeps_waiting():
    expect = "@P0 SYNCS.ARRIVE.TRANS64 RZ, [UR4], R19"
    for lines, expected in (
        ((LOAD, expect), 0),
        ((QK, LOAD, expect), 1),
        ((QK, LEAVE_NONE, LOAD, expect), 0),
        ((QK, LEAVE_NONE, LOAD, GIVE), 1),
        ((QK, f"@P0 {LEAVE_NONE}", LOAD, expect), 1),
    ):
        assert len(hazards.given_back(written(*lines, "EXIT"))) == expected, lines


def test_operands_that_are_read_once_are_not_written_again():
    assert hazards.given_back(written(OPERAND, GIVE, "EXIT")) == ()
    assert len(hazards.given_back(written(LOAD, GIVE, "EXIT"))) == 1, "numbers of a first step may be"
    partition = ["AGAIN: NOP", "BAR.SYNC.DEFER_BLOCKING 0x1", OPERAND, GIVE, "@P0 BRA AGAIN", "EXIT"]
    assert hazards.given_back(written(*partition)) == ()
    partition[1] = "BAR.SYNC.DEFER_BLOCKING 0x1, 0x80"
    assert len(hazards.given_back(written(*partition))) == 1
