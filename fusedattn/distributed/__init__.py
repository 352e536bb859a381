"""Context parallelism: attention over a sequence that is split among the ranks of a torch.distributed group."""

from ..operators.dtensors import register_sharding
from .gather import gather_attention, gather_attention_varlen
from .parallel import ContextParallel
from .ring import ring_attention
from .shards import positions, shard, unshard
from .ulysses import ulysses_attention

__all__ = ["ContextParallel", "gather_attention", "gather_attention_varlen", "positions", "register_sharding"]
__all__ += ["ring_attention", "shard", "ulysses_attention", "unshard"]
