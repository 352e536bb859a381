"""Compiles one kernel without a GPU, and reads its registers, spills, shared memory and instructions.

The package launches the kernel as on a GPU, so that each argument is the same.
"""

import contextlib
import io
import multiprocessing
import os
import re
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple
from unittest import mock

import torch
import triton

from fusedattn.call.options import Call, inputs
from fusedattn.launch import run as launch, tile_table
from fusedattn.operators import attention, backward, decode, tangent

from . import absent, flow, hazards, operands
from .sass import disassemble

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes of shared memory per block
SMALLEST = min(SHARED.values())
INSTRUCTIONS = {
    "wgmma": r"\bwgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tcgen05": r"\btcgen05\.mma",
    "tma": r"\bcp\.(?:reduce\.)?async\.bulk\.tensor",
    "cp.async": r"\bcp\.async\.c[ag]",
}

ON_HOPPER = *tile_table.ON_HOPPER, *tile_table.PRODUCTS  # kernels in Gluon
ONE_PASS = "one_pass", "postprocess", *tile_table.BACKWARDS, *tile_table.PRODUCTS
REPEATABLE = *tile_table.REPEATABLE, *tile_table.PRODUCTS

BATCH, HEADS, LENGTH = 2, 8, 1024


def _meta(*shape, dtype=torch.bool):
    return torch.empty(shape, dtype=dtype, device="meta")


VARIANTS = {  # fields of a Call that a variant adds to `full`
    "full": {},
    "causal": dict(right=0),
    "window": dict(left=1024, right=0),
    "masked": dict(mask=_meta(BATCH, 1, LENGTH, LENGTH)),
    "dropout": dict(dropout_p=0.1, seed=_meta(1, dtype=torch.int64)),
    "biased": dict(bias=_meta(1, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16)),
}
_ALL_OPTIONS = VARIANTS["masked"] | VARIANTS["dropout"] | dict(left=100, right=10, softcap=30.0)
_ALL_OPTIONS |= dict(key_mask=_meta(BATCH, LENGTH), query_mask=_meta(BATCH, LENGTH))
_ALL_OPTIONS |= dict(bias=_meta(BATCH, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16))
_ALL_OPTIONS |= {name: _meta(1, HEADS, dtype=torch.float32) for name in ("alibi_slopes", "sinks")}
VARIANTS["everything"] = _ALL_OPTIONS
VARIANTS["bias keys"] = dict(bias=_meta(1, HEADS, 1, LENGTH, dtype=torch.bfloat16))
VARIANTS["bias rows"] = dict(bias=_meta(1, HEADS, LENGTH, 1, dtype=torch.bfloat16))
_OFFSETS = dict(cu_seqlens_q=_meta(9, dtype=torch.int32), cu_seqlens_k=_meta(9, dtype=torch.int32))
VARIANTS |= {
    "packed": _OFFSETS,
    "packed all": _OFFSETS
    | _ALL_OPTIONS
    | dict(mask=_meta(8, 1, LENGTH, LENGTH), bias=_meta(8, 1, LENGTH, LENGTH, dtype=torch.bfloat16))
    | dict(key_mask=_meta(1, LENGTH), query_mask=_meta(1, LENGTH), max_seqlen_q=LENGTH, max_seqlen_k=LENGTH),
}
# splits: few heads, so that programs share the keys of a row
VARIANTS |= dict(scale=dict(scale=-0.1), partial=dict(partial=True), splits={})
# options of the Hopper forward
BY_HOPPER = "biased", "dropout", "softcap", "alibi_slopes", "sinks", "query_mask", "key_mask", "masked"
VARIANTS |= {name: {name: _ALL_OPTIONS[name]} for name in BY_HOPPER if name in _ALL_OPTIONS}
VARIANTS["registers"] = {name: _ALL_OPTIONS[name] for name in BY_HOPPER if name in _ALL_OPTIONS}
ALL = ("everything", "packed all")  # variants with every option
# Variants of calls to a cache.
PAGES = {"contiguous": None, "shared": None, "one page": 32768, "pages": 256, "small pages": 16, "everything": 16}
PAGES |= dict(prefill=256)  # by the Hopper forward
CAPACITY = {"everything": 256}  # too few keys to split among programs
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "ieee": torch.float32, "tf32": torch.float32}


class Row(NamedTuple):
    """A kernel to compile, for one kind of call. place: (index of the tile, number of tiles) in the tile table."""

    kernel: str
    capability: int
    dtype: str
    dim: int
    variant: str
    tile: tile_table.Tile | tile_table.Pipeline
    place: tuple

    @property
    def turning(self):
        """Return the number of warps that run the kernel's main loop."""
        return self.tile.warps if isinstance(self.tile, tile_table.Tile) else 4 * self.tile.warpgroups

    def __str__(self):
        tile = f"{self.tile.rows}{'' if self.tile.keys is None else f'x{self.tile.keys}'}"
        tile += f" w{self.turning} s{self.tile.stages}"
        return f"{self.kernel:25}sm_{self.capability:<5}{self.dtype:5} d{self.dim:<4}{self.variant:11}{tile:17}"


