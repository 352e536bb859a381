"""fusedattn info: versions, GPUs, and which backend takes what on this machine."""

import torch

from ..bench import rows
from ..dispatch.backends import BACKENDS
from . import DTYPES, machine
from .output import Output


def run(arguments) -> int:
    output = Output(arguments.json)
    versions, gpus, cores = rows.versions(), machine.gpus(), machine.cores()
    devices = [*(f"cuda:{index}" for index in range(len(gpus))), "cpu"]
    answers = [_answer(device, dtype) for device in devices for dtype in DTYPES]
    alike: dict[tuple, list[str]] = {}  # the dtypes of a device that have the same answer
    for answer in answers:
        why = tuple(f"{name}: {'; '.join(reasons)}" for name, reasons in answer["reasons"].items())
        alike.setdefault((answer["device"], answer["takes"], why), []).append(answer["dtype"])

    output.table("Versions", ["", ""], [[name, version or "none"] for name, version in versions.items()])
    if gpus:
        output.table("GPUs", [*gpus[0]], [[*gpu.values()] for gpu in gpus])
    output.say(f"{'' if gpus else 'No GPU. '}{cores} CPU cores, {torch.get_num_threads()} threads in torch.\n")
    output.say("Which backend takes a call, none named")
    for (device, takes, why), dtypes in alike.items():
        output.say(f"{device}, {', '.join(dtypes)}: {takes}; not " + "\n    not ".join(why))
    output.finish(dict(versions=versions, gpus=gpus, cores=cores, threads=torch.get_num_threads(), backends=answers))
    return 0


def _answer(device, dtype):
    """Return which backend takes a small call, and why each other one does not."""
    answer = machine.explained(device, dtype)
    reasons = {name: answer.reasons[name] for name in BACKENDS if name in answer.reasons}
    return dict(device=device, dtype=dtype, takes=answer.backend, reasons=reasons)
