"""Has asynchronous products see what asynchronous copies wrote to shared memory, where the compiler does not."""

import triton
import triton.language as tl
from triton import knobs
from triton.language.target_info import cuda_capability_geq

# Triton 3.6.0 puts its fence before the wait for a copy, where it orders nothing; 3.7.1 puts it behind, as here:
# triton-lang/triton#9610, #10537.
_MAJOR, _MINOR, _PATCH = triton.__version__.split(".")[:3]
UNFENCED = tl.constexpr((int(_MAJOR), int(_MINOR), int(_PATCH[0])) < (3, 7, 1) and not knobs.runtime.interpret)


@triton.jit
def fence():
    """To stand between loads in a loop and the first product that takes them: wgmma reads by another proxy.

    PTX ISA, "Async proxy": https://docs.nvidia.com/cuda/parallel-thread-execution/#async-proxy
    """
    if UNFENCED and cuda_capability_geq(9, 0):
        asm: tl.constexpr = "fence.proxy.async.shared::cta; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
