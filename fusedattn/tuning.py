"""Tuning files, in which `fusedattn tune` keeps what it found out about a GPU, for other machines just like it."""

import os
from pathlib import Path

import torch

from .dispatch import replay
from .launch import tuned

__all__ = ["forget", "load"]


def load(file: str | os.PathLike[str]) -> None:
    """Have calls on GPUs that a tuning file is about take the tiles, the backward and the backend that it chooses.

    Examples:
        >>> fusedattn.tuning.load("h100.json")  # doctest: +SKIP

    It counts until `forget`, in this process, before any file in the user's cache folder. Without a GPU nothing
    changes.

    Args:
        file: what `fusedattn tune` wrote for the same GPU, driver, torch, Triton and version of this package.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is damaged, or about none of the GPUs here.
        TypeError: for what is no path.
    """
    if not isinstance(file, str | os.PathLike):
        raise TypeError(f"file: expected a path, got {type(file).__name__}")
    here = [tuned.about(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    gpu, choices = tuned.read(Path(file), here)
    tuned.loaded[gpu] = choices
    tuned.ask(None)
    replay.forget()


def forget() -> None:
    """Undo every `load`, and have the files in the user's cache folder read again at the next call.

    Examples:
        >>> fusedattn.tuning.forget()
    """
    tuned.loaded.clear()
    tuned.ask(None)
    replay.forget()
