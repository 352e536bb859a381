"""Which tiles are fastest?    python -m fusedattn.bench.tune --kernel forward --dim 128

Tries tiles for each kernel and width, those of `launch.tiles` first, and prints rows for its table. On a GPU each
is held to the tolerance rule and timed, on a full and a causal call. Without one, or for a GPU that --capability names,
they are ranked by what they compile to: by the bound of `bounds`, half way between overlapped and serial if a
multiprocessor holds two blocks, serial if it holds one; what spills or loads nothing ahead is left out.
"""

import argparse
import contextlib
import functools
import itertools
import math
import sys
import time
from typing import NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources

from fusedattn.launch import run, tiles as configs
from fusedattn.launch.tiles import Tile
from tests.offline import bounds, compiled

from . import accuracy, cases, cost, providers, rows, timing, variants

PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4, "one_pass": 5}  # of matrices, that each computes
WANTED = dict(forward=(), dq=("query",), dkdv=("key", "value"), one_pass=("query", "key", "value"))  # gradients
DIMS = (64, 128, 256)
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "ieee"}
LENGTH = 2048  # where the goals begin
MOST_SPILLS = 256  # bytes a thread, of what is timed
MOST_FLOATS = 224  # a thread, that are alive through a turn


class Found(NamedTuple):
    """A tile that was tried: TFLOP/s, and milliseconds if it was timed; or, in why, what is against it."""

    tile: Tile
    shared: int = 0
    tflops: float = 0.0
    ms: float | None = None
    why: str = ""


def grid(kernel, capability, itemsize, width, most):
    """Tiles worth trying, from those of `configs` to the least like them; most is the shared memory of a block."""
    own, sizes = configs.tiles(kernel, capability, itemsize, width), (16, 32, 64, 128, 256)
    shapes = itertools.product(sizes, sizes, (4, 8), (1, 2, 3, 4))
    tiles = (Tile(*each, bulk=own[0].bulk) for each in shapes)
    known = {tile[:4] for tile in own}
    others = [
        tile for tile in tiles if tile[:4] not in known and _sensible(kernel, capability, itemsize, width, most, tile)
    ]
    return [*own, *sorted(others, key=lambda tile: min(_apart(tile, each) for each in own))]


def _apart(tile, other):
    return sum(abs(math.log2(mine / its)) for mine, its in zip(tile[:4], other[:4], strict=True))


def _sensible(kernel, capability, itemsize, width, most, tile):
    pairs = tile.rows * tile.keys
    by_keys = kernel in ("dkdv", "one_pass")
    kept, turned = (tile.keys, tile.rows) if by_keys else (tile.rows, tile.keys)
    threads = 32 * tile.warps
    results = kept * width * (2 if by_keys else 1)  # dk and dv
    floats = results + pairs * (1 if kernel == "forward" else 2)  # the scores, and their gradient
    floats += turned * width if kernel == "one_pass" else 0  # a tile of dq
    buffers = 0 if tile.stages == 1 else tile.stages * turned * 2 * width * itemsize
    wgmma = configs.architecture(capability) == 90 and itemsize == 2
    return (
        (8 if itemsize == 2 else 1) <= pairs / threads
        and floats / threads <= MOST_FLOATS
        and buffers <= most
        and (64 if wgmma else 16) <= kept
        and turned <= 2 * kept
    )


def estimate(row, report):
    """TFLOP/s that compiled code speaks for, of the GPU that `bounds` has for it."""
    gpu, warps = bounds.GPUS[row.capability], row.tile.warps
    held = bounds.blocks(gpu, report.registers, report.shared, warps, compiled.SHARED[row.capability])
    found = bounds.bound(report.loop, row.capability, warps)
    return (found.overlapped + found.serial) / 2 if held > 1 else found.serial


def compile_tile(row, heads):
    """The Report of a row, or why there is none; of a causal call too if heads are given, into Triton's cache."""
    try:
        report = compiled.compile_row(row, read=True, heads=heads)
        if heads is not None:
            causal = compiled.compile_row(row._replace(variant="causal"), heads=heads)
            report = report._replace(spills=max(report.spills, causal.spills))
        return report._replace(asm={})
    except Exception as error:  # the compiler refuses some tiles, each time with another exception
        return f"does not compile: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _against(report, most, spills):
    """What is against a compiled tile before it runs, or ""; most and spills are the bytes that it may take."""
    if isinstance(report, str):
        return report
    if report.spills > spills:
        return f"spills {report.spills} bytes"
    return f"takes {report.shared} bytes of shared memory" if report.shared > most else ""


