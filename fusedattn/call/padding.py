"""Padding of packed sequences to a batch, and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import fail
from .private import is_exporting, unmapped


@dataclass
class Padding:
    """Layout of n packed sequences: starts (n,), lengths (n,), `total` rows in all, `most` rows in the longest."""

    starts: Tensor
    lengths: Tensor
    total: int
    most: int

    @property
    def exists(self) -> Tensor:
        """Return a bool mask (n, most): True for real rows, False for padding."""
        return torch.arange(self.most, device=self.starts.device) < self.lengths[:, None]

    @property
    def offsets(self) -> Tensor:
        """Return cu_seqlens (n + 1,) as if the sequences had no gaps between them."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def pad(self, packed: Tensor) -> Tensor:
        """Pad packed rows (total, ...) with zeros to a batch (n, most, ...)."""
        place = self.starts[:, None] + torch.arange(self.most, device=self.starts.device)
        place = torch.where(self.exists, place, self.total)
        return torch.cat([packed, packed.new_zeros(1, *packed.shape[1:])])[place]

    def unpad(self, padded: Tensor, nothing: float = 0.0) -> Tensor:
        """Pack a batch (n, most, ...) into rows (total, ...). Rows outside of all sequences become `nothing`."""
        if 0 in padded.shape[:2]:
            return torch.cat([padded.flatten(0, 1), padded.new_full((self.total, *padded.shape[2:]), nothing)])
        row = torch.arange(self.total, device=self.starts.device)
        ends = self.starts + self.lengths
        # ONNX has no searchsorted.
        sequence = (ends <= row[:, None]).sum(1) if is_exporting() else torch.searchsorted(ends, row, right=True)
        sequence = sequence.clamp(max=self.starts.shape[0] - 1)
        place = row - self.starts[sequence]
        real = (place >= 0) & (place < self.lengths[sequence])
        rows = padded[sequence, torch.where(real, place, 0)]
        return torch.where(real.view(-1, *[1] * (rows.dim() - 1)), rows, nothing)


def longest(offsets: Tensor, name: str) -> int:
    """Return the maximum sequence length, with a host sync on a GPU. name: the argument that an error asks for."""
    if torch.compiler.is_compiling() or unmapped(offsets) is not offsets or offsets.is_meta:
        expected = "an int, because offsets cannot be read in compiled code, under torch.vmap and on meta"
        fail(ValueError, name, expected, None)
    return max(0, int(offsets.diff().max())) if offsets.shape[0] > 1 else 0


def padding(offsets: Tensor, total: int, most: int | None, name: str = "max_seqlen") -> Padding:
    """Return the Padding of cu_seqlens `offsets`, clamped to 0 .. total. most: the maximum length, read if None."""
    offsets = offsets.long().clamp(0, total)
    lengths = offsets.diff().clamp(min=0)
    most = longest(offsets, name) if most is None else most
    return Padding(offsets[:-1], lengths.clamp(max=most), total, most)
