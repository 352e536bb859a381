"""The text to learn: where it comes from, what of it is held out, and a sentence of it to look at."""

import importlib.metadata
import re
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..screen import Problem

CONTEXT = 64  # bytes a model sees at once
LEAST = 1000  # bytes of text; less teaches nothing


class Text(NamedTuple):
    """starts (m,): where windows to learn from begin; held_out (k, CONTEXT + 1): windows disjoint from those."""

    name: str
    content: bytes
    starts: Tensor
    held_out: Tensor

    def windows(self, count: int, dice: torch.Generator) -> Tensor:
        """(count, CONTEXT + 1) windows to learn from, at random."""
        first = self.starts[torch.randint(len(self.starts), (count,), generator=dice)]
        return _numbers(self.content)[first[:, None] + torch.arange(CONTEXT + 1)]


def load(path: str | None) -> Text:
    """The text of a file; without one that of README.md here, or else of the package's description."""
    name, content = _read(path)
    if len(content) < LEAST:
        raise Problem(
            f"text: expected at least {LEAST} bytes, got {len(content)} in {name}; name another with --text FILE"
        )
    width = CONTEXT + 1
    parts = max(2, len(content) // (10 * width))  # about a tenth, from all over the text: its parts differ
    step = len(content) // parts
    first = [part * step + (step - width) // 2 for part in range(parts)]
    free = torch.ones(len(content), dtype=torch.bool)
    for start in first:
        free[start : start + width] = False
    starts = free.unfold(0, width, 1).all(-1).nonzero().squeeze(1)
    held_out = torch.stack([_numbers(content)[start : start + width] for start in first])
    return Text(name, content, starts, held_out)


def _read(path):
    if path is None and not Path("README.md").is_file():
        try:
            described = importlib.metadata.metadata("fusedattn")
        except importlib.metadata.PackageNotFoundError:
            raise Problem("text: there is no README.md here; name a file with --text FILE") from None
        payload = described.get("Description") or described.get_payload()
        return "the description of fusedattn", str(payload).encode()
    try:
        return path or "README.md", Path(path or "README.md").read_bytes()
    except OSError as error:
        raise Problem(f"text: cannot read {path}: {error.strerror}") from None


def _numbers(content):
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def sentence(text: Text, longest: int = 28) -> str:
    """A sentence, or as many first words of one as fit; the longest of plain prose there is."""
    plain = text.content.decode("ascii", errors="replace")
    found = [" ".join(words.split()) for words in re.findall(r"[A-Z][a-z]*(?:\s[A-Za-z,'-]+){3,}[.:]?", plain)]
    cut = [one if len(one) <= longest else one[: longest + 1].rpartition(" ")[0].rstrip(",-") for one in found]
    return max(cut, key=len, default="") or plain[:longest].replace("\ufffd", "?")
