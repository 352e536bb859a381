"""Tuning files that `fusedattn tune` writes for a GPU. Other machines with the same GPU and versions can load them."""

import os
from pathlib import Path

import torch

from ..launch import tuned
from . import replay

__all__ = ["forget", "load"]


def load(file: str | os.PathLike[str]) -> None:
    """Use the tiles and backends of a tuning file in this process, until `forget`.

    The file takes precedence over files in the user's cache folder.

    Examples:
        >>> fusedattn.tuning.load("h100.json")  # doctest: +SKIP

    Args:
        file: written by `fusedattn tune` for the same GPU, driver, torch, Triton and version of this package.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or for none of the GPUs here. Without a GPU, a file of any GPU is loaded.
        TypeError: `file` is not a path.
    """
    if not isinstance(file, str | os.PathLike):
        raise TypeError(f"file: expected a path, got {type(file).__name__}")
    here = [tuned.about(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    gpu, choices = tuned.read(Path(file), here)
    tuned.use(choices, gpu)
    replay.forget()


def forget() -> None:
    """Undo every `load`, and read the files in the user's cache folder again at the next call.

    Examples:
        >>> fusedattn.tuning.forget()
    """
    tuned.forget()
    replay.forget()
