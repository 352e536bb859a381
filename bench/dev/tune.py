"""Which tiles are fastest on this GPU?

Times tiles for a kernel and width, those of `launch.tiles` first and then others like them, on a full and a causal call
that is held to the tolerance rule, and prints the best as a row for that table.
"""

import contextlib
import itertools
import math
import time

import torch
from fusedattn.bench import cases, cost, engine, providers
from fusedattn.bench.attention import Attention

from fusedattn.launch import failures, run, tiles as tile_table
from fusedattn.launch.tiles import Tile

from . import questions

PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4, "one_pass": 5}  # {kernel: matrix products}
WANTED = dict(forward=(), dq=(0,), dkdv=(1, 2), one_pass=(0, 1, 2))  # the gradients of query, key and value
DIMS = (64, 128, 256)
LENGTH = 2048  # where the goals begin
MOST_FLOATS = 224  # a thread holds in one step of the loop: results and scores


class Kernel(Attention):
    """Attention by one tile of one kernel, which the mode names; the other kernels of a backward have theirs."""

    def __init__(self, case, device, tile):
        super().__init__(case, device)
        self.tile = tile

    def work(self, mode):
        return cost.flops(self.case, "forward") * PRODUCTS[mode] / PRODUCTS["forward"], None

    @contextlib.contextmanager
    def step(self, mode, call):
        """The function computes the forward with what a backward needs, or the gradients of the kernel alone."""
        failures.forget()  # of the tile before
        leaves = [tensor.detach().requires_grad_() for tensor in self.tensors.inputs]
        with providers.only(mode, self.tile):
            out, wanted = call(*leaves), [leaves[number] for number in WANTED[mode]]
            if mode == "forward":
                yield lambda: call(*leaves)
            else:
                yield lambda: torch.autograd.grad(out, wanted, self.tensors.grad_out, retain_graph=True)

    def judge(self, mode, call, result):
        if mode == "forward":
            return super().judge(mode, call, result)
        with super().step("backward", call) as step:
            return super().judge("backward", call, step())


def candidates(kernel, capability, itemsize, width):
    """Tiles worth trying: those of the table, then from the most to the least like them."""
    known, sizes = tile_table.tiles(kernel, capability, itemsize, width), (16, 32, 64, 128, 256)

    def far(tile):
        return min(sum(abs(math.log2(x / y)) for x, y in zip(tile[:4], one[:4], strict=True)) for one in known)

    def fits(tile):
        kept = 2 * tile.keys if kernel in ("dkdv", "one_pass") else tile.rows
        scores = tile.rows * tile.keys * (1 if kernel == "forward" else 2)  # and their gradients
        return kept * width + scores <= MOST_FLOATS * 32 * tile.warps

    shapes = itertools.product(sizes, sizes, (4, 8), (1, 2, 3, 4))
    others = (Tile(*shape, bulk=known[0].bulk) for shape in shapes if shape not in {tile[:4] for tile in known})
    return [*known, *sorted(filter(fits, others), key=far)]


def timed(kernel, tile, chosen, writer, machine, options):
    """(TFLOP/s of a tile over all cases, what keeps it from being measured or ""); each case is a row."""
    named = [case._replace(options=f"tile={providers.tile_name(tile).replace('+bulk', '')}") for case in chosen]
    work = engine.units(named, ["fusedattn:triton"], [kernel])
    seconds = operations = 0.0
    for row, why in engine.measure(
        machine, work, options.device, options.repeat_ms, lambda case, device: Kernel(case, device, tile)
    ):
        writer.write(row)
        if row.status != "ok":
            return 0.0, why or row.status
        seconds, operations = seconds + row.ms_p50, operations + row.ms_p50 * row.tflops
    return operations / seconds, ""


def text(tile):
    return f"Tile({', '.join(map(str, tile[:4]))}{', bulk=True' * tile.bulk}{', tma=True' * tile.tma})"


def tune(kernel, dim, writer, machine, options, deadline):
    """Lines: the tiles that were timed until a deadline, best first, and the row of the table that they make.

    The last tile of a row fits every GPU and serves narrow bands: the one of the table stays.
    """
    itemsize, capability = getattr(torch, options.dtype).itemsize, run.capability(options.device)
    tiles, speeds = candidates(kernel, capability, itemsize, dim), {}
    alike = [case for case in cases.HOPPER if (case.D, case.Sq) == (dim, LENGTH)]  # a full one and a causal one
    chosen = [case._replace(dtype=options.dtype) for case in alike]
    for number, tile in enumerate(tiles, 1):
        if time.monotonic() >= deadline:
            questions.say(f"the time is over: {len(tiles) - number + 1} of {len(tiles)} tiles were not tried")
            break
        speed, why = timed(kernel, tile, chosen, writer, machine, options)
        speeds |= {} if why else {tile: speed}
        questions.say(f"[{number}/{len(tiles)}] {text(tile)}: {why or f'{speed:.1f} TFLOP/s'}")
    key = kernel, tile_table.architecture(capability), itemsize, dim
    best = sorted(speeds, key=speeds.get, reverse=True)
    about = f"{machine['gpu']}, torch {machine['torch']}, triton {machine['triton']}, full and causal S {LENGTH}"
    yield from (f"#     {text(tile)}: {speeds[tile]:.1f} TFLOP/s" for tile in best)
    yield f"# {about}: {f'{speeds[best[0]]:.1f} TFLOP/s' if best else 'no tile came through'}"
    if best:
        row = dict.fromkeys(map(text, (best[0], tile_table.tiles(*key)[-1])))
        yield f'("{kernel}", {", ".join(map(str, key[1:]))}): ({", ".join(row)},),'


def main(arguments):
    words = questions.parser("tune")
    words.add_argument("--kernel", nargs="+", choices=PRODUCTS, default=list(PRODUCTS), help="default: all")
    words.add_argument("--dim", nargs="+", type=int, choices=DIMS, default=list(DIMS), help="width; default: all")
    words.add_argument("--dtype", choices=cases.DTYPES, default="bfloat16")
    words.add_argument("--seconds", type=float, default=float("inf"), help="after which no tile is started")
    options = words.parse_args(arguments)
    if not torch.cuda.is_available() or run.interpreting():
        questions.say("tune: it times tiles, which needs an NVIDIA GPU, and TRITON_INTERPRET not set")
        return 2
    options.device = torch.device("cuda", torch.cuda.current_device())
    writer, machine = questions.opened(options)
    every = itertools.product(options.kernel, options.dim)
    work = [(kernel, dim) for kernel, dim in every if kernel != "one_pass" or dim <= tile_table.ONE_PASS]
    start = time.monotonic()
    for number, (kernel, dim) in enumerate(work):
        left = start + options.seconds - time.monotonic()
        deadline = time.monotonic() + left / (len(work) - number)  # a fair share of the time that is left
        print("\n".join(tune(kernel, dim, writer, machine, options, deadline)), flush=True)
    return 0
