"""fusedattn info: versions, GPUs, and which backend takes what on this machine."""

import torch

from ..backends import BACKENDS
from . import DTYPES, machine
from .screen import Screen


def run(arguments) -> int:
    screen = Screen(arguments.json)
    versions, gpus, cores = machine.versions(), machine.gpus(), machine.cores()
    devices = [*(f"cuda:{index}" for index in range(len(gpus))), "cpu"]
    answers = [_answer(device, dtype) for device in devices for dtype in DTYPES]

    screen.table("Versions", ["", ""], [[name, version or "none"] for name, version in versions.items()])
    rows = [[g["name"], g["capability"], f"{g['gib']} GiB", str(g["multiprocessors"])] for g in gpus]
    if rows:
        screen.table("GPUs", ["name", "capability", "memory", "multiprocessors"], rows)
    screen.say(f"{'' if gpus else 'No GPU. '}{cores} CPU cores, {torch.get_num_threads()} threads in torch.\n")
    screen.table("Which backend takes a call, none named", ["device", "dtype", "takes", "and not"], _rows(answers))
    screen.finish(dict(versions=versions, gpus=gpus, cores=cores, threads=torch.get_num_threads(), backends=answers))
    return 0


def _answer(device, dtype):
    """Which backend takes a small call, and why each other one does not, nor could if it were named."""
    answer = machine.explained(device, dtype)
    reasons = {name: answer.reasons[name] for name in BACKENDS if name in answer.reasons}
    return dict(device=device, dtype=dtype, takes=answer.backend, reasons=reasons)


def _rows(answers):
    """One row for the dtypes of a device that have the same answer."""
    rows: dict[tuple, list[str]] = {}
    for answer in answers:
        why = "\n".join(f"{name}: {'; '.join(sentences)}" for name, sentences in answer["reasons"].items())
        rows.setdefault((answer["device"], answer["takes"], why), []).append(answer["dtype"])
    return [[device, "\n".join(dtypes), takes, why] for (device, takes, why), dtypes in rows.items()]
