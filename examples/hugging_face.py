"""A Hugging Face model gives the same results with "fusedattn" as with "eager".    python examples/hugging_face.py

`fa.compat.transformers.register()` adds "fusedattn" to the attn_implementations "eager" and "sdpa" of transformers. The
model here is tiny and made from a config, so nothing is downloaded.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fusedattn as fa

VOCABULARY, PROMPT, NEW, PADDING = 100, 12, 20, 0
# Two query heads share a key head. A large initializer_range gives scores far from 0, so that attention matters.
SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
TOKENS = dict(pad_token_id=PADDING, eos_token_id=None)
CONFIG = LlamaConfig(**SIZES, **TOKENS, num_key_value_heads=2, initializer_range=0.2)


def results(model, tokens, real):
    """Return logits of the real tokens, the gradient of the embeddings, and generated tokens (B, NEW)."""
    logits = model(tokens, attention_mask=real).logits[real]  # logits of padding mean nothing
    loss = logits.logsumexp(-1).mean()  # any loss will do
    (gradient,) = torch.autograd.grad(loss, [model.get_input_embeddings().weight])
    generated = model.generate(tokens, attention_mask=real, max_new_tokens=NEW, do_sample=False)
    return logits, gradient, generated[:, PROMPT:]


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
fa.compat.transformers.register()
model = LlamaForCausalLM._from_config(CONFIG, attn_implementation="fusedattn").to(device).eval()

lengths = torch.tensor([[PROMPT], [7]], device=device)
real = torch.arange(PROMPT, device=device) >= PROMPT - lengths  # the shorter prompt has padding in front
tokens = torch.randint(1, VOCABULARY, real.shape, device=device).masked_fill(~real, PADDING)

*ours, our_tokens = results(model, tokens, real)
model.set_attn_implementation("eager")
*eager, eager_tokens = results(model, tokens, real)
for name, one, other in zip(("logits", "gradient of the embeddings"), ours, eager, strict=True):
    difference, largest = (one - other).abs().max().item(), other.abs().max().item()
    print(f"{name} of up to {largest:.3f} differ by at most {difference:.0e}")
    assert difference < 1e-4 * largest, f"{name}: not as with eager"
print("the first prompt goes on:", *our_tokens[0].tolist())
assert torch.equal(our_tokens, eager_tokens), "generation differs from that of eager"
