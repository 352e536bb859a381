"""Families of Hugging Face models for tests: tiny configs, random weights, and inputs with padding."""

from typing import NamedTuple

import pytest
import torch

transformers = pytest.importorskip("transformers")
MAJOR = int(transformers.__version__.partition(".")[0])

_NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings".split()
TINY = dict(zip(_NAMES, (32, 40, 2, 4, 64), strict=True), vocab_size=64, pad_token_id=0)
TINY |= dict(bos_token_id=1, eos_token_id=None)
GROUPED = dict(TINY, num_key_value_heads=2)
HEADS = dict(GROUPED, head_dim=8)
WINDOWS = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
CAPPED = dict(attn_logit_softcapping=1.5, use_cache=True)
SEQ2SEQ = dict(vocab_size=64, pad_token_id=0, eos_token_id=None, decoder_start_token_id=1)
SIDES = dict(SEQ2SEQ, bos_token_id=1, d_model=32, max_position_embeddings=64)
SIDES |= {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
          dict(layers=2, attention_heads=4, ffn_dim=40).items()}  # fmt: skip
IMAGE = dict(hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
IMAGE |= dict(image_size=12, patch_size=4)
LATENT = dict(num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=128, qk_rope_head_dim=64)
LATENT |= dict(v_head_dim=128, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1)
LATENT |= dict(n_shared_experts=1, moe_intermediate_size=16, first_k_dense_replace=1)
SPEECH = dict(num_mel_bins=6, max_source_positions=11, max_target_positions=32)
SPEECH |= dict(suppress_tokens=None, begin_suppress_tokens=None)
T5 = dict(d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4)
T5 |= dict(relative_attention_num_buckets=8, relative_attention_max_distance=12)
MODERN = dict(local_attention=4, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2)


class Family(NamedTuple):
    name: str
    model: str
    options: dict
    kind: str = "decoder"  # kind of inputs: also "encoder", "image", "speech", "seq2seq", or "spans" in a decoder's
    since: int = 4  # first version of transformers that calls the interface
    config: str | None = None  # class of the config; None: named like the model


FAMILIES = [
    Family("BERT", "BertForMaskedLM", TINY, "encoder", since=5),
    Family("BERT decoder", "BertLMHeadModel", dict(TINY, is_decoder=True), since=5, config="BertConfig"),
    Family("ModernBERT", "ModernBertForMaskedLM", TINY | MODERN, "encoder", since=5),
    Family("ViT", "ViTForImageClassification", dict(IMAGE, num_labels=5), "image"),
    Family("Whisper", "WhisperForConditionalGeneration", SIDES | SPEECH, "speech"),
    Family("T5", "T5ForConditionalGeneration", SEQ2SEQ | T5, "seq2seq", since=5),
    Family("BART", "BartForConditionalGeneration", dict(SIDES, forced_eos_token_id=None), "seq2seq"),
    Family("Llama", "LlamaForCausalLM", GROUPED),
    Family("Mistral", "MistralForCausalLM", dict(GROUPED, sliding_window=4)),
    Family("Gemma 2", "Gemma2ForCausalLM", dict(HEADS, **WINDOWS, **CAPPED, query_pre_attn_scalar=5)),
    Family("Gemma 3", "Gemma3ForCausalLM", dict(HEADS, **WINDOWS, query_pre_attn_scalar=5), config="Gemma3TextConfig"),
    Family("GPT-OSS", "GptOssForCausalLM", dict(HEADS, **WINDOWS, num_local_experts=2, num_experts_per_tok=1)),
    Family("DeepSeek-V3", "DeepseekV3ForCausalLM", TINY | LATENT),
]
SEEING = dict(image_token_index=2, image_token_id=2)
SEEING |= dict(vision_config=dict(IMAGE, model_type="siglip_vision_model", vision_use_head=False))
TEXT = dict(text_config=dict(HEADS, **WINDOWS, query_pre_attn_scalar=5, model_type="gemma3_text"))
PREFIXED = dict(text_config=dict(HEADS, model_type="gemma"), projection_dim=32)
FAMILIES += [
    Family("Gemma 3, images", "Gemma3ForConditionalGeneration", SEEING | TEXT, "spans", since=5),
    Family("PaliGemma", "PaliGemmaForConditionalGeneration", SEEING | PREFIXED, "spans", since=5),
]
if hasattr(transformers, "Gemma4TextConfig"):  # came with transformers 5
    WIDE = dict(HEADS, **WINDOWS, global_head_dim=512, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8)
    WIDE |= dict(num_kv_shared_layers=0)
    FAMILIES.append(Family("Gemma 4", "Gemma4ForCausalLM", WIDE, config="Gemma4TextConfig"))
XGLM = dict(SIDES, ffn_dim=40, num_layers=2, attention_heads=4)
# models that do not call the attention interface, in transformers 4 and 5
SILENT = [
    Family("Bloom", "BloomForCausalLM", dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
    Family("XGLM", "XGLMForCausalLM", XGLM),
    Family("LED", "LEDForConditionalGeneration", dict(SIDES, attention_window=4), "seq2seq"),
    Family("YOSO, without a softmax", "YosoForMaskedLM", dict(TINY, use_expectation=True), "encoder"),
]
if hasattr(transformers, "DeepseekV32Config"):  # sparse attention, which came with transformers 5
    SPARSE = dict(index_topk=3, index_n_heads=2, index_head_dim=64)
    SILENT.append(Family("DeepSeek-V3.2", "DeepseekV32ForCausalLM", TINY | LATENT | SPARSE))
BY_NAME = {family.name: family for family in FAMILIES + SILENT}


def drawn(family, **options):
    """Return a model with random weights so large that attention is far from uniform."""
    config = getattr(transformers, family.config or family.model.partition("For")[0] + "Config")(**family.options)
    model = weighted(getattr(transformers, family.model)._from_config(config, **options))
    for name, parameter in model.named_parameters():
        if family.name == "Gemma 4" and "q_norm" in name:  # its scores have no other scale
            parameter.data *= parameter.numel() ** -0.5
    return model


def weighted(model):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    return model.eval()


def tokens(batch, length):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(batch + length))


def images(batch):
    return torch.randn(batch, 3, 12, 12, generator=torch.Generator().manual_seed(7))


def padding(length):
    """Return a padding mask (3, length): one sample padded on the left, one on the right, one not at all."""
    mask = torch.ones(3, length, dtype=torch.long)
    mask[0, :3] = mask[1, -2:] = 0
    return mask


def inputs_of(family, padded):
    if family.kind == "image":
        return dict(pixel_values=images(2), labels=torch.tensor([1, 4]))
    inputs, counts = dict(labels=tokens(3, 9)), padding(9)
    if family.kind == "speech":
        inputs["input_features"] = torch.randn(3, 6, 22, generator=torch.Generator().manual_seed(7))
    else:
        inputs["input_ids"] = tokens(3, 11) if family.kind == "seq2seq" else inputs["labels"]
    if family.kind == "spans":  # tokens of an image, or of the prompt, see each other both ways
        inputs["token_type_ids"] = torch.tensor([0, 0, 1, 1, 1, 1, 0, 1, 1]).expand(3, -1)
    if padded:
        name = "decoder_attention_mask" if family.kind == "speech" else "attention_mask"
        inputs[name] = padding(11) if family.kind == "seq2seq" else counts
        if family.kind in ("decoder", "spans"):  # leave out the predictions of hidden rows
            counts = counts * counts.roll(1, dims=1)
        inputs["labels"] = inputs["labels"].masked_fill(counts == 0, -100)
    return inputs


@torch.no_grad()
def logits(model, inputs, **options):
    inputs = {name: value for name, value in inputs.items() if name != "labels"} | options
    if "decoder_input_ids" not in inputs and model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens(3, 9)
    torch.manual_seed(0)
    return model(**inputs).logits
