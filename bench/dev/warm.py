"""Compiles, many at a time, what the questions on a GPU will need: Triton and torch keep on disk what they compile."""

import concurrent.futures
import multiprocessing
import time

import torch
from fusedattn.bench import cases, engine

from . import questions

NAMES = "fusedattn", "flex"
PACKED = "fusedattn", "fusedattn+packed", "flex+packed"
CACHES = "fusedattn:cache", "fusedattn:pages=256", "fusedattn:pages=16"


def tasks(chosen, names=NAMES):
    """(case, provider) whose compiled code covers all cases: ours is the same at any length, FlexAttention's is not."""
    kinds = {case._replace(B=0, Sq=0, Sk=0): case for case in reversed(chosen)}
    return [(case, name) for name in names for case in (chosen if name.startswith("flex") else [*kinds.values()][::-1])]


# {part: its tasks}. FlexAttention, which compiles for long, is in none where calls are small, or in a model.
_RICH = cases.OPTIONS + cases.SKIPPING + cases.LONG + cases.MORE + cases.HOPPER + cases.BACKWARD
_INNER = cases.SMALL + cases.MODULE
PARTS = {
    "first": lambda: tasks(cases.BACKWARD, NAMES[:1]),
    "caches": lambda: tasks(cases.DECODE, CACHES) + tasks(cases.VARLEN, PACKED),
    "rest": lambda: tasks(_RICH + _INNER, NAMES[:1]) + tasks(_RICH, NAMES[1:]),
}


def everything(on_gpu, part=None):
    """The `tasks` of all questions, or of a part of them; those of FlexAttention last."""
    if not on_gpu:
        return tasks(cases.TINY + cases.TINY_OPTIONS, NAMES[:1])
    chosen = [task for name, of in PARTS.items() if part in (None, name) for task in of()]
    return sorted(dict.fromkeys(chosen), key=lambda task: task[1].startswith("flex"))


def compile_one(case, name, device):
    """Run forward and backward of a provider once; what went wrong, or ""."""
    torch._inductor.config.compile_threads = 1  # the processes are the parallelism
    try:
        workload = engine.prepare(case, device)
        provider = workload.setup(name)
        for mode in ("forward",) if name in CACHES else ("forward", "forward_backward"):
            with workload.step(mode, provider) as step:
                step()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as error:  # the benchmark will meet it again and write a row of it
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return ""


def main(arguments):
    words = questions.parser("warm", "cases")
    words.add_argument("--jobs", type=int, default=8)
    words.add_argument("--part", choices=PARTS, help="of all that there is; default: everything")
    options = words.parse_args(arguments)
    on_gpu = torch.device(options.device).type == "cuda"
    work = everything(on_gpu, options.part)
    if options.cases:
        work = tasks(cases.TABLES[options.cases], NAMES if on_gpu else NAMES[:1])
    start = time.monotonic()
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        jobs = {pool.submit(compile_one, *task, options.device): task for task in work}
        for job in concurrent.futures.as_completed(jobs):
            case, name = jobs[job]
            print(f"{time.monotonic() - start:6.1f} s  {case.name} {name} {job.result()}".rstrip(), flush=True)
    return 0
