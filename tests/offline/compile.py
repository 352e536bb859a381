"""Compiles kernels without a GPU, and prints their registers, spills, shared memory and tensor-core instructions.

python -m tests.offline.compile [--capability 80 90] [--filter forward]
python -m tests.offline.compile --few    # one row of each kernel, and of each GPU, as in `make test`
python -m tests.offline.compile --some    # also one of each kernel on each GPU, option and dtype, as in `make test-all`
python -m tests.offline.compile --report    # writes bench/results/kernels.md

Every tile of `fusedattn.launch.tile_table` is compiled for every GPU that would take it. The exit status is 1 if a row
breaks a rule of `faults`. This cannot tell whether compiled kernels run, and how fast.
"""

import argparse
import functools
import itertools
import pathlib
import sys
import time

import triton

from fusedattn.launch import run, tile_table, tuned

from . import hazards, report as kernels
from .compiled import ALL, BY_HOPPER, DTYPES, INSTRUCTIONS, ON_HOPPER, SHARED, SMALLEST, Row, compile_row, pool
from .sass import operation

ROOT = pathlib.Path(__file__).parents[2]
TABLE = ROOT / "bench" / "results" / "kernels.md"
# Bytes that a variant may spill beyond its tile's budget. Few tiles are masked. One pass does the work of two kernels,
# so it spills more with all options together. Packed sequences need more addresses, and a bias over keys a sum for each
# key: dk/dv at D 256 spills 16 bytes more with it, and 16 more with Triton 3.6. Hopper's kernels may spill outside of
# their loops.
EXTRA_SPILLS = {"masked": 768, "everything": 768, "packed": 32, "packed all": 768, "bias keys": 32}
EXTRA_ON_HOPPER = {"partial": 16, "biased": 8, "dropout": 24, "key_mask": 16, "masked": 16, "registers": 48}
EXTRA_OF_WIDEST = 40  # of a Hopper kernel with heads wider than 256: addresses of its copying warp
# Of heads wider than 256 whose columns are no multiple of 16: threads load single elements, whose addresses take many
# registers. A step, of 1,000 instructions and more, loads at most 8 again.
EXTRA_OF_ODD = 224
EXTRA_OF_ONE_PASS = {"masked": 768, "everything": 1320, "packed": 32, "packed all": 1320, "bias keys": 256}
# Bytes that a row may spill with another Triton than that of the committed table. 3.6, 3.8 and 3.9 spill up to 2260.
SPILLS_BY_OTHERS = 2304
# Relative difference of a Hopper loop's length from the committed table, which has the shortest loop of a kernel. ptxas
# makes the loops of two warpgroups differ by up to 15 %.
DRIFT, APART = 0.05, 0.15
# No product of its own runs during the exponentials: with a bias, dp would not fit into registers (it spilled 8 to 240
# bytes). The other warpgroup multiplies meanwhile.
ALONE = "hopper_bwd_wide", "biased"
PRODUCTS = ("wgmma", "mma", "tcgen05")  # tensor core products of compute capability 9.0, of all GPUs, of 10.0

HEADER = f"{'kernel':25}{'GPU':8}{'dtype':6}{'D':5}{'variant':11}{'tile':17}" + " ".join(
    ["regs", "spills", " shared", *INSTRUCTIONS, " loop", "     wgmma", "    s"]
)


