"""The process of `fusedattn tune`, with a timer that is not one, and mistakes in the candidates that a test names.

python -m tests.cli.planted MISTAKE=ROWSxKEYS ...       MISTAKE: hangs, aborts, raises, doubles, breaks, or has no room
in shared memory (unfit), or, when it is timed, in that of the GPU (exhausts)
"""

import os
import sys
import time

import torch
from fusedattn.bench import timing
from triton.runtime.errors import OutOfResources

from fusedattn.cli.tune import child
from fusedattn.launch import failures, run
from fusedattn.replay import cache
from fusedattn.testing import cases

CASES = ("plain", "causal more keys")


def main():
    mistakes = {size: mistake for mistake, size in (text.split("=") for text in sys.argv[1:])}
    run_kernel = run.run_kernel
    taken = []

    def planted(name, programs, arguments, *rest, **options):
        size = f"{arguments.get('BLOCK_M')}x{arguments.get('BLOCK_N')}"
        taken.append(size)
        mistake = mistakes.get(size)
        if mistake == "hangs":
            time.sleep(1000)
        if mistake == "aborts":
            os.abort()
        if mistake == "raises":
            raise ValueError("an operand too many")
        if mistake == "unfit":
            raise failures.remember(rest[1], OutOfResources(300_000, 232_448, "shared memory"))
        if mistake == "breaks":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        run_kernel(name, programs, arguments, *rest, **options)
        if mistake == "doubles":
            arguments["Out"][0].mul_(2)

    def measured(step, device, budget_ms):
        """Milliseconds that are the rows and keys of the last tile that a step took."""
        taken.clear()
        cache.forget()  # it may be a repeated call, which launches nothing by name
        step()
        if "exhausts" in map(mistakes.get, taken):
            raise torch.OutOfMemoryError("CUDA out of memory")
        rows, keys = (int(side) for side in next(size for size in taken if "None" not in size).split("x"))
        return timing.quantiles([float(rows + keys)])

    run.run_kernel, timing.measure = planted, measured
    child.CASES, child.TIMES = [case for case in cases.CASES if case.name in CASES], 1
    child.main()


if __name__ == "__main__":
    main()
