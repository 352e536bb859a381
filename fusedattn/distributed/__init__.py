"""Attention of a sequence that no GPU holds: cut over the processes of a group, by torch.distributed."""

from .ring import ring_attention
from .shards import positions, shard, unshard

__all__ = ["positions", "ring_attention", "shard", "unshard"]
