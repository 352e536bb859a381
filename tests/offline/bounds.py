"""How fast a loop could run at best, from its instructions and what a multiprocessor does in a clock: no measurement.

A bound knows neither latency nor bank conflicts, nor power, which holds plain products of bf16 to 0.8 of the peak.
Sources: the data sheets (at boost clock); arithmetic throughput and occupancy, CUDA C++ Programming Guide.
"""

import re
from typing import NamedTuple

from . import sass

LANES = 32
REGISTERS = 65536  # a multiprocessor; a warp takes them by 256, in one quarter of it
RESERVED = 1024  # bytes of shared memory that a block takes beyond its own

EXP2, ALU = 16, 64  # lanes a clock
ISSUED = 4  # instructions of a warp a clock
SHARED_BYTES = 128  # a clock
L2_BYTES = 5120  # a clock of all multiprocessors: A100's white paper; H100's has no number, measurements are lower


class Gpu(NamedTuple):
    """One of its compute capability; flops and fma are of one multiprocessor in a clock."""

    name: str
    multiprocessors: int
    ghz: float
    flops: int  # of products in bf16 or fp16, half of it in tf32
    fma: int  # lanes
    warps: int = 64
    blocks: int = 32


GPUS = {
    80: Gpu("A100", 108, 1.41, flops=2048, fma=64),
    90: Gpu("H200", 132, 1.83, flops=4096, fma=128),
}


class Bound(NamedTuple):
    """Clocks of one step of a loop by what they are spent on, all blocks of a multiprocessor alike; TFLOP/s of a GPU.

    `overlapped` is if all of it runs at once, `serial` if the tensor cores and the rest of the instructions take turns.
    The operations are those of the kernel's own products, less what is padding.
    """

    clocks: dict
    overlapped: float
    serial: float

    @property
    def limit(self):
        return max(self.clocks, key=self.clocks.get)


def blocks(gpu, registers, shared, warps, most):
    """How many blocks a multiprocessor holds; most is the bytes of shared memory that a block may use."""
    quarter = REGISTERS // 4 // (-(-registers * LANES // 256) * 256)
    by_memory = (most + RESERVED) // (-(-shared // 128) * 128 + RESERVED)
    return min(4 * quarter // warps, by_memory, gpu.warps // warps, gpu.blocks)


def _product(name):
    """(operations, whether in tf32, (rows, columns, depth)) of the share of a warp in a product of matrices."""
    shape = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)|HMMA\.(16)(8)(\d+)", name)
    if shape is None:
        raise ValueError(f"{name}: not a product that is known here")
    rows, columns, depth = (int(size) for size in shape.groups() if size)
    return 2 * rows * columns * depth // (4 if name.startswith("HGMMA") else 1), "TF32" in name, (rows, columns, depth)


def _moved(name):
    """Bytes of a warp in one instruction, all lanes at different places."""
    wide = re.search(r"\.(64|128)\b", name)
    return LANES * (int(wide[1]) // 8 if wide else 4)


def _shared_bytes(instruction):
    """Bytes to or from shared memory, at the least."""
    name = sass.operation(instruction)
    if name.startswith("HGMMA"):
        _, tf32, (rows, columns, depth) = _product(name)
        # A warpgroup reads its operands once. The left one may be in registers: then it stands before the descriptor.
        in_registers = re.search(r"R\d+, R\d+, gdesc", instruction)
        return (columns + (0 if in_registers else rows)) * depth * (4 if tf32 else 2) // 4
    if name.startswith(("LDSM", "STSM")):  # 1, 2 or 4 matrices of 8 x 16 bytes
        return LANES * 4 * int(name[-1]) if name[-1] in "24" else LANES * 4
    if name.startswith(("STS", "LDGSTS")):
        return _moved(name)
    return SHARED_BYTES if name.startswith("LDS") else 0  # all lanes may read the same


def _l2_bytes(instruction):
    name = sass.operation(instruction)
    return _moved(name) if name.startswith("LDGSTS") else 32 if name.startswith("LDG.") else 0


def bound(loop, capability, warps, useful=1.0, copied=0):
    """The Bound of a loop that so many warps of a block walk.

    Args:
        useful: the share of its operations that is no padding.
        copied: bytes that another warp of the block brings into shared memory for each step.
    Raises: ValueError if no tensor core works in it: what its products are is then not to be told from the rest.
    """
    gpu, kinds = GPUS[capability], sass.mix(loop)
    products = [_product(sass.operation(text)) for text in loop if sass.kind(text) == "tensor"]
    if not products:
        raise ValueError("no product of matrices in the loop")
    tensor = sum(flops * (2 if tf32 else 1) for flops, tf32, _ in products) / gpu.flops
    multiplied = sum(sass.operation(text).startswith("IMAD") and sass.kind(text) == "alu" for text in loop)
    each = dict(  # clocks of one warp's instructions, if the multiprocessor did nothing else
        tensor=tensor,
        issue=len(loop) / ISSUED,
        exp2=kinds["exp2"] * LANES / EXP2,
        fma=(kinds["fma"] + multiplied) * LANES / gpu.fma,
        alu=(kinds["alu"] - multiplied) * LANES / ALU,
        shared=sum(map(_shared_bytes, loop)) / SHARED_BYTES,
        l2=sum(map(_l2_bytes, loop)) / (L2_BYTES / gpu.multiprocessors),
    )
    clocks = {name: warps * each_warp for name, each_warp in each.items()}
    clocks["shared"] += copied / SHARED_BYTES
    clocks["l2"] += copied / (L2_BYTES / gpu.multiprocessors)
    work = warps * useful * sum(flops for flops, *_ in products) * gpu.multiprocessors * gpu.ghz / 1e3
    most = max(clocks.values())
    serial = clocks["tensor"] + max(clocks[name] for name in ("issue", "exp2", "fma", "alu"))
    return Bound(clocks, work / most, work / max(most, serial))
