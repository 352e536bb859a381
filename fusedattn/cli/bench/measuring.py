"""Rows of a preset, one by one, whatever happens to one of them."""

import gc
from collections.abc import Iterator

import torch

from ...bench import accuracy, attention, module, rows
from ..screen import Problem
from .presets import Preset

# How long a row is timed, about: a CPU has slow steps, and a median wants some of them.
BUDGET_MS = {"cpu": 300.0, "cuda": 100.0}


def measure(preset: Preset, device: str) -> Iterator[tuple[rows.Row, str]]:
    """(row, what is wrong with its result or "") of each case, provider and mode. A case too large is rows as well."""
    machine, budget = rows.machine(device), BUDGET_MS[device]
    for case in preset.cases:
        tensors = truth = None  # free the last ones first
        try:
            tensors = case.draw(device)
            truth = accuracy.truth(case, tensors)
        except RuntimeError as error:
            if not attention.out_of_memory(error):
                raise
            for name in preset.providers:
                for mode in preset.modes:
                    yield rows.row(machine, mode, name, case, status="oom"), ""
            continue
        for name in preset.providers:
            yield from attention.measure_all(machine, case, name, tensors, truth, preset.modes, device, budget)
            _recover(device)
    for case in preset.modules:
        yield from module.measure_all(machine, case, module_modes(preset), device, budget)
        _recover(device)


def module_modes(preset: Preset) -> list[str]:
    """A module is timed forward, and as it is trained: forward and backward."""
    forward, training = module.MODES
    return [forward] * (forward in preset.modes) + [training] * (preset.modes != [forward])


def count(preset: Preset) -> int:
    """How many rows there will be."""
    plain = len(preset.cases) * len(preset.providers) * len(preset.modes)
    return plain + len(preset.modules) * module.count(module_modes(preset))


def _recover(device):
    """Give memory back; a Problem if the GPU takes no more work from this process."""
    gc.collect()
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise Problem(f"the GPU broke down: {str(error).partition(chr(10))[0]}") from error
        torch.cuda.empty_cache()