def faults(row, report, committed=None, other=False):
    """Yield a sentence for each rule that a compiled kernel breaks.

    Args:
        committed: `kernels.loops` of the committed table. other: True if another Triton compiled the kernel.
    """
    index, count = row.place
    on_hopper = row.kernel in ON_HOPPER
    extra = EXTRA_OF_ONE_PASS if row.kernel == "one_pass" else EXTRA_ON_HOPPER if on_hopper else EXTRA_SPILLS
    own = extra.get(row.variant, 0) + (0 if on_hopper else row.tile.spills)
    own += EXTRA_OF_WIDEST if on_hopper and row.dim > 256 else 0
    own += EXTRA_OF_ODD if row.dim > 256 and row.dim % 16 else 0
    budget = SPILLS_BY_OTHERS if other else own
    if report.spills > budget:
        yield f"spills {report.spills} bytes; its budget is {budget}"
    limit = SHARED[row.capability]
    if report.shared > limit:
        yield f"takes {report.shared} bytes of shared memory; sm_{row.capability} has {limit}"
    if index == count - 1 and report.shared > SMALLEST and not on_hopper:
        yield f"takes {report.shared} bytes of shared memory; the last of a row must fit {SMALLEST} on small GPUs"
    if row.tile.keys is not None and row.dtype != "ieee" and not any(map(report.counts.get, PRODUCTS)):
        yield "does not use the tensor cores"
    if not on_hopper and (report.counts["tma"] > 0) != row.tile.bulk:
        yield f"{'does not use' if row.tile.bulk else 'uses'} the copy engine"
    if not on_hopper and report.loops and ("UTMAREDG" in report.copied) != row.tile.bulk:
        yield f"must {'' if row.tile.bulk else 'not '}add dq by the copy engine"
    if report.serialized and row.variant not in ALL:
        yield "waits for each wgmma in turn: ptxas serialised them"
    yield from report.overtaken
    if report.fusible:
        yield f"has {report.fusible} products that ptxas may fuse: lanes that hold one sum may then differ"
    if report.disordered:
        yield f"orders operands of mma.sync for narrower loads: {', '.join(report.disordered)}"
    if on_hopper:
        yield from _faults_on_hopper(row, report, (committed or {}).get(str(row).rstrip()))
        for number, step in enumerate(() if other else report.loops):
            if reloads := sum(operation(text).startswith("LDL") for text in step):
                yield f"has {reloads} reloads of registers in a step of loop {number}"


def _faults_on_hopper(row, report, length):
    groups = row.tile.warpgroups
    cleans = row.kernel == "hopper" and row.variant in ("key_mask", "masked", "registers")
    launched, each, fewer = (tile_table.CLEANING_REGISTERS if cleans else tile_table.REGISTERS)[groups]
    asked, there = groups * each + fewer, launched * (groups + 1)
    if asked > there:
        yield f"asks for {asked} registers, a thread of each warpgroup; it is launched with {there}"
    if report.registers != launched:
        yield f"takes {report.registers} registers a thread, and is launched with {launched}"
    if not {each, fewer} <= report.asked:
        yield f"goes on with {sorted(report.asked)} registers a thread, not with {each} and {fewer}"
    adds = row.kernel in tile_table.BACKWARDS and row.kernel not in tile_table.STORED
    stored = (
        set() if row.variant in ("partial", "splits", "prefill") else {"UTMASTG"}
    )  # these store float32, without TMA
    copies = {"UTMALDG"} | stored | ({"UTMAREDG"} if adds else set())
    if missing := sorted(copies - report.copied):
        yield f"does not use the copy engine: no {' and no '.join(missing)}"
    if len(report.loops) != groups:
        yield f"has {len(report.loops)} main loops for {groups} warpgroups"
    for number, step in enumerate(report.loops):
        under, exponentials = hazards.overlapped(step)
        overlaps = under == exponentials or (row.kernel, row.variant) == ALONE
        if not (overlaps and (exponentials or row.kernel in tile_table.PRODUCTS)):
            yield f"computes {under} of {exponentials} exponentials of loop {number} while a product runs"
    for number, step in enumerate(report.loops):
        few = 4 if row.kernel in tile_table.PRODUCTS else 0  # short loops of two warpgroups differ by up to 4
        allowed = DRIFT if len(step) == min(map(len, report.loops)) else APART
        if length is not None and abs(len(step) - length) > max(allowed * length, few):
            yield f"has {len(step)} instructions in loop {number}, not within {allowed:.0%} of the committed {length}"


