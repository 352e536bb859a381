"""Reads SASS, the machine code of NVIDIA GPUs: its text, and the kinds of its instructions."""

import collections
import re
import subprocess
import tempfile

import triton

KINDS = {  # the first match counts; `alu` is selections, conversions and integers
    "tensor": r"HGMMA|HMMA",
    "exp2": r"MUFU",
    "fma": r"FFMA|FMUL|FADD",
    "alu": r"F(MNMX|SEL|SET)|[FI]2|IMAD(?!\.MOV)|[VI]+MNMX|[IV]ADD|ISETP|IABS|LOP|SHF\b|PRMT|LEA|SEL|SGXT",
    "load": r"LD(?!GDEP|C)|UTMALDG",
    "store": r"ST|RED|ATOM|UTMASTG",
    "barrier": r"BAR|DEPBAR|LDGDEPBAR|WARP|MEMBAR|FENCE|SYNCS",
    "other": r"",  # moves, shuffles, branches, uniform instructions
}


def disassemble(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(tool, check=True, capture_output=True, text=True).stdout


def operation(instruction):
    """Return an instruction's name, such as HGMMA.64x128x16.F32.BF16; "" if its predicate is never true."""
    guard, name = re.match(r"(@\S+\s+)?(\S+)", instruction).groups()
    return "" if guard is not None and guard.strip() == "@!PT" else name


def kind(instruction):
    name = operation(instruction)
    return next(kind for kind, pattern in KINDS.items() if re.match(pattern, name))


def mix(loop):
    found = collections.Counter(map(kind, loop))
    return {kind: found[kind] for kind in KINDS}