class Report(NamedTuple):
    """Report of a compiled kernel: its resources, the instruction counts of its PTX, and its main loop.

    loops: one step of each main loop; `loop` is the shortest. asked: numbers of registers after `setmaxnreg`. copied:
    names of tensor copies. overtaken: findings of `hazards`. fusible: number of `operands.fusible`. disordered:
    findings of `operands`. Most are empty if the compiled code was not read.
    """

    registers: int
    spills: int  # bytes stored
    shared: int  # bytes
    serialized: bool
    counts: dict
    loop: tuple | None  # instructions, if read
    seconds: float
    asm: dict
    loops: tuple = ()
    asked: frozenset = frozenset()
    copied: frozenset = frozenset()
    overtaken: tuple = ()
    fusible: int = 0
    disordered: tuple = ()

    def __str__(self):
        counts = " ".join(f"{self.counts[name]:>{len(name)}}" for name in INSTRUCTIONS)
        loop = "-" if self.loop is None else len(self.loop)
        wgmma = "SERIALISED" if self.serialized else "-"
        return (
            f"{self.registers:>4} {self.spills:>6} {self.shared:>7} {counts} {loop:>5} {wgmma:>10} {self.seconds:>5.1f}"
        )


class _Skipped:
    """Substitute for a kernel and its compiled form that does nothing."""

    arg_names, run = (), None

    def warmup(self, **arguments):
        return self

    def __getitem__(self, grid):
        return lambda *arguments, stream: None


