"""The text to learn: where it comes from, what of it is held out, and a sentence of it to look at."""

import re
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..screen import Problem

CONTEXT = 64  # bytes that the model sees at once
WINDOW = CONTEXT + 1  # and the one to predict
LEAST = 1000  # bytes of text; less teaches nothing


class Text(NamedTuple):
    """windows (n, WINDOW): one from each byte on; starts (m,): those to learn; held_out (k, WINDOW): clear of those."""

    name: str
    content: bytes
    windows: Tensor
    starts: Tensor
    held_out: Tensor


def _is_ours(readme):
    """Whether a README is of this repository, and not of whoever runs the command."""
    return readme.is_file() and readme.read_bytes().startswith(b"# fusedattn\n")


def load(path: str | None) -> Text:
    """The text of a file; without a path our README, which lies in this folder or is the description of the package."""
    name = "README.md" if path is None else path
    if not name:
        raise Problem("text: expected the name of a file, got an empty one")
    try:
        if path is None and not _is_ours(Path(name)):
            name, content = "the description of fusedattn", metadata.metadata("fusedattn")["Description"].encode()
        else:
            content = Path(name).read_bytes()
    except OSError as error:
        raise Problem(f"text: cannot read {name}: {error.strerror}") from None
    except metadata.PackageNotFoundError as error:
        raise Problem(f"text: cannot read {name}: {error}; try --text FILE") from None
    if len(content) < LEAST:
        raise Problem(f"text: expected at least {LEAST} bytes, got {len(content)} in {name}")
    windows = torch.frombuffer(bytearray(content), dtype=torch.uint8).long().unfold(0, WINDOW, 1)
    length = len(content) // max(2, len(content) // (10 * WINDOW))  # of a part, with a window to hold out
    place = (torch.arange(len(windows)) - (length - WINDOW) // 2) % length  # 0: in the middle of a part
    clear = (place >= WINDOW) & (place <= length - WINDOW)
    return Text(name, content, windows, clear.nonzero().squeeze(1), windows[place == 0])


def readable(content: bytes) -> str:
    """Text of bytes, of which a terminal obeys none."""
    text = content.decode("utf-8", errors="replace")
    return "".join(x if x.isprintable() or x == "\n" else "\ufffd" for x in text)


def sentence(text: Text, longest: int = 28) -> str:
    """The longest sentence of plain prose, or as many of its first words as fit, in ASCII; else how the text begins."""
    plain = text.content.decode("ascii", errors="replace")
    sentences = [" ".join(words.split()) for words in re.findall(r"[A-Z][a-z]*(?:\s[A-Za-z,'-]+){3,}[.:]?", plain)]
    cut = [one if len(one) <= longest else one[: longest + 1].rpartition(" ")[0].rstrip(",-") for one in sentences]
    begins = " ".join(text.content.decode("utf-8", errors="ignore").split()).encode()[:longest]
    return max(cut, key=len, default="") or begins.decode("utf-8", errors="ignore") or "?"
