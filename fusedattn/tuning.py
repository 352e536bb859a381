"""Tuning files, which `fusedattn tune` writes for a GPU. Other machines with the same GPU can load them."""

import os
from pathlib import Path

import torch

from .dispatch import replay
from .launch import tuned

__all__ = ["forget", "load"]


def load(file: str | os.PathLike[str]) -> None:
    """Have calls take the tiles, backward and backend that a tuning file chooses for the GPUs here.

    Examples:
        >>> fusedattn.tuning.load("h100.json")  # doctest: +SKIP

    It holds in this process until `forget`, before any file in the user's cache folder.

    Args:
        file: written by `fusedattn tune` for the same GPU, driver, torch, Triton and version of this package.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is damaged, or for none of the GPUs here.
        TypeError: if `file` is no path.
    """
    if not isinstance(file, str | os.PathLike):
        raise TypeError(f"file: expected a path, got {type(file).__name__}")
    here = [tuned.about(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    gpu, choices = tuned.read(Path(file), here)
    tuned.loaded[gpu] = choices
    tuned.ask(None)
    replay.forget()


def forget() -> None:
    """Undo every `load`, and read the files in the user's cache folder again at the next call.

    Examples:
        >>> fusedattn.tuning.forget()
    """
    tuned.loaded.clear()
    tuned.ask(None)
    replay.forget()
