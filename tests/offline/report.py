"""The table of compiled kernels: one line each, so that a change of a kernel or a tile shows in its diff."""

import textwrap

import triton
from fusedattn.kernels.vocabulary.tiles import width

from fusedattn.launch.tiles import BACKWARDS, PRODUCTS

from . import bounds, sass
from .compiled import DTYPES, SHARED

HEADING = """\
# What the kernels compile to

Instructions, and bounds computed from them: **nothing here was measured.** `make compile ARGS=--report` writes this
file; another version of Triton gives other numbers.

- `tile`: rows x keys, warps, stages; tma where the copy engine loads what a loop walks. `spills`: bytes a thread
  stores. `shared`: bytes a block. `blocks`, `warps`: how many a multiprocessor holds by registers, shared memory and
  their own number.
- `hopper`, and `hopper_bwd`, `hopper_bwd_256` and `hopper_stored`, its backward: `tile` has the warps that multiply,
  and pp where warpgroups take turns; a block has four more, of which one copies, or three. `regs` are those of a thread
  when it starts. Nothing of `hopper` changes with the number of programs. The two warpgroups of `hopper_bwd_256` do
  different work: `loop` counts a warp of each. `hopper_stored` is followed by `hopper_dk` and `hopper_dq`, one kernel,
  whose stages its tile has.
- `loop`: the instructions of one warp in one step of the loop over blocks that take no mask, by kind (of `hopper`: of
  one that multiplies, where the branch around the mask is taken and no barrier has to be waited for); `alu` is
  selections, conversions and whole numbers, `exp2` every function of its unit, `other` moves, shuffles, branches and
  what is computed once a warp. `clocks`: what they take of a multiprocessor, of all warps of one block: tensor cores,
  slots to issue instructions, exp2, fma, alu, shared memory (the operands of wgmma are counted once a warpgroup, other
  loads as if all lanes read the same) and the way from L2.
- `bound`: the largest of these, and what it comes to in TFLOP/s of an H200 (sm_90) or A100 (sm_80) at boost clock:
  `overlap` if all of it runs at once, `serial` if the tensor cores wait while the slowest of issue, exp2, fma and alu
  is at work; `hopper` is written so that they do not wait, its backward so that exponentials run under a product. It
  counts the operations of the kernel's own products: two in the forward, three in dq, four in dk/dv (five of those
  seven are the backward's), five in one_pass and Hopper's backward, which `hopper_stored` has with the two kernels
  after it, three and one each. It knows no latency, no memory, nothing of what is added or stored there, no bank
  conflicts and no power, which holds plain products in bf16 to 0.8 of the peak.
- A dash: no loop over blocks, so nothing to count.
"""
CLOCKS = ("tensor", "issue", "exp2", "fma", "alu", "shared", "l2")


def differ(row):
    """Whether the warpgroups of a row do different work, each in a loop of its own."""
    return getattr(row.tile, "shared", False)


def steps(row, report):
    """A step of each main loop, or where warpgroups differ of all of them together."""
    return (sum(report.loops, ()),) if differ(row) else report.loops


def _row(row, report):
    gpu, most = bounds.GPUS[row.capability], SHARED[row.capability]
    blocks = bounds.blocks(gpu, report.registers, report.shared, row.warps, most)
    used = f"{report.registers:>4} {report.spills:>6} {report.shared:>6} {blocks:>6} {blocks * row.warps:>5}"
    if report.loop is None:
        return f"{row}{used}     -"
    loop, turning = min(steps(row, report) or (report.loop,), key=len), row.turning // (2 if differ(row) else 1)
    mix = sass.mix(loop)
    wide = width.fn(row.dim)
    # A warp that is not in the loop, or the copy engine, copies what those in it walk.
    walked = row.tile.rows if row.kernel in ("dkdv", "one_pass", *BACKWARDS) else row.tile.keys
    by_others = row.warps > row.turning or getattr(row.tile, "tma", False)
    copied = 2 * walked * wide * DTYPES[row.dtype].itemsize if by_others else 0
    if row.kernel in PRODUCTS:  # gradients of scores, of as many rows as there are of keys or queries
        copied = row.tile.rows * (row.tile.keys + wide) * DTYPES[row.dtype].itemsize
    found = bounds.bound(loop, row.capability, turning, row.dim / wide, copied)
    kinds = " ".join(f"{count:>{max(4, len(kind))}}" for kind, count in mix.items())
    clocks = " ".join(f"{found.clocks[name]:>{max(5, len(name))}.0f}" for name in CLOCKS)
    bound = f"{found.limit:>6} {found.overlapped:>7.0f} {found.serial:>6.0f}"
    return f"{row}{used}  {len(loop):>4} {kinds}  {clocks}  {bound}"


def _columns():
    row = f"{'kernel':12}{'GPU':8}{'dtype':5} {'D':5}{'variant':11}{'tile':17}"
    kinds = " ".join(f"{kind:>{max(4, len(kind))}}" for kind in sass.KINDS)
    clocks = " ".join(f"{name:>{max(5, len(name))}}" for name in CLOCKS)
    return f"{row}regs spills shared blocks warps  loop {kinds}  {clocks}   bound overlap serial"


def text(found):
    """The file, of (Row, Report) pairs."""
    lines = [_columns(), *(_row(row, report) for row, report in found)]
    return f"{HEADING}\ntriton {triton.__version__}:\n\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def loops(text):
    """{what a line of a file begins with, a Row as text: how many instructions its loop has, None without one}"""
    header, *lines = (line.strip() for line in text.splitlines() if line.startswith("    "))
    length, column = header.index("regs"), header[header.index("regs") :].split().index("loop")
    counts = {line[:length].rstrip(): line[length:].split()[column] for line in lines}
    return {row: None if count == "-" else int(count) for row, count in counts.items()}
