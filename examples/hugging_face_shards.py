"""A Hugging Face model trains on a sequence split over processes.    python examples/hugging_face_shards.py

Two processes have half of the tokens each. Norms and losses work on single tokens. Attention needs all keys, so
`ring_attention` passes them around. The model is tiny and made from a config.
"""

import tempfile

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from fusedattn import distributed

PROCESSES, VOCABULARY, LENGTH = 2, 100, 50
SHARDS = dict(balance="zigzag")  # equal work in causal attention: each process gets early and late tokens
SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
CONFIG = LlamaConfig(**SIZES, num_key_value_heads=2, initializer_range=0.2)


def ring(module, query, key, value, mask, scaling=None, dropout=0.0, **others):
    """Compute ring attention, with the arguments of transformers: queries of this process, keys of all processes."""
    out = distributed.ring_attention(query, key, value, causal=True, scale=scaling, dropout_p=dropout, **SHARDS)
    return out.transpose(1, 2), None


def loss_and_gradients(model, tokens, following, positions):
    """Return [sum of the tokens' losses, divided by the number of all tokens; its gradient by each parameter ...]."""
    more = dict(labels=following, shift_labels=following, num_items_in_batch=LENGTH - 1)
    loss = model(tokens, position_ids=positions, use_cache=False, **more).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def train(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    AttentionInterface.register("ring", ring)
    model = LlamaForCausalLM._from_config(CONFIG, attn_implementation="ring")

    tokens = torch.randint(VOCABULARY, (1, LENGTH))
    following = torch.cat([tokens[:, 1:], torch.tensor([[-100]])], 1)  # next tokens; the last has none
    positions = distributed.positions(LENGTH, **SHARDS)[None]
    ours = loss_and_gradients(model, *(distributed.shard(x, 1, **SHARDS) for x in (tokens, following)), positions)
    for x in ours:
        dist.all_reduce(x)  # as DDP and FSDP do

    model.set_attn_implementation("eager")
    whole = loss_and_gradients(model, tokens, following, torch.arange(LENGTH)[None])
    errors = [((x - y).abs().max() / y.abs().max()).item() for x, y in zip(ours, whole, strict=True)]
    print(f"process {rank}: {positions.numel()} of {LENGTH} tokens, loss {ours[0]:.4f}, off by {max(errors):.0e}")
    assert max(errors) < 1e-4, "not what one process computes"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(train, (f"{folder}/store",), PROCESSES)
