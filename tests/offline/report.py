"""Text table of compiled kernels, one line each, so that changes show in its diff."""

import textwrap

import triton

from . import sass

HEADING = """\
# What the kernels compile to

`make compile ARGS=--report` writes this file. Another version of Triton gives other numbers. **Nothing here was
measured.**

- `tile`: rows x keys, warps, stages. Kernels for Hopper have four more warps, which load tiles; with
  `d192` values have 128 columns. `regs`: registers of a thread when it starts. `spills`: bytes that a thread stores.
  `shared`: bytes of a block.
- `loop`: instructions of one warp in one step of the loop over blocks that take no mask, by kind. `alu` is selections,
  conversions and whole numbers, `exp2` every function of its unit, `other` moves, shuffles and branches. A dash: no
  loop over blocks.
"""


def _row(row, report):
    used = f"{report.registers:>4} {report.spills:>6} {report.shared:>6}"
    if report.loop is None:
        return f"{row}{used}     -"
    kinds = " ".join(f"{count:>{max(4, len(kind))}}" for kind, count in sass.mix(report.loop).items())
    return f"{row}{used}  {len(report.loop):>4} {kinds}"


def text(found):
    columns = f"{'kernel':25}{'GPU':8}{'dtype':5} {'D':5}{'variant':11}{'tile':17}regs spills shared  loop "
    columns += " ".join(f"{kind:>{max(4, len(kind))}}" for kind in sass.KINDS)
    lines = [columns, *(_row(row, report) for row, report in found)]
    return f"{HEADING}\ntriton {triton.__version__}:\n\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def loops(text):
    """Return {Row as text: number of instructions in its loop, or None} from the text of the table's file."""
    header, *lines = (line.strip() for line in text.splitlines() if line.startswith("    "))
    length, column = header.index("regs"), header[header.index("regs") :].split().index("loop")
    counts = {line[:length].rstrip(): line[length:].split()[column] for line in lines}
    return {row: None if count == "-" else int(count) for row, count in counts.items()}