def _hopper_table():
    """Yield a Row (a kernel to compile) for each Hopper pipeline."""
    for width, pipelines in tile_table.HOPPER.items():
        first = pipelines[0], (0, len(pipelines))
        for index, pipeline in enumerate(pipelines):
            for variant in ("full", "causal", "window") if index == 0 else ("causal",):  # one for the others
                yield Row("hopper", 90, "bf16", width, variant, pipeline, (index, len(pipelines)))
        yield Row("hopper", 90, "fp16", width, "full", *first)
        for dim in {64: (32, 16), 128: (80,)}.get(width, ()):
            yield Row("hopper", 90, "bf16", dim, "full", *first)
    for width, forms in tile_table.HOPPER.items():
        for variant in ("partial", "splits", "packed", "prefill", *BY_HOPPER, "registers"):
            heavy = variant in ("alibi_slopes", "biased", "dropout", "masked", "registers")
            narrow = width > 128 and heavy and variant != "masked" and (width, variant) != (256, "biased")
            index = len(forms) - 1 if narrow else 0  # what fits, and spills nothing
            yield Row("hopper", 90, "bf16", width, variant, forms[index], (index, len(forms)))
            if forms[-1].warpgroups > 2 and variant in BY_HOPPER and not heavy and variant != "softcap":
                yield Row("hopper", 90, "bf16", width, variant, forms[-1], (len(forms) - 1, len(forms)))
    of_stored = zip(tile_table.STORED, (256, 512), strict=True)
    stored = {width: tile_table.BACKWARDS[name][width] for name, width in of_stored}
    for kernel, rows in (tile_table.BACKWARDS | dict.fromkeys(tile_table.PRODUCTS, stored)).items():
        for width, (form, *others) in rows.items():
            seldom = kernel in ("hopper_bwd_deterministic", *tile_table.PRODUCTS)  # no other code for windows
            masked = "masked" if seldom else None
            for variant in filter(None, ("full", "causal", None if seldom else "window", "packed", masked)):
                yield Row(kernel, 90, "bf16", width, variant, form, (0, 1 + len(others)))
            for index, other in enumerate(others, 1):
                yield Row(kernel, 90, "bf16", width, "full", other, (index, 1 + len(others)))
            if not seldom:
                some = "scale", "softcap", "alibi_slopes", "key_mask", "masked", "dropout", "biased", "partial"
                for variant in (*some, *["registers"] * (width <= 128), *["bias rows"] * (width <= 256)):
                    yield Row(kernel, 90, "bf16", width, variant, form, (0, 1))
                yield Row(kernel, 90, "fp16", width, "full", form, (0, 1))
                for dim in {64: (32, 16), 128: (80,), 256: (136,)}.get(width, ()):
                    yield Row(kernel, 90, "bf16", dim, "full", form, (0, 1))


def _packed_table(capability):
    """Yield the Rows (kernels to compile) of packed sequences, a few, as their loops are those of padded calls."""
    yield Row("fill_slots", capability, "bf16", 128, "packed", tile_table.Tile(64, None, 4, 1), (0, 1))
    for kernel, width in (*itertools.product(("forward", "one_pass"), (64, 128)), ("dq", 256), ("dkdv", 256)):
        tiles = tile_table.tiles_for(kernel, capability, 2, width)
        yield Row(kernel, capability, "bf16", width, "packed", tiles[0], (0, len(tiles)))
    for kernel in ("block_mask", "tile_lists"):
        yield Row(kernel, capability, "bf16", 128, "packed all", tile_table.Tile(64, None, 4, 1), (0, 1))
    for kernel in ("forward", "weights", "dq", "dkdv", "dbias"):
        tiles = tile_table.tiles_for(kernel, capability, 2, 128, "rich")
        yield Row(kernel, capability, "bf16", 128, "packed all", tiles[0], (0, len(tiles)))


def _candidate_table():
    """Yield the Rows (kernels to compile) of candidate tiles, which calls use only after `fusedattn tune`."""
    for (kernel, capability, _, width), tiles in tuned.CANDIDATES.items():
        for index, tile in enumerate(tiles, 1):  # an index between the first and the last tile of a row
            yield Row(kernel, capability, "bf16", width, "full", tile, (index, len(tiles) + 2))


def _small_table():
    """Yield the Rows (kernels to compile) of the tiles for GPUs with little shared memory."""
    for (kernel, capability, _, width), tiles in (tile_table.TABLE | tile_table.RICH).items():
        if capability == 86:
            for index, tile in enumerate(tiles):
                yield Row(kernel, 86, "bf16", width, "full", tile, (index, len(tiles)))


