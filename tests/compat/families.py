"""Families of Hugging Face models: tiny configs, weights that tell, and inputs with padding."""

from typing import NamedTuple

import pytest
import torch

transformers = pytest.importorskip("transformers")
MAJOR = int(transformers.__version__.partition(".")[0])

TINY = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
GROUPED = dict(TINY, num_key_value_heads=2)
HEADS = dict(GROUPED, head_dim=8)
WINDOWS = ["sliding_attention", "full_attention"]
SEQ2SEQ = dict(vocab_size=64, pad_token_id=0, eos_token_id=None, decoder_start_token_id=1)


class Family(NamedTuple):
    """A class of models, with a tiny config."""

    name: str
    model: str
    config: str
    options: dict
    kind: str = "decoder"  # or "encoder", "image", "speech", "seq2seq": what the inputs are
    since: int = 4  # the version of transformers that first calls the interface


FAMILIES = [
    Family("BERT", "BertForMaskedLM", "BertConfig", TINY, "encoder", since=5),
    Family("BERT decoder", "BertLMHeadModel", "BertConfig", dict(TINY, is_decoder=True), since=5),
    Family(
        "ModernBERT",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        dict(TINY, local_attention=4, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
        "encoder",
        since=5,
    ),
    Family(
        "ViT",
        "ViTForImageClassification",
        "ViTConfig",
        dict(
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=12,
            patch_size=4,
            num_labels=5,
        ),
        "image",
    ),
    Family(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        dict(
            SEQ2SEQ,
            bos_token_id=1,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=40,
            decoder_ffn_dim=40,
            num_mel_bins=6,
            max_source_positions=11,
            max_target_positions=32,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        "speech",
    ),
    Family(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        dict(
            SEQ2SEQ,
            d_model=32,
            d_kv=8,
            d_ff=40,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=12,
        ),
        "seq2seq",
        since=5,
    ),
    Family(
        "BART",
        "BartForConditionalGeneration",
        "BartConfig",
        dict(
            SEQ2SEQ,
            bos_token_id=1,
            forced_eos_token_id=None,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=40,
            decoder_ffn_dim=40,
            max_position_embeddings=64,
        ),
        "seq2seq",
    ),
    Family("Llama", "LlamaForCausalLM", "LlamaConfig", GROUPED),
    Family("Mistral", "MistralForCausalLM", "MistralConfig", dict(GROUPED, sliding_window=4)),
    Family(
        "Gemma 2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        dict(
            HEADS,
            sliding_window=4,
            layer_types=WINDOWS,
            attn_logit_softcapping=1.5,
            query_pre_attn_scalar=5,
            use_cache=True,
        ),
    ),
    Family(
        "Gemma 3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        dict(HEADS, sliding_window=4, layer_types=WINDOWS, query_pre_attn_scalar=5),
    ),
    Family(
        "GPT-OSS",
        "GptOssForCausalLM",
        "GptOssConfig",
        dict(HEADS, sliding_window=4, layer_types=WINDOWS, num_local_experts=2, num_experts_per_tok=1),
    ),
    Family(
        "DeepSeek-V3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        dict(
            TINY,
            num_key_value_heads=4,
            q_lora_rank=12,
            kv_lora_rank=10,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=7,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
        ),
    ),
]

GPT = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
WIDE = dict(SEQ2SEQ, bos_token_id=1, d_model=32, max_position_embeddings=64)
# Whose attention is code of their own, in transformers 4 and 5.
SILENT = [
    Family("Bloom", "BloomForCausalLM", "BloomConfig", dict(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)),
    Family("CodeGen", "CodeGenForCausalLM", "CodeGenConfig", dict(GPT, rotary_dim=4, n_ctx=64)),
    Family("MegatronBERT", "MegatronBertForMaskedLM", "MegatronBertConfig", TINY, "encoder"),
    Family(
        "XGLM",
        "XGLMForCausalLM",
        "XGLMConfig",
        dict(WIDE, ffn_dim=40, num_layers=2, attention_heads=4),
    ),
    Family(
        "TrOCR",
        "TrOCRForCausalLM",
        "TrOCRConfig",
        dict(WIDE, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=40, cross_attention_hidden_size=32),
    ),
    Family(
        "MPT", "MptForCausalLM", "MptConfig", dict(vocab_size=64, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)
    ),
    Family(
        "LED",
        "LEDForConditionalGeneration",
        "LEDConfig",
        dict(
            SEQ2SEQ,
            bos_token_id=1,
            d_model=32,
            attention_window=4,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=40,
            decoder_ffn_dim=40,
            max_encoder_position_embeddings=64,
            max_decoder_position_embeddings=64,
        ),
        "seq2seq",
    ),
    Family(
        "DeBERTa-v2",
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        dict(TINY, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
        "encoder",
    ),
    Family("ImageGPT", "ImageGPTForCausalImageModeling", "ImageGPTConfig", GPT),
    Family("Falcon", "FalconForCausalLM", "FalconConfig", dict(TINY, new_decoder_architecture=True, num_kv_heads=2)),
    Family(
        "GPT Neo",
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        dict(
            vocab_size=64,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=4,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    Family("OpenAI GPT", "OpenAIGPTLMHeadModel", "OpenAIGPTConfig", dict(GPT, pad_token_id=0)),
    Family("YOSO, without a softmax", "YosoForMaskedLM", "YosoConfig", dict(TINY, use_expectation=True), "encoder"),
]


def drawn(family, **options):
    """A model of the family with weights large enough for attention to be far from uniform."""
    config = getattr(transformers, family.config)(**family.options)
    return weighted(getattr(transformers, family.model)._from_config(config, **options))


def weighted(model):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    return model.eval()


def tokens(batch, length):
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(batch + length))


def padding(length):
    """(3, length): one sample padded on the left, one on the right, one not at all."""
    mask = torch.ones(3, length, dtype=torch.long)
    mask[0, :3] = mask[1, -2:] = 0
    return mask


def inputs_of(family, padded):
    generator = torch.Generator().manual_seed(7)
    if family.kind == "image":
        return dict(pixel_values=torch.randn(2, 3, 12, 12, generator=generator), labels=torch.tensor([1, 4]))
    inputs, counts = dict(labels=tokens(3, 9)), padding(9)
    if family.kind == "speech":
        inputs["input_features"] = torch.randn(3, 6, 22, generator=generator)
    else:
        inputs["input_ids"] = tokens(3, 11) if family.kind == "seq2seq" else inputs["labels"]
    if padded:
        name = "decoder_attention_mask" if family.kind == "speech" else "attention_mask"
        inputs[name] = padding(11) if family.kind == "seq2seq" else counts
        if family.kind == "decoder":  # what a hidden row says of the next token is nobody's business
            counts = counts * counts.roll(1, dims=1)
        inputs["labels"] = inputs["labels"].masked_fill(counts == 0, -100)
    return inputs
