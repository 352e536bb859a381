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


def main_loop(sass):
    """The instructions of the loop over blocks that take no mask, the shortest that multiplies matrices; or None."""
    code = [(int(at, 16), text) for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", sass, re.M)]
    loops = []
    for at, text in code:
        target = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < at:
            body = tuple(text for where, text in code if int(target[1], 16) <= where <= at)
            loops.append((body, sum(bool(re.search(r"\b(HGMMA|HMMA|FFMA)\b", text)) for text in body)))
    most = max((products for _, products in loops), default=0)
    return min((body for body, products in loops if 2 * products >= most > 0), key=len, default=None)


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