def ranked(row, report):
    """Found of a tile by its Report alone."""
    why = _against(report, compiled.SHARED[row.capability], row.tile.spills)
    if not why and report.serialized:
        why = "waits for each wgmma in turn"
    if not why and row.tile.stages == 1:
        why = "loads nothing ahead, and a bound knows no latency"
    if why:
        return Found(row.tile, why=why)
    return Found(row.tile._replace(spills=report.spills), report.shared, estimate(row, report))


def typical(dim, dtype):
    """The full and the causal case that tiles are timed on."""
    found = [case for case in cases.LONG + cases.MORE if case.D == case.Dv == dim and case.Sq == case.Sk == LENGTH]
    full, causal = (next(case for case in found if case.causal == causal) for causal in (False, True))
    return full._replace(dtype=dtype), causal._replace(dtype=dtype)


class Bench:
    """One kernel on one case: what it computes, and what of it is timed; what a backward needs besides runs with it."""

    def __init__(self, kernel, case, device):
        self.kernel, self.case, self.device = kernel, case, device
        self.tensors = case.draw(device)
        self.truth = accuracy.truth(case, self.tensors)
        self.call = providers.find("fusedattn:triton")(case, self.tensors)

    def _step(self, names):
        """A closure: the forward with what a backward needs, or the gradients of these inputs alone."""
        inputs = {name: getattr(self.tensors, name).detach() for name in ("query", "key", "value")}
        if self.kernel == "forward":
            leaves = [tensor.requires_grad_() for tensor in inputs.values()]
            return lambda: self.call(*leaves)
        leaves = [inputs[name].requires_grad_() for name in names]
        out = self.call(*inputs.values())
        return lambda: torch.autograd.grad(out, leaves, self.tensors.grad_out, retain_graph=True)

    def measure(self, budget_ms=100.0):
        """The measured columns of a CSV row with its status, of the tile in force; and what is wrong, or ""."""
        forward = self.kernel == "forward"
        result = self._step(("query", "key", "value"))()
        error, eager, wrong = accuracy.judge(self.case, "forward" if forward else "backward", result, self.truth)
        del result
        found = dict(err_max=error, err_eager=eager, status="wrong" if wrong else "ok")
        if wrong:
            return found, wrong
        step = self._step(WANTED[self.kernel])
        times = timing.measure(step, self.device, budget_ms)
        flops = cost.flops(self.case, "forward") * PRODUCTS[self.kernel] / PRODUCTS["forward"]
        found |= times.columns() | dict(tflops=flops / times.p50 / 1e9)
        return found, ""


def timed(row, report, benches, most, write):
    """Found of a tile by its time on all benches; write(case, tile, columns) keeps what was measured."""
    why = _against(report, most, MOST_SPILLS)
    if why:
        return Found(row.tile, why=why)
    total = flops = 0.0
    for bench in benches:
        try:
            with variants.only(row.kernel, row.tile):
                columns, why = bench.measure()
        except OutOfResources as error:
            columns, why = dict(status=f"unsupported: {error}"), str(error)
        write(bench.case, row.tile, columns)
        if why:
            return Found(row.tile, why=why)
        total += columns["ms_p50"]
        flops += columns["tflops"] * columns["ms_p50"]
    return Found(row.tile._replace(spills=report.spills), report.shared, flops / total, total)


def csv_row(machine, kernel, case, tile, columns):
    """A row whose mode is a kernel, and whose operations are those of its own products."""
    options = f"tile={tile.rows}x{tile.keys}w{tile.warps}s{tile.stages}"
    return rows.row(machine, kernel, "fusedattn:triton", case, options=options, **columns)


def sweep(tiles, reports, judge, deadline, clock=time.monotonic):
    """Founds, judge(tile, report), of tiles in turn until the deadline: best first, then what came to nothing."""
    found = []
    with contextlib.closing(reports):
        for number, tile in enumerate(tiles):
            if clock() >= deadline:
                _say(f"the time is over: {len(tiles) - number} of {len(tiles)} tiles were not tried")
                break
            each = judge(tile, next(reports))
            found.append(each)
            _say(f"[{number + 1}/{len(tiles)}] {_text(each.tile)}: {each.why or _speed(each)}")
    return sorted(found, key=lambda each: (bool(each.why), -each.tflops))


