"""What other versions of ptxas make of the PTX that Triton has made: python -m tests.offline.assemblers PTXAS [...]

Each kernel for compute capability 9.0 that multiplies by wgmma, with every tile and option, is assembled from the same
PTX by the ptxas of Triton and by each that is named, and all of its machine code is read: registers, spills, main
loops, products that wait for each other, and what `hazards` finds. With --report it writes bench/results/ptxas.md. The
exit status is 1 if a version makes a hazard that the ptxas of Triton does not.
"""

import argparse
import functools
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

import triton

from . import compile as offline
from .compiled import compile_row, pool, report

TABLE = offline.ROOT / "bench" / "results" / "ptxas.md"
HEADING = """\
# What versions of ptxas make of the same PTX

Every kernel for compute capability 9.0 that multiplies by wgmma, by the PTX of Triton {triton}: {count} rows of
`make compile` (`python -m tests.offline.assemblers PTXAS ... --report`). `spilling` are rows that spill, and the bytes
that a thread of all of them stores; `serialised` rows whose products wait for each other; `hazards` rows in which a
register is written that a product still reads, or is not fenced (`tests/offline/hazards.py`). **Nothing here was
measured.**

"""
KNOWN = """
## What is known of their mistakes, and what of it our kernels have

- Before 13.3 ptxas may write to a register that a wgmma still reads as its left operand
  ([triton#9433](https://github.com/triton-lang/triton/issues/9433),
  [#11781](https://github.com/triton-lang/triton/pull/11781)): these are the hazards above.
- From the same PTX, 12.8.93 made of two kernels for Hopper one that computes wrong numbers and one that writes outside
  its shared memory, 13.0.88 the second, 13.1.80 neither
  ([flash-linear-attention#1262](https://github.com/fla-org/flash-linear-attention/pull/1262), on an H20). Which
  instructions are wrong was not published, so there is no pattern to look for: a GPU has to say that ours are right.
- 12.9.86 loses what the second of two packed 16-bit additions adds
  ([triton#11581](https://github.com/triton-lang/triton/issues/11581)): there are {packed} such additions here.
- 12.8 to 13.2 may lose where threads meet again that branched within a branch (release notes of CUDA 13.3). Nothing
  here looks for that.
- ptxas may fuse a multiplication and an addition that have no rounding of their own, as LLVM may: LLVM has left
  {fusible} (`tests/offline/fusing.py`), so ptxas computes what `make ptx` executes.
"""


class Made(NamedTuple):
    """What ptxas is given: a Row, its PTX, bytes of shared memory, and the Report by Triton's own."""

    row: object
    ptx: str
    found: object


def version(ptxas):
    """12.8.93, as ptxas says."""
    said = subprocess.run([ptxas, "--version"], check=True, capture_output=True, text=True).stdout
    return re.search(r"\bV(\d+\.\d+\.\d+)", said)[1]


def made(row):
    """The Made of a Row."""
    found = compile_row(row, read=True)
    return Made(row, found.asm["ptx"], found._replace(asm={}))


def assembled(each, ptxas):
    """The Report of a Made by another ptxas, with the options of Triton; a text where it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = pathlib.Path(folder, "kernel.ptx"), pathlib.Path(folder, "kernel.cubin")
        source.write_text(each.ptx)
        options = "-lineinfo", "-v", "--regAllocOptLevel=2", "--gpu-name=sm_90a"
        ran = subprocess.run([ptxas, *options, source, "-o", cubin], capture_output=True, text=True)
        if ran.returncode:
            return ran.stderr.strip().splitlines()[0]
        return report(each.row, each.ptx, cubin.read_bytes(), ran.stderr, each.found.shared, 0.0, True)._replace(asm={})


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ptxas", nargs="+", help="paths")
    parser.add_argument("--report", action="store_true", help=f"write {TABLE.relative_to(offline.ROOT)}")
    options = parser.parse_args(arguments)
    own = version(triton.knobs.nvidia.ptxas.path)
    with pool() as processes:
        every = list(processes.map(made, [row for row in offline.table() if row.capability == 90]))
        every = [each for each in every if each.found.counts["wgmma"]]
        found = {own: [each.found for each in every]}
        for ptxas in options.ptxas:
            found[version(ptxas)] = list(processes.map(functools.partial(assembled, ptxas=ptxas), every))
    text = "\n".join((*_totals(found), "", *_differences(every, found, own)))
    print(text)
    if options.report:
        packed = sum("16x2" in line for each in every for line in re.findall(r"add\.s\S*", each.ptx))
        known = KNOWN.format(packed=packed, fusible=sum(each.found.fusible for each in every))
        heading = HEADING.format(triton=triton.__version__, count=len(every))
        TABLE.write_text(heading + text + "\n" + known)
    before = sum(bool(x.overtaken) for x in found[own])
    return any(_hazards(reports) > before for reports in found.values())


def _hazards(reports):
    return sum(bool(x.overtaken) for x in reports if not isinstance(x, str))


def _totals(found):
    yield "| ptxas | assembled | refused | spilling | serialised | hazards | instructions of main loops |"
    yield "|---|---|---|---|---|---|---|"
    for name in sorted(found, key=lambda name: [*map(int, name.split("."))]):
        done = [x for x in found[name] if not isinstance(x, str)]
        spilling = [x.spills for x in done if x.spills]
        loops = sum(len(loop) for x in done for loop in x.loops)
        yield (
            f"| {name} | {len(done)} | {len(found[name]) - len(done)} | {len(spilling)}: {sum(spilling)} bytes "
            f"| {sum(x.serialized for x in done)} | {_hazards(done)} | {loops} |"
        )


def _differences(every, found, own):
    """Rows whose spills differ, or whose loops do by over 5%, from what Triton's own ptxas makes."""
    yield f"Where a version differs from {own} in spills, or by over {offline.DRIFT:.0%} in its main loops:"
    yield ""
    for i, each in enumerate(every):
        was, said = found[own][i], []
        for name, reports in found.items():
            x = reports[i]
            if isinstance(x, str):
                said.append(f"{name} refuses: {x}")
                continue
            before, after = (sum(map(len, r.loops)) for r in (was, x))
            if x.spills != was.spills or abs(after - before) > offline.DRIFT * before:
                said.append(f"{name} spills {x.spills} of {was.spills}, loops {after} of {before}")
            said += map(str, x.overtaken)
        if said:
            yield f"    {str(each.row).rstrip()}: {'; '.join(said)}"


if __name__ == "__main__":
    sys.exit(main())