def _cache_table(capabilities):
    """Yield the Rows (kernels to compile) for caches: the first tile of each width, and other kinds of calls."""
    last = capabilities[-1]
    for kernel, capability, width in itertools.product(tile_table.ON_CACHES, capabilities, tile_table.WIDTHS):
        if kernel != "decode_16" and capability != last:
            continue
        of = functools.partial(tile_table.tiles_for, kernel, capability, 2, width)
        first = of()[0], (0, len(of()))
        if kernel not in tile_table.DECODE:
            if width == 128:
                yield Row(kernel, capability, "bf16", width, "everything", *first)
            if width == 128 and kernel == "append":
                yield Row(kernel, capability, "bf16", width, "one page", *first)
            continue
        dim = tile_table.WIDEST_CACHED if width == tile_table.WIDTHS[-1] else width
        for variant in ("pages", *["shared"] * (dim != width)):
            yield Row(kernel, capability, "bf16", dim, variant, *first)
        if capability == last and kernel == "decode_16":
            yield Row(kernel, capability, "bf16", dim, "everything", of("rich")[0], (0, len(of("rich"))))
            single = tile_table.tiles_for(kernel, capability, 4, width)
            for index, tile in enumerate(single if dim != width else single[:1]):
                for variant in ("pages", *["everything"] * (dim != width)):
                    yield Row(kernel, capability, "ieee", dim, variant, tile, (index, len(single)))
            if width > 256:
                yield Row(kernel, capability, "bf16", 257, "pages", of()[-1], (len(of()) - 1, len(of())))
            if width >= 256:
                yield Row(kernel, capability, "bf16", dim, "pages", of()[-1], (len(of()) - 1, len(of())))
            if width == 128:
                yield Row(kernel, capability, "bf16", width, "contiguous", *first)
                yield Row(kernel, capability, "bf16", width, "one page", *first)
                yield Row(kernel, capability, "bf16", width, "small pages", *first)


def table(capabilities=(80, 90)):
    """Yield a Row for each kernel to compile: all tiles and dtypes, and other kinds of calls for first tiles."""
    if 90 in capabilities:
        yield from _hopper_table()
        yield from _candidate_table()
    if 86 not in capabilities:
        yield from _small_table()
    yield from _packed_table(capabilities[-1])
    for kernel, capability in itertools.product(("block_mask", "tile_lists"), capabilities):
        yield Row(kernel, capability, "bf16", 128, "everything", tile_table.Tile(64, None, 4, 1), (0, 1))
    yield from _cache_table(capabilities)
    others = [kernel for kernel in tile_table.INTERPRETED if kernel not in tile_table.ON_CACHES]
    for kernel, capability, width in itertools.product(others, capabilities, tile_table.WIDTHS):
        for dtype in ("bf16", "tf32", "ieee"):
            if dtype != "bf16" and capability != capabilities[-1]:
                continue  # float32 has the same tiles on every GPU and no wgmma, so the last GPU is enough
            if kernel in ("one_pass", "postprocess") and width > tile_table.ONE_PASS:
                continue
            size = DTYPES[dtype].itemsize
            of = functools.partial(tile_table.tiles_for, kernel, capability, size, width)
            plain, masked, rich = of(), of("masked"), of("rich")
            for index, tile in enumerate(plain[:1] if dtype == "ieee" else plain):
                variant = "biased" if kernel == "dbias" else "full"
                yield Row(kernel, capability, dtype, width, variant, tile, (index, len(plain)))
            best = plain[0], (0, len(plain))
            # One pass takes most of these calls, so for dq and dk/dv the variant `everything` is enough.
            seldom = kernel in ("dq", "dkdv") and width <= tile_table.ONE_PASS
            if kernel in ("preprocess", "postprocess", "dbias"):
                continue
            if rich != plain:
                for index, tile in enumerate(rich):
                    yield Row(kernel, capability, dtype, width, "biased", tile, (index, len(rich)))
            if dtype == "bf16" and kernel not in ("weights", "tangent_weights") and not seldom:
                if capability >= 90:  # on older GPUs causal and window calls have the loops of a full call
                    yield Row(kernel, capability, dtype, width, "causal", *best)
                if capability >= 90 and width <= 128:
                    narrow = tile_table.small_enough(of())
                    yield Row(kernel, capability, dtype, width, "window", narrow[0], (0, len(narrow)))
                yield Row(kernel, capability, dtype, width, "masked", masked[0], (0, len(masked)))
                if capability == capabilities[-1]:  # integer arithmetic, equal on every GPU
                    yield Row(kernel, capability, dtype, width, "dropout", rich[0], (0, len(rich)))
            if dtype == "bf16" or (dtype == "tf32" and width == 64 and capability == capabilities[-1]):
                yield Row(kernel, capability, dtype, width, "everything", rich[0], (0, len(rich)))
            if dtype == "bf16" and kernel in ("one_pass", "dkdv"):  # these kernels store sums in the loop
                yield Row(kernel, capability, dtype, width, "bias keys", rich[0], (0, len(rich)))
            if dtype == "bf16" and width == 64 and not seldom and capability == capabilities[-1]:
                yield Row(kernel, capability, "fp16", 64, "full", *best)
                yield Row(kernel, capability, dtype, 32, "full", *best)
                yield Row(kernel, capability, dtype, 16, "full", *best)
            if dtype == "bf16" and width == 128:
                yield Row(kernel, capability, dtype, 80, "full", *best)
            if dtype == "bf16" and width == tile_table.WIDTHS[-1]:
                yield Row(kernel, capability, dtype, 272, "full", *best)
                yield Row(kernel, capability, dtype, 257, "full", plain[-1], (len(plain) - 1, len(plain)))


