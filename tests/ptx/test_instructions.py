"""Tests of single PTX instructions: their results by the PTX manual, their parsing, and errors for unknown text."""

import numpy as np
import pytest
import torch

from .handwritten import execute, line_of
from .parse import BITS, Unsupported, parse

NAN, INF = float("nan"), float("inf")
TINY = 2.0**-140  # a subnormal float32
M = 2**32 - 1
LANES = 32

# Each lane has 32 bytes of operands at %in, and 8 bytes for a result at %to.
PROLOGUE = """.reg .b16 %h<9>; .reg .b64 %in, %to;
mad.wide.u32 %in, %t, 32, %x; mad.wide.u32 %to, %t, 8, %out;
"""


def results(body, operands=()):
    """Return (32, 8) bytes, the results that the lanes stored, from the operands of some lanes as bytes."""
    x, out = torch.zeros(LANES, 32, dtype=torch.uint8), torch.zeros(LANES, 8, dtype=torch.uint8)
    for row, values in zip(x, operands, strict=False):
        row[: len(values)] = torch.tensor(list(values), dtype=torch.uint8)
    execute(PROLOGUE + body, threads=LANES, x=x, out=out)
    return out.numpy()


def dtype_of(kind):
    """Return the NumPy dtype of a PTX type: b types are unsigned, pred is 0 or 1."""
    return np.dtype({"s": "i", "f": "f"}.get(kind[0], "u") + str(max(BITS[kind], 8) // 8))


def register(kind, number):
    return {1: "%p", 16: "%h", 32: "%r", 64: "%d"}[BITS[kind]] + str(number)


def compute(text, rows):
    """Return an instruction's results for rows of operands, given a text such as "s64 = mul.wide.s32 s32 -3".

    The text has the type of the result, the instruction, and for each operand a type or a literal.
    """
    kind, _, op, *operands = text.split()
    kinds = [x for x in operands if x in BITS]
    names = [register(x, i + 1) if x in BITS else x for i, x in enumerate(operands)]
    lines, loaded = [], [name for name in names if name.startswith("%")]
    for i, (name, x) in enumerate(zip(loaded, kinds, strict=True)):
        lines.append(f"ld.global.b{BITS[x]} {name}, [%in+{8 * i}];")
    result = register(kind, 0)
    lines.append(f"{op} {', '.join((result, *names))};")
    if kind == "pred":
        lines.append("selp.b16 %h0, 1, 0, %p0;")
        result = "%h0"
    lines.append(f"st.global.b{max(BITS[kind], 8)} [%to], {result};")
    bytes_of = [[np.array(y).astype(dtype_of(x)).tobytes() for y, x in zip(row, kinds, strict=True)] for row in rows]
    stored = results("\n".join(lines), [b"".join(y.ljust(8, b"\0") for y in row) for row in bytes_of])
    return stored[: len(rows)].view(dtype_of(kind))[:, 0]


INTEGERS = {
    "s32 = div.s32 s32 s32": {(7, 2): 3, (-7, 2): -3, (7, -2): -3, (-7, -2): 3, (-6, 3): -2, (-1, 5): 0},
    "s32 = rem.s32 s32 s32": {(7, 2): 1, (-7, 2): -1, (7, -2): 1, (-7, -2): -1, (-6, 3): 0, (-1, 5): -1},
    "s32 = mul.hi.s32 s32 s32": {(-1, 1): -1, (2**31 - 1, 2**31 - 1): 2**30 - 1, (-(2**31), 4): -2},
    "u32 = mul.hi.u32 u32 u32": {(M, M): M - 1, (2**31, 2): 1},
    "s64 = mul.wide.s32 s32 s32": {(-2, 2**31 - 1): -(2**32) + 2},
    "u64 = mul.wide.u32 u32 u32": {(M, M): M * M},
    "s64 = mad.wide.s32 s32 s32 s64": {(-1, 5, 2**40): 2**40 - 5},
    "u32 = min.u32 u32 u32": {(M, 1): 1},
    "s32 = min.relu.s32 s32 s32": {(-1, 1): 0, (3, 2): 2},
    "s64 = max.s64 s64 0": {(-(2**40),): 0, (2**40,): 2**40},
    "b32 = shl.b32 b32 b32": {(1, 31): 2**31, (1, 32): 0, (1, 255): 0, (3, 31): 2**31},
    "b32 = shl.b32 b32 32": {(3,): 0},
    "b16 = shl.b16 b16 b32": {(1, 15): 2**15, (1, 16): 0},
    "u32 = shr.u32 u32 b32": {(M, 31): 1, (M, 32): 0, (M, M): 0},
    "s32 = shr.s32 s32 b32": {(-8, 1): -4, (-8, 31): -1, (-8, 32): -1, (8, 99): 0},
    "s32 = shr.s32 s32 40": {(-8,): -1},
    "s64 = shr.s64 s64 2": {(-9,): -3},
    "b32 = shf.l.wrap.b32 b32 b32 b32": {(0x80000000, 1, 1): 3, (7, 9, 32): 9, (7, 9, 0): 9},
    "u32 = bfe.u32 u32 b32 b32": {(0xABCD, 4, 8): 0xBC, (M, 28, 9): 15, (M, 32, 4): 0, (M, 0, 0): 0, (5, 0, 99): 5},
    "s32 = bfe.s32 s32 b32 b32": {(0x0F0, 4, 4): -1, (0x070, 4, 4): 7, (-8, 30, 9): -1, (-8, 40, 2): -1, (-8, 0, 0): 0},
    "s64 = bfe.s64 s64 b32 b32": {(-8, 1, 31): -4, (0x0F0, 4, 4): -1, (1 << 62, 62, 1): -1, (1 << 62, 62, 2): 1},
    "b32 = prmt.b32 b32 b32 b32": {(0x33221100, 0x77665544, 0x7410): 0x77441100, (0x80, 0x7F, 0x44C8): 0x7F7F00FF},
}

FLOATS = {
    "f32 = add.f32 f32 f32": {(1.0, 2.0**-24): 1.0, (INF, -INF): NAN, (-0.0, -0.0): -0.0, (TINY, TINY): 2 * TINY},
    "f32 = fma.rn.f32 f32 f32 f32": {(1 + 2.0**-12, 1 + 2.0**-12, -1.0): 2.0**-11 + 2.0**-24, (TINY, 1.0, 0.0): TINY},
    "f32 = fma.rn.ftz.f32 f32 f32 f32": {
        (TINY, 2.0**100, 0.0): 0.0,  # operands are flushed to 0, too
        (2.0**-100, 2.0**-40, 0.0): 0.0,
        (-(2.0**-100), 2.0**-40, -0.0): -0.0,
        (2.0**-100, 2.0**-26, 0.0): 2.0**-126,
        (TINY, 1.0, 3.0): 3.0,
    },
    "f32 = max.f32 f32 f32": {(NAN, 1.0): 1.0, (1.0, NAN): 1.0, (NAN, NAN): NAN, (-0.0, 0.0): 0.0},
    "f32 = min.f32 f32 f32": {(NAN, 1.0): 1.0, (0.0, -0.0): -0.0, (-INF, 1.0): -INF},
    "f32 = max.f32 f32 0f80000000": {(0.0,): 0.0},
    "f32 = max.f32 f32 f32 f32": {(1.0, NAN, 3.0): 3.0, (NAN, NAN, -1.0): -1.0, (5.0, 1.0, 2.0): 5.0},
    "f32 = min.f32 f32 0f00000000": {(-0.0,): -0.0},
    "f64 = max.f64 f64 0dBFF0000000000000": {(-3.0,): -1.0, (NAN,): -1.0},
    "f32 = neg.f32 f32": {(0.0,): -0.0, (2.0,): -2.0},
    "f32 = abs.f32 f32": {(-2.0,): 2.0, (-INF,): INF},
    "b32 = abs.bf16x2 b32": {(0xBF803F80,): 0x3F803F80, (0x80008001,): 0x00000001},
    "b32 = abs.f16x2 b32": {(0xBC00FC00,): 0x3C007C00},
    "f32 = div.full.f32 f32 f32": {(1.0, 4.0): 0.25, (1.0, 0.0): INF, (0.0, 0.0): NAN},
    "f32 = div.approx.f32 f32 f32": {(1.0, 4.0): 0.25, (1.0, 0.0): INF, (0.0, 0.0): NAN},
    "f32 = rsqrt.approx.ftz.f32 f32": {(4.0,): 0.5, (INF,): 0.0, (TINY,): INF, (0.0,): INF},
    "f32 = ex2.approx.f32 f32": {(3.0,): 8.0, (-INF,): 0.0, (-140.0,): TINY, (200.0,): INF},
    "f32 = ex2.approx.ftz.f32 f32": {(-140.0,): 0.0, (-126.0,): 2.0**-126, (TINY,): 1.0},
    "b64 = mul.rn.f32x2 b64 b64": {(0x3F80000040000000, 0x4000000040400000): 0x4000000040C00000},  # (1, 2) * (2, 3)
}

CONVERSIONS = {
    "f32 = cvt.rn.f32.s32 s32": {(2**24 + 1,): 2.0**24, (2**24 + 3,): 2.0**24 + 4, (-1,): -1.0},
    "f32 = cvt.rn.f32.f64 f64": {(1 + 2.0**-24,): 1.0, (1e300,): INF},
    "b16 = cvt.rn.bf16.f32 f32": {
        (1.0,): 0x3F80,
        (1 + 2.0**-8,): 0x3F80,  # a tie, to even
        (1 + 3 * 2.0**-8,): 0x3F82,
        (1 + 2.0**-8 + 2.0**-20,): 0x3F81,
        (3.4e38,): 0x7F80,  # past the largest bfloat16, 3.39e38
        (-INF,): 0xFF80,
        (NAN,): 0x7FFF,
        (TINY,): 0,
    },
    "b16 = cvt.rn.f16.f32 f32": {
        (1 + 2.0**-11,): 0x3C00,
        (1 + 3 * 2.0**-11,): 0x3C02,
        (65519.0,): 0x7BFF,
        (65520.0,): 0x7C00,
        (2.0**-24,): 1,
        (2.0**-25,): 0,
        (NAN,): 0x7FFF,
    },
    "b32 = cvt.rn.bf16x2.f32 f32 f32": {(1.0, 2.0): 0x3F804000},  # the first operand is the upper half
    "b32 = cvt.rn.f16x2.f32 f32 f32": {(1.0, 2.0): 0x3C004000},
    "f32 = cvt.f32.bf16 b16": {(0xC000,): -2.0, (0x0001,): 2.0**-133, (0x7F81,): NAN},
    "f32 = cvt.f32.f16 b16": {(0xC000,): -2.0, (0x0001,): 2.0**-24, (0x7C00,): INF},
    "u32 = cvt.u32.u64 u64": {(2**40 + 5,): 5},
    "u16 = cvt.u16.u32 u32": {(0x12345,): 0x2345},
    "s32 = cvt.s8.s32 s32": {(200,): -56},  # sign-extended to the register
    "s32 = cvt.s32.s8 b32": {(0x17F,): 127, (0x180,): -128},
}

ORDERED = dict(eq=(0, 0, 1, 0), ne=(1, 1, 0, 0), lt=(1, 0, 0, 0), le=(1, 0, 1, 0), gt=(0, 1, 0, 0), ge=(0, 1, 1, 0))
PAIRS = (1.0, 2.0), (2.0, 1.0), (2.0, 2.0), (NAN, 1.0)
COMPARISONS = {
    f"pred = setp.{name}.f32 f32 f32": dict(zip(PAIRS, results, strict=True))
    for name, results in (ORDERED | dict(neu=(1, 1, 0, 1))).items()
}
COMPARISONS |= {
    "pred = setp.lt.s32 s32 s32": {(-1, 1): 1, (1, 1): 0},
    "pred = setp.lt.u32 u32 u32": {(-1, 1): 0, (1, 2): 1},
    "pred = setp.ne.b16 b16 0": {(0,): 0, (9,): 1},
    "pred = setp.gt.bf16 b16 b16": {(0x4000, 0x3F80): 1, (0xC000, 0x3F80): 0, (0x7FFF, 0): 0},
    "pred = setp.ne.f16 b16 b16": {(0x4000, 0x3C00): 1, (0x8000, 0): 0, (0x7FFF, 0): 0},
}


def alike(x, y):
    if isinstance(y, float):
        return (np.isnan(x) and np.isnan(y)) or (x == y and np.signbit(x) == np.signbit(y))
    return int(x) == y


TABLE = INTEGERS | FLOATS | CONVERSIONS | COMPARISONS


@pytest.mark.parametrize("text", TABLE)
def test_an_instruction_has_the_results_of_its_row(text):
    rows = TABLE[text]
    results = zip(rows.items(), compute(text, rows), strict=True)
    assert not [(row, x, y) for (row, y), x in results if not alike(x, y)]


# Several instructions. %t is the lane, and %r0 is stored.

RANGE = list(range(LANES))
BODIES = {
    "a comparison of halves": (
        """setp.eq.bf16x2 %p1|%p2, 0x3F800000, 0x3F803F80; selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2;
        or.b32 %r0, %r1, %r2;""",
        [2] * 32,
    ),
    "a guard that its own instruction changes": (
        """setp.lt.u32 %p1, %t, 3; mov.pred %p2, 0; @!%p1 setp.eq.bf16x2 %p1|%p2, %r0, %r0;
        selp.b32 %r1, 1, 0, %p1; selp.b32 %r0, %r1, 2, %p2; add.s32 %r0, %r0, %r1;""",
        [3] * 3 + [2] * 29,
    ),
    "a branch that joins": (
        """setp.lt.u32 %p1, %t, 3;
        @%p1 bra LOW;
        add.s32 %r1, %t, 100;
        bra.uni JOIN;
        LOW: mov.b32 %r1, 7;
        JOIN: add.s32 %r0, %r1, 1;""",
        [8] * 3 + [i + 101 for i in RANGE[3:]],
    ),
    "a loop that lanes leave at different times": (
        """mov.b32 %r0, 0; mov.b32 %r1, 0;
        LOOP: add.s32 %r0, %r0, %r1;
        add.s32 %r1, %r1, 1;
        setp.le.u32 %p1, %r1, %t;
        @%p1 bra LOOP;""",
        [i * (i + 1) // 2 for i in RANGE],
    ),
    "some have ended": ("setp.lt.u32 %p1, %t, 3; @%p1 ret; mov.b32 %r0, 1;", [0] * 3 + [1] * 29),
}


@pytest.mark.parametrize("name", BODIES)
def test_instructions_leave_what_they_should(name):
    body, expected = BODIES[name]
    stored = results(f"mov.b32 %r0, 0;\n{body}\nst.global.b32 [%to], %r0;")
    assert stored.view(np.uint32)[:, 0].tolist() == expected


UNKNOWN = (
    "frobnicate.b32 %r1, %r2;",
    "add.sat.s32 %r1, %r2, %r3;",
    "add.rn.ftz.f32 %r1, %r2, %r3;",
    "add.f32 %r1, %r2;",
    "fma.rn.bf16 %h1, %h2, %h3, %h4;",
    "max.NaN.f32 %r1, %r2, %r3;",
    "mul.s32 %r1, %r2, %r3;",
    "mul.hi.u64 %d1, %d2, %d3;",
    "bfe.u64 %d1, %d2, %r1, %r2;",
    "cvt.rz.f16.f32 %h1, %r1;",
    "cvt.rzi.s32.f32 %r1, %r2;",
    "cvt.s32.f32 %r1, %r2;",
    "setp.ltu.f32 %p1, %r1, %r2;",
    "setp.lt.and.s32 %p1, %r1, %r2, %p2;",
    "mov.u32 %r1, %clock;",
    "mov.b32 %r1, %unheard;",
    "ld.local.b32 %r1, [%r2];",
    "ld.global.v2.b32 %r1, [%in];",
    "ld.param.b64 %d1, [x+4];",
    "atom.global.gpu.relaxed.max.u32 %r1, [%in], 1;",
    "shfl.sync.idx.b32 %r1, %r2, 0, 31, 255;",
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r1}, {%r2}, {%r3}, {%r4};",
    "cp.async.wait_all;",
    "bar.arrive 1, 64;",
    "@%p1 bar.sync 0;",
    "bra NOWHERE;",
    ".local .b8 stack[16];",
)


@pytest.mark.parametrize("text", UNKNOWN)
def test_unknown_text_is_refused_with_its_line(text):
    body = f"{PROLOGUE}{text} // here"
    with pytest.raises(Unsupported) as refusal:
        execute(body)
    assert str(refusal.value).startswith(f"line {line_of(body)}: {text.split(';')[0]}")


@pytest.mark.parametrize("head, line", [(".maxnreg 5", 3), (".reqntid 32\n.noreturn", 4)])
def test_a_kernel_must_say_how_many_threads_it_has_and_nothing_unknown(head, line):
    with pytest.raises(Unsupported, match=f"line {line}"):
        parse(f".entry f()\n{head}\n{{ ret; }}")