def _say(line):
    print(line, file=sys.stderr, flush=True)


def _speed(found):
    return f"{found.tflops:.1f} TFLOP/s" + ("" if found.ms is None else f", {found.ms:.4g} ms")


def _text(tile):
    spills = f", spills={tile.spills}" if tile.spills else ""
    return f"Tile({', '.join(map(str, tile[:4]))}{spills}{', bulk=True' if tile.bulk else ''})"


def entry(key, found, said):
    """Lines for `configs.TABLE`: what came through as comments, best first, and the row, with what is said of it.

    The last tile of a row fits every GPU and serves narrow bands.
    """
    good = [each for each in found if not each.why]
    if not good:
        return [f"# {key}: no tile came through. {said}"]
    last = [each.tile for each in good if each.shared <= compiled.SMALLEST and max(each.tile[:2]) <= 64]
    row = dict.fromkeys((good[0].tile, *(last[:1] or configs.tiles(*key)[-1:])))
    if good[0].tile in last:
        row = (good[0].tile,)
    tiles = ", ".join(map(_text, row)) + ("," if len(row) == 1 else "")
    kernel, *numbers = key
    return [
        *(f"#     {_text(each.tile)}: {_speed(each)}" for each in good),
        f"# {said}: {_speed(good[0])}",
        f'("{kernel}", {", ".join(map(str, numbers))}): ({tiles}),',
    ]


def tune(kernel, dim, dtype, capability, pool, deadline, measuring=None):
    """Lines of one row of the table; measuring is (device, CSV writer, its machine), None ranks by compiled code."""
    itemsize = getattr(torch, dtype).itemsize

    def row(tile):
        return compiled.Row(kernel, capability, DTYPES[dtype], dim, "full", tile, (0, 1))

    if measuring is None:
        heads, most = None, compiled.SHARED[capability]
        said = f"ranked by compiled code, nothing was timed; bound on {bounds.GPUS[capability].name}"
        said = f"{said}, triton {triton.__version__}"

        def judge(tile, report):
            return ranked(row(tile), report)

    else:
        device, writer, machine = measuring
        most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        benches = [Bench(kernel, case, device) for case in typical(dim, dtype)]
        heads = benches[0].case.Hq
        said = f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, full and causal S {LENGTH}"

        def write(case, tile, columns):
            writer.write(csv_row(machine, kernel, case, tile, columns))

        def judge(tile, report):
            return timed(row(tile), report, benches, most, write)

    tiles = grid(kernel, capability, itemsize, dim, most)
    reports = pool.map(functools.partial(compile_tile, heads=heads), map(row, tiles))
    key = (kernel, configs.architecture(capability), itemsize, dim)
    return entry(key, sweep(tiles, reports, judge, deadline), said)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog="python -m fusedattn.bench.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kernel", nargs="+", choices=PRODUCTS, default=list(PRODUCTS), help="default: all")
    parser.add_argument("--dim", nargs="+", type=int, choices=DIMS, default=list(DIMS), help="width; default: all")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--capability", type=int, choices=bounds.GPUS, help="rank for this one, without a GPU")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no tile is started")
    parser.add_argument("--csv", help="append what is measured to this file")
    parser.add_argument("--commit", help="what the rows say, where git cannot tell")
    options = parser.parse_args(arguments)
    if run.interpreting():
        parser.error("TRITON_INTERPRET is set, so there is nothing to compile; unset it")
    measuring, capability = None, options.capability
    if capability is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        capability = run.capability(device)
        measuring = device, rows.Writer(options.csv), rows.machine(device, options.commit)
    else:
        capability = capability or 90
        if options.csv:
            parser.error("--csv: tiles are only ranked here, so there is nothing measured to write")
        if options.dtype == "float32":
            parser.error("--dtype float32: without tensor cores there is no bound to rank by; it takes a GPU")
    every = itertools.product(options.kernel, options.dim)
    work = [(kernel, dim) for kernel, dim in every if kernel != "one_pass" or dim <= configs.ONE_PASS]
    start = time.monotonic()
    with compiled.pool() as pool:
        for number, (kernel, dim) in enumerate(work):
            left = start + options.seconds - time.monotonic()
            deadline = time.monotonic() + left / (len(work) - number)  # a fair share of what is left
            print("\n".join(tune(kernel, dim, options.dtype, capability, pool, deadline, measuring)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