class _Compiler(_Skipped):
    """Substitute for a kernel that compiles and is never launched."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, None

    def warmup(self, **arguments):
        self.compiled = self.kernel.warmup(**arguments)
        return self


@contextlib.contextmanager
def _everything_but_a_gpu(kernels, row):
    """Make launches only compile, for the GPU and with the tile of a Row, within a context."""
    tiles = tile_table.INTERPRETED | {row.kernel: (row.tile,)}
    form, in_gluon = launch.form_on_hopper, row.kernel in ON_HOPPER
    with (
        absent.target(row.capability),
        absent.rounding("tf32" if row.dtype == "tf32" else "ieee"),
        mock.patch.object(launch, "KERNELS", kernels),
        mock.patch.object(launch, "candidates", lambda name, *_: tiles[name]),
        mock.patch.object(launch, "form_on_hopper", lambda *of: row.tile if in_gluon else form(*of)),
        triton.knobs.compilation.scope(),
        triton.knobs.nvidia.scope(),
        triton.knobs.cache.scope(),
        tempfile.TemporaryDirectory() as folder,
    ):
        triton.knobs.cache.dir = folder
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        yield


def _call(row):
    """Call the operator that launches a Row's kernel, on tensors without data."""
    everything, batch = row.variant in ALL, 1 if "packed" in row.variant else BATCH
    few = row.variant == "splits"
    batch, all_heads, group = 1 if few else batch, 1 if few else HEADS, 4 if everything else 1

    def tensor(heads):
        return torch.empty(batch, LENGTH, heads, row.dim, dtype=DTYPES[row.dtype], device="meta").transpose(1, 2)

    tensors = dict(query=tensor(all_heads), **{name: tensor(all_heads // group) for name in ("key", "value")})
    if row.kernel in ON_HOPPER and row.dim == tile_table.IN_PARTS:
        tensors["value"] = tensors["value"][..., :128]
    plain = dict.fromkeys(Call._fields) | dict(top_left=False, scale=row.dim**-0.5, dropout_p=0.0, named=True)
    call = Call(**plain | tensors | VARIANTS[row.variant])
    moves = row.kernel in ("tangent", "tangent_weights")
    need_weights = row.kernel in ("weights", "tangent_weights") or everything
    backend = "hopper" if row.kernel in ON_HOPPER else "triton"
    of_forward = "hopper" if row.kernel == "hopper" else "triton"
    out, _, weights, stats = attention._forward(*call, True, need_weights, True, of_forward)
    if moves:
        given = [None if x is None else torch.empty_like(x) for x in inputs(call)]
        tangent._tangent(*given, out, stats, *call, need_weights, "triton")
    elif row.kernel not in ("forward", "weights", "hopper"):
        need = [x is not None for x in inputs(call)]
        if row.kernel in ONE_PASS:
            need[-2:] = False, False  # one pass cannot sum over whole rows, as these gradients do
        repeatable = row.kernel not in ONE_PASS or row.kernel in REPEATABLE
        with mock.patch.object(torch, "are_deterministic_algorithms_enabled", lambda: repeatable):
            grad_weights = weights if everything else None
            grad_out = torch.empty_like(out, dtype=call.query.dtype)  # the output of partial calls is float32
            backward._backward(grad_out, None, grad_weights, out, weights, stats, *call, backend, need)


def _call_on_cache(row):
    """Call the operator that launches a Row's kernel for caches, on tensors without data."""
    heads, capacity, dtype = 8, CAPACITY.get(row.variant, 32768), DTYPES[row.dtype]
    rows = tile_table.PREFILL_ROWS if row.kernel == "hopper" else tile_table.DECODE.get(row.kernel, 16) // heads
    page = PAGES[row.variant]
    batch, table = BATCH, None
    if page is not None:
        batch, table = BATCH * capacity // page, _meta(BATCH, capacity // page, dtype=torch.int32)

    def tensor(batch, length, heads, most=tile_table.WIDEST_CACHED):
        return _meta(batch, length, heads, min(row.dim, most), dtype=dtype).transpose(1, 2)

    query, new = tensor(BATCH, rows, heads), tensor(BATCH, 32, 1)
    of_value = 128 if row.dim == tile_table.IN_PARTS else tile_table.WIDTHS[-1]
    key, value = (tensor(batch, page or capacity, 1, most) for most in (tile_table.WIDEST_CACHED, of_value))
    value = key[..., :of_value] if row.variant == "shared" else value
    caches = key, value, _meta(BATCH, dtype=torch.int32), table
    turning, masks, numbers = (None, None, False), (None,) * 6, (None, 0)
    if row.variant == "everything":
        angles = _meta(capacity, row.dim // 2, dtype=torch.float32)
        turning = angles, angles, True
        each_head = _meta(1, heads, dtype=torch.float32)
        bias = _meta(BATCH, heads, rows, capacity, dtype=dtype)
        masks = bias, each_head, each_head, _meta(BATCH, 1, rows, capacity), _meta(BATCH, capacity), _meta(BATCH, rows)
        numbers = 100, 10
    if row.kernel == "append":
        values = tensor(BATCH, 32, 1, tile_table.WIDTHS[-1])
        decode._append_operator(*caches, new, values, *turning, True, "triton")
    else:
        cap = 30.0 if row.variant == "everything" else None
        backend = "hopper" if row.kernel == "hopper" else "triton"
        decode._decode_operator(
            query, *caches, 0, *turning, *masks, *numbers, False, row.dim**-0.5, cap, True, True, backend
        )


def compile_row(row, read=False):
    """Compile a Row and return its Report. SASS is read for plain calls and wgmma, and always if `read`."""
    compiler, log, began = _Compiler(launch.KERNELS[row.kernel]), io.StringIO(), time.monotonic()
    compiler.kernel.device_caches.clear()  # a cached kernel would write no log
    kernels = dict.fromkeys(launch.KERNELS, _Skipped()) | {row.kernel: compiler}
    with _everything_but_a_gpu(kernels, row), contextlib.redirect_stdout(log):
        _call_on_cache(row) if row.kernel in tile_table.ON_CACHES or row.variant == "prefill" else _call(row)
    seconds, asm, said = time.monotonic() - began, compiler.compiled.asm, log.getvalue()
    ptx = asm["ptx"]
    plain = row.variant == "full" and row.tile.keys and row.dtype != "ieee"
    read = plain or read or "wgmma.mma_async" in ptx  # `hazards` needs the code of each kernel with wgmma
    sass = disassemble(asm["cubin"]) if read or row.kernel in ON_HOPPER else ""
    loops = flow.steps(sass)
    waits, asked = len(re.findall(r"WARPGROUP\.DEPBAR", sass)), len(re.findall(r"wgmma\.wait_group", ptx))
    return Report(
        registers=max(int(n) for n in re.findall(r"Used (\d+) registers", said)),
        spills=sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", said)),
        shared=compiler.compiled.metadata.shared,
        # ptxas serialises wgmma with one of three warnings, or silently with a wait after each product.
        serialized=(sass != "" and waits != asked) or re.search(r"\bC75\d\d\b", said) is not None,
        counts={name: len(re.findall(pattern, ptx)) for name, pattern in INSTRUCTIONS.items()},
        loop=min(loops, key=len, default=None),
        seconds=seconds,
        asm=dict(ptx=ptx, sass=sass, log=said),
        loops=loops,
        asked=frozenset(map(int, re.findall(r"\bsetmaxnreg\.\S+\s+(\d+)", ptx))),
        copied=frozenset(re.findall(r"\b(?:UTMALDG|UTMASTG|UTMAREDG)\b", sass)),
        overtaken=(*hazards.overwritten(sass), *hazards.unfenced(sass), *hazards.given_back(sass)),
        fusible=len(operands.fusible(ptx)),
        disordered=operands.disordered(asm["ttgir"]),
    )


def pool():
    start = "spawn" if torch.cuda.is_initialized() else "fork"  # CUDA does not work after a fork
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context(start))