def reported(row):
    """Return True if the committed table lists a Row: calls without options that use tensor cores."""
    if row.kernel in ON_HOPPER:
        return True
    if row.capability == 86:
        return False
    return row.dtype != "ieee" and row.variant in ("full", "causal", "biased" if row.kernel == "dbias" else "full")


def few(rows, some=False):
    """Yield the first Row of each kernel and of each GPU, most on the newest.

    some: also of each kernel on each GPU, of each variant and dtype, and of each kernel with all options.
    """

    def rank(row):
        return row.place[0] > 0, row.variant != "full", row.variant == "packed all", -row.capability

    seen = set()
    for row in sorted(rows, key=rank):
        found = {row.kernel, row.capability}
        if some:
            found |= {(row.kernel, row.capability), row.variant, row.dtype, (row.kernel, row.variant == "everything")}
        if not found <= seen:
            yield row
        seen |= found


def measure(rows, read=False, committed=None, other=False):
    """Compile Rows and print them. Return {row: broken rules} and the Reports."""
    bad, reports = {}, []
    with pool() as processes:
        compiled = processes.map(functools.partial(compile_row, read=read), rows)
        for row, report in zip(rows, compiled, strict=True):
            found = list(faults(row, report, committed, other))
            if found:
                bad[row] = found
            reports.append(report._replace(asm={}))
            print(f"{row}{report}" + "".join(f"\n    ^ {fault}" for fault in found), flush=True)
    return bad, reports


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", help="such as 90 for sm_90 (default: 80 90)")
    parser.add_argument("--filter", default="", help="only rows whose line contains this text")
    parser.add_argument("--few", action="store_true", help="one row of each kernel, and of each GPU")
    parser.add_argument("--some", action="store_true", help="also one of each kernel on each GPU, option and dtype")
    parser.add_argument("--report", action="store_true", help=f"write {TABLE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    if options.report and (options.capability or options.filter or options.few or options.some):
        parser.error("--report writes the whole table and takes no other option")
    if run.interpreting():
        sys.exit("make compile: unset TRITON_INTERPRET, or there is nothing to compile")
    began = time.monotonic()
    rows = [row for row in table(options.capability or (80, 90)) if options.filter in str(row)]
    if options.few or options.some:
        rows = list(few(rows, options.some))
    if options.report:
        rows = list(filter(reported, rows))
    print(f"triton {triton.__version__}\n{HEADER}", flush=True)
    text = TABLE.read_text()
    other = not options.report and f"triton {triton.__version__}:" not in text
    committed = None if other or options.report else kernels.loops(text)
    bad, reports = measure(rows, options.report, committed, other)
    print(f"{len(rows)} kernels in {time.monotonic() - began:.0f} s, {len(bad)} over budget")
    for row, found in bad.items():
        print(f"{row}{'; '.join(found)}")
    if options.report:
        TABLE.write_text(kernels.text(zip(rows, reports, strict=True)))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
