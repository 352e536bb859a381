"""fusedattn info: versions, GPUs, and the backend that each kind of call takes on this machine."""

import torch

from ..bench import rows
from . import DTYPES, machine
from .output import Output


def run(arguments, output: Output) -> int:
    versions, cores, answers = rows.versions(), machine.cores(), []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [
        dict(
            name=gpu.name, capability=f"{gpu.major}.{gpu.minor}",
            gib=round(gpu.total_memory / 2**30, 1), multiprocessors=gpu.multi_processor_count,
        )
        for gpu in map(torch.cuda.get_device_properties, range(count))
    ]  # fmt: skip
    alike: dict[tuple, list[str]] = {}  # {(device, backend, reasons against others): dtypes}
    for device in (*(f"cuda:{index}" for index in range(count)), "cpu"):
        for dtype in DTYPES:
            answer = machine.explained(device, dtype)
            answers.append(dict(device=device, dtype=dtype, takes=answer.backend, reasons=answer.reasons))
            why = tuple(f"{name}: {'; '.join(reasons)}" for name, reasons in answer.reasons.items())
            alike.setdefault((device, answer.backend, why), []).append(dtype)

    output.table("Versions", ["", ""], [[name, version or "none"] for name, version in versions.items()])
    if gpus:
        output.table("GPUs", [*gpus[0]], [[*gpu.values()] for gpu in gpus])
    output.say(f"{'' if gpus else 'No GPU. '}{cores} CPU cores, {torch.get_num_threads()} threads in torch.\n")
    output.say("Backend of a call without backend=, and why not the others")
    for (device, takes, why), dtypes in alike.items():
        output.say(f"{device}, {', '.join(dtypes)}: {takes}; not " + "\n    not ".join(why))
    output.finish(dict(versions=versions, gpus=gpus, cores=cores, threads=torch.get_num_threads(), backends=answers))
    return 0
