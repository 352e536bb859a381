"""Rows of a preset, one by one, whatever happens to one of them."""

import gc
from collections.abc import Iterator

import torch

from ...bench import accuracy, attention, rows
from ..screen import Problem
from .presets import Preset

# How long a row is timed, about: a CPU has slow steps, and a median wants some of them.
BUDGET_MS = {"cpu": 300.0, "cuda": 100.0}


def measure(preset: Preset, device: str) -> Iterator[tuple[rows.Row, str]]:
    """(row, what is wrong with its result or "") of each case, provider and mode. A case too large is rows as well."""
    machine = rows.machine(device)
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
            for mode, label, columns, why in attention.unit(
                case, name, tensors, truth, preset.modes, device, BUDGET_MS[device]
            ):
                yield rows.row(machine, mode, label, case, **columns), why
            _recover(device)


def _recover(device):
    """Give memory back; a Problem if the GPU takes no more work from this process."""
    gc.collect()
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise Problem(f"the GPU broke down: {str(error).partition(chr(10))[0]}") from error
        torch.cuda.empty_cache()
