"""Compiled code as the GPU reads it: the loop that takes the time, and what kinds of instructions are in it."""

import collections
import re
import subprocess
import tempfile

import triton

KINDS = {  # the first that matches from the start; `alu` is selections, conversions and whole numbers
    "tensor": r"HGMMA|HMMA",
    "exp2": r"MUFU",
    "fma": r"FFMA|FMUL|FADD",
    "alu": r"F(MNMX|SEL|SET)|[FI]2|IMAD(?!\.MOV)|[VI]+MNMX|[IV]ADD|ISETP|IABS|LOP|SHF\b|PRMT|LEA|SEL|SGXT",
    "load": r"LD(?!GDEP|C)|UTMALDG",
    "store": r"ST|RED|ATOM|UTMASTG",
    "barrier": r"BAR|DEPBAR|LDGDEPBAR|WARP|MEMBAR|FENCE|SYNCS",
    "other": r"",  # moves, shuffles, branches, and what is computed once a warp
}


def disassemble(cubin):
    """SASS, one instruction a line."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(tool, check=True, capture_output=True, text=True).stdout


def operation(instruction):
    """HGMMA.64x128x16.F32.BF16 of one that has a predicate before it and operands behind; "" of one that never runs."""
    guard, name = re.match(r"(@\S+\s+)?(\S+)", instruction).groups()
    return "" if guard is not None and guard.strip() == "@!PT" else name


def kind(instruction):
    name = operation(instruction)
    return next(kind for kind, pattern in KINDS.items() if re.match(pattern, name))


def mix(loop):
    """{kind: how many instructions of a loop}"""
    found = collections.Counter(map(kind, loop))
    return {kind: found[kind] for kind in KINDS}
