"""Which tiles are fastest on this GPU?

Tries tiles for a kernel and width, those of `launch.tiles` first, and prints rows for its table. A tile is held to the
tolerance rule and timed, on a full and a causal call; one that spills much or does not compile is left out.
"""

import contextlib
import itertools
import math
import time
from typing import NamedTuple
from unittest import mock

import torch
from fusedattn.bench import accuracy, cases, cost, providers, rows, timing

from fusedattn.launch import failures, launcher, run, tiles as tile_table
from fusedattn.launch.tiles import Tile

from . import questions

PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4, "one_pass": 5}  # {kernel: matrix products}
WANTED = dict(forward=(), dq=("query",), dkdv=("key", "value"), one_pass=("query", "key", "value"))  # gradients
DIMS = (64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
LENGTH = 2048  # where the goals begin
MOST_SPILLS = 256  # bytes a thread, of a tile that is timed
MOST_FLOATS = 224  # a thread holds in one step of the loop
SMALLEST = 101376  # bytes of shared memory that a block has on every GPU of compute capability 8.0 and later


class Found(NamedTuple):
    """A tile that was tried: its speed and time; or, in why, what is against it."""

    tile: Tile
    shared: int = 0
    tflops: float = 0.0
    ms: float = 0.0
    why: str = ""


def grid(kernel, capability, itemsize, width, most):
    """Tiles worth trying, from those of the table to the least like them; most is the shared memory of a block."""
    known, sizes = tile_table.tiles(kernel, capability, itemsize, width), (16, 32, 64, 128, 256)
    shapes = itertools.product(sizes, sizes, (4, 8), (1, 2, 3, 4))
    tiles = (Tile(*shape, bulk=known[0].bulk) for shape in shapes if shape not in {tile[:4] for tile in known})
    others = [tile for tile in tiles if _sensible(kernel, capability, itemsize, width, most, tile)]
    return [*known, *sorted(others, key=lambda tile: min(_apart(tile, one) for one in known))]


def _apart(tile, other):
    return sum(abs(math.log2(mine / its)) for mine, its in zip(tile[:4], other[:4], strict=True))


def _sensible(kernel, capability, itemsize, width, most, tile):
    pairs, threads = tile.rows * tile.keys, 32 * tile.warps
    by_keys = kernel in ("dkdv", "one_pass")
    kept, walked = (tile.keys, tile.rows) if by_keys else (tile.rows, tile.keys)
    floats = kept * width * (2 if by_keys else 1)  # the results: dk and dv are two
    floats += pairs * (1 if kernel == "forward" else 2)  # the scores, and their gradient
    floats += walked * width if kernel == "one_pass" else 0  # a tile of dq
    buffers = 0 if tile.stages == 1 else tile.stages * walked * 2 * width * itemsize
    wgmma = tile_table.architecture(capability) == 90 and itemsize == 2
    return (
        (8 if itemsize == 2 else 1) <= pairs / threads
        and floats / threads <= MOST_FLOATS
        and buffers <= most
        and (64 if wgmma else 16) <= kept
        and walked <= 2 * kept
    )


def typical(dim, dtype):
    """The full and the causal case that tiles are timed on."""
    alike = [case for case in cases.LONG + cases.MORE if case.D == case.Dv == dim and case.Sq == case.Sk == LENGTH]
    full, causal = (next(case for case in alike if case.causal == causal) for causal in (False, True))
    return full._replace(dtype=dtype), causal._replace(dtype=dtype)


class Bench:
    """One kernel on one case, with the other kernels of a backward: judged, and timed."""

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
        """(the measured columns of a row with its status, what is wrong or ""), by the tile in force."""
        mode = "forward" if self.kernel == "forward" else "backward"
        result = self._step(("query", "key", "value"))()
        error, eager, wrong = accuracy.judge(self.case, mode, result, self.truth)
        del result
        measured = dict(err_max=error, err_eager=eager, status="wrong" if wrong else "ok")
        if wrong:
            return measured, wrong
        times = timing.measure(self._step(WANTED[self.kernel]), self.device, budget_ms)
        flops = cost.flops(self.case, "forward") * PRODUCTS[self.kernel] / PRODUCTS["forward"]
        return measured | times.columns() | dict(tflops=flops / times.p50 / 1e9), ""


@contextlib.contextmanager
def compiled(kernel):
    """The list of the compiled kernels that launches of a kernel load inside."""
    load, loaded = launcher.load, []

    def keep(function, *rest):
        loaded.append((function, load(function, *rest)))
        return loaded[-1][1]

    with mock.patch.object(launcher, "load", keep):
        mine = []
        yield mine
    mine += [one for function, one in loaded if function is run.KERNELS[kernel]]


def timed(kernel, tile, benches, write):
    """The Found of a tile on all benches; write(case, tile, columns) keeps what was measured."""
    total = flops = 0.0
    spills = shared = 0
    for bench in benches:
        failures.forget()  # of the tile before
        try:
            with providers.only(kernel, tile), compiled(kernel) as loaded:
                columns, why = bench.measure()
        except Exception as error:  # the compiler refuses some tiles, with all kinds of exceptions
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            write(bench.case, tile, dict(status=f"unsupported: {why}"))
            return Found(tile, why=why)
        shared = max([shared, *(one.metadata.shared for one in loaded)])
        spills = max([spills, *(4 * one.n_spills for one in loaded)])  # registers of 4 bytes
        if spills > MOST_SPILLS:
            return Found(tile, why=f"spills {spills} bytes")
        write(bench.case, tile, columns)
        if why:
            return Found(tile, why=why)
        total += columns["ms_p50"]
        flops += columns["tflops"] * columns["ms_p50"]
    return Found(tile._replace(spills=spills), shared, flops / total, total)


def csv_row(machine, kernel, case, tile, columns):
    """A row whose mode is a kernel, and whose operations are those of its own products."""
    options = f"tile={tile.rows}x{tile.keys}w{tile.warps}s{tile.stages}"
    return rows.row(machine, kernel, "fusedattn:triton", case, options=options, **columns)


def sweep(tiles, judge, deadline, clock=time.monotonic):
    """The Founds of tiles, judge(tile), until the deadline: best first, then those with a why."""
    found = []
    for number, tile in enumerate(tiles):
        if clock() >= deadline:
            questions.say(f"the time is over: {len(tiles) - number} of {len(tiles)} tiles were not tried")
            break
        found.append(judge(tile))
        questions.say(f"[{number + 1}/{len(tiles)}] {_text(found[-1].tile)}: {found[-1].why or _speed(found[-1])}")
    return sorted(found, key=lambda one: (bool(one.why), -one.tflops))


def _speed(found):
    return f"{found.tflops:.1f} TFLOP/s, {found.ms:.4g} ms"


def _text(tile):
    spills = f", spills={tile.spills}" if tile.spills else ""
    return f"Tile({', '.join(map(str, tile[:4]))}{spills}{', bulk=True' if tile.bulk else ''})"


def entry(key, found, said):
    """Lines for `launch.tiles.TABLE`: the timed tiles as comments, best first, and the row, with what is said of it.

    The last tile of a row fits every GPU and serves narrow bands.
    """
    good = [one for one in found if not one.why]
    if not good:
        return [f"# {key}: no tile came through. {said}"]
    small = [one.tile for one in good if one.shared <= SMALLEST and max(one.tile[:2]) <= 64]
    row = dict.fromkeys((good[0].tile, *(small[:1] or tile_table.tiles(*key)[-1:])))
    if good[0].tile in small:
        row = (good[0].tile,)
    tiles = ", ".join(map(_text, row)) + ("," if len(row) == 1 else "")
    kernel, *numbers = key
    return [
        *(f"#     {_text(one.tile)}: {_speed(one)}" for one in good),
        f"# {said}: {_speed(good[0])}",
        f'("{kernel}", {", ".join(map(str, numbers))}): ({tiles}),',
    ]


def tune(kernel, dim, dtype, device, writer, machine, deadline):
    """Lines of one row of the table."""
    itemsize, capability = getattr(torch, dtype).itemsize, run.capability(device)
    most = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    benches = [Bench(kernel, case, device) for case in typical(dim, dtype)]

    def write(case, tile, columns):
        writer.write(csv_row(machine, kernel, case, tile, columns))

    tiles = grid(kernel, capability, itemsize, dim, most)
    found = sweep(tiles, lambda tile: timed(kernel, tile, benches, write), deadline)
    said = f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, full and causal S {LENGTH}"
    return entry((kernel, tile_table.architecture(capability), itemsize, dim), found, said)


def main(arguments):
    words = questions.parser("tune", questions.OTHERS["tune"])
    words.add_argument("--kernel", nargs="+", choices=PRODUCTS, default=list(PRODUCTS), help="default: all")
    words.add_argument("--dim", nargs="+", type=int, choices=DIMS, default=list(DIMS), help="width; default: all")
    words.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    words.add_argument("--seconds", type=float, default=float("inf"), help="after which no tile is started")
    options = words.parse_args(arguments)
    if not torch.cuda.is_available() or run.interpreting():
        questions.say("tune: it times tiles, which needs an NVIDIA GPU, and TRITON_INTERPRET not set")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    writer, machine = rows.Writer(options.csv), rows.machine(device, options.commit)
    every = itertools.product(options.kernel, options.dim)
    work = [(kernel, dim) for kernel, dim in every if kernel != "one_pass" or dim <= tile_table.ONE_PASS]
    start = time.monotonic()
    for number, (kernel, dim) in enumerate(work):
        left = start + options.seconds - time.monotonic()
        deadline = time.monotonic() + left / (len(work) - number)  # a fair share of the time that is left
        print("\n".join(tune(kernel, dim, options.dtype, device, writer, machine, deadline)), flush=True)
    return 0
