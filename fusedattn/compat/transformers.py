"""Attention for Hugging Face Transformers: `register()` adds attn_implementation="fusedattn"."""

from typing import Any

import torch
from torch import Tensor, nn

from ..api import attention, attention_varlen
from ..call.bits import unpack
from ..call.checks import check_place, fail, value
from ..call.options import Plan
from ._flash import ask, check_tensor
from ._hf_names import NAMES, REFUSED, masks_of

# {substring: what transformers reads a name with it as}
RESERVED = {"flash": "FlashAttention", "/": "a kernel of the hub", "|": "a prefix"}


def register(name: str = "fusedattn", masks: str = "dense") -> None:
    """Make `name` an attn_implementation of every model that calls transformers' AttentionInterface.

    Examples:
        >>> from transformers import AutoModel, BertConfig
        >>> fusedattn.compat.transformers.register()
        >>> config = BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=256)
        >>> model = AutoModel.from_config(config, attn_implementation="fusedattn")  # or from_pretrained(path, ...)
        >>> model.set_attn_implementation("fusedattn")  # or later

    fusedattn then computes attention in training, in generate() with any cache and under gradient checkpointing, in
    each part of a model whose code calls the interface. A part computes as with "eager" if its code does not (Bloom,
    LED, MPT, DeBERTa-v2; in transformers 4 also BERT and T5), or if it passes sparse indices or a sink for each query
    (DeepSeek-V3.2). A warning names the class of the model, once.

    The code is read when a model is built or loaded, and by `set_attn_implementation`: call that again if you replace
    attention in a model. `register` wraps methods of transformers for this; other names behave as before. A model gets
    eager's floating masks, as large as the scores, if only some of its attention calls the interface, if a forward is
    replaced by a function that is not a method of its classes, or if the name was written into a config by hand.

    generate_batch() takes no registered name. output_attentions=True returns weights in models that pass the keyword
    to attention; for others, such as GPT-2, build the model from a config with output_attentions=True, or use eager.
    transformers builds each model as "eager" first, so its warnings may name "eager" or "sdpa" instead of `name`.

    Args:
        name: the attn_implementation to add.
        masks: "dense" for bool tensors (B, 1, Lq, Lk), or "blocks" for plans like those of `fusedattn.plan`. A plan is
            made of the mask function in each forward of more than one query, without a tensor of that size. Models that
            FlexAttention does not support, those with eager's masks, and those whose layers share keys stay dense. A
            later call with the same name replaces `masks`.

    Raises:
        ImportError: without transformers 4.54 or newer.
        TypeError, ValueError: for a name that is no string, is empty, in use, or contains "flash", "/" or "|"; for
            other masks.
    """
    if not isinstance(name, str):
        fail(TypeError, "name", "a string", type(name).__name__)
    if not isinstance(masks, str) or masks not in ("dense", "blocks"):
        fail(ValueError, "masks", '"dense" or "blocks"', value(masks))
    for part, meaning in RESERVED.items():
        if part in name:
            fail(ValueError, "name", f"a name without {part!r}, which transformers reads as {meaning}", repr(name))
    try:
        from transformers import AttentionInterface

        from ._hf import install
    except ImportError as error:
        raise ImportError("fusedattn.compat.transformers: needs transformers 4.54 or newer") from error
    if name in ("", "eager") or AttentionInterface().get(name) not in (None, fusedattn_forward):
        fail(ValueError, "name", "a name that is not empty and that transformers does not use already", repr(name))
    install(name, fusedattn_forward, masks)


def fusedattn_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | Plan | None = None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `fusedattn.attention` with the arguments that transformers passes.

    A mask contains causality, window, padding and packing: is_causal adds nothing. Without a mask, attention is causal
    if `is_causal` is true and there is more than one query. The first query is then aligned with the first key, so that
    a prompt in a static cache sees no empty slots. The single query of a decoding step sees all keys. In a model that
    gets eager's masks, no mask means that nothing is hidden.

    Args:
        module: its `is_causal` (True if absent) counts if the keyword is None.
        query, key, value: (B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv), any strides; some may have B = 1.
        attention_mask: broadcastable to (B, Hq, Lq, Lk); bool, True = may attend, or floating, added to the scores.
            Columns after the last key are ignored. Or a plan, if `register` was called with masks="blocks".
        position_bias: floating, broadcastable to (B, Hq, Lq, Lk), added to the scores.
        dropout: the fraction of weights to drop, in training or not.
        scaling: 1 / sqrt(D) by default.
        softcap: scores become softcap * tanh(score / softcap).
        s_aux: floating (Hq,), a sink for each head.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: int32 (n + 1,) offsets and maximum lengths of packed
            sequences, in a batch of 1. No query sees a key of another sequence, with a mask or without.
        output_attentions: return weights; by default as the module's config says.
        others: ignored, such as `sliding_window`, except indices, block_indices, sinks and head_mask.

    Returns:
        (output (B, Lq, Hq, Dv) in query's dtype, contiguous; weights (B, Hq, Lq, Lk), after dropout, or None). A row
        that sees nothing is 0.

    Raises:
        TypeError, ValueError: as `fusedattn.attention`.
        NotImplementedError: for indices, block_indices, sinks or head_mask that is not None.
    """
    for name, meaning in REFUSED.items():
        if others.get(name) is not None:
            fail(NotImplementedError, name, f"None, because {meaning} is not implemented", type(others[name]).__name__)
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, "(B, H, L, D)")
    # Learned queries, the same for all samples, come as a batch of 1.
    batch = max(x.shape[0] for x in (query, key, value))
    query, key, value = (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x for x in (query, key, value))
    length = query.shape[2]
    config = getattr(module, "config", None)
    eager_masks = getattr(config, "_attn_implementation", None) in NAMES and masks_of(config) is None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(length > 1 and attention_mask is None and causal and not eager_masks)
    if causal and key.shape[2] > length:
        key, value = key[:, :, :length], value[:, :, :length]
    mask: Any = attention_mask
    mask = mask if isinstance(mask, Plan) else _pairs("attention_mask", mask, key.shape[2])
    bias = _pairs("position_bias", position_bias, key.shape[2])
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        if not mask.is_floating_point():
            fail(TypeError, "attention_mask", "a bool or floating tensor", mask.dtype)
        bias, mask = mask if bias is None else bias + mask, None
    options: dict[str, Any] = dict(scale=scaling, softcap=softcap, sinks=s_aux, dropout_p=dropout)
    names = dict(cu_seqlens_q="cu_seq_lens_q", cu_seqlens_k="cu_seq_lens_k", scale="scaling", dropout_p="dropout")
    names |= dict(max_seqlen_q="max_length_q", max_seqlen_k="max_length_k", sinks="s_aux", mask="attention_mask")
    names |= dict(bias="attention_mask" if position_bias is None else "position_bias")
    need_weights = others.get("output_attentions")
    need_weights = getattr(config, "output_attentions", False) if need_weights is None else need_weights
    if (offsets := _offsets(others, batch)) is not None:
        if mask is None and bias is None and not need_weights:
            longest = {f"max_seqlen_{side}": others.get(f"max_length_{side}") for side in "qk"}
            options |= {name: x.item() if isinstance(x, Tensor) else x for name, x in longest.items()}
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            return ask(names, attention_varlen, q, k, v, *offsets, causal=causal, **options)[None], None
        rows, keys = (
            torch.searchsorted(x[1:], torch.arange(of.shape[2], device=x.device), right=True)
            for x, of in zip(offsets, (query, key), strict=True)
        )
        same = (rows[:, None] == keys)[None, None]
        if not isinstance(mask, Tensor | None):
            mask = unpack(mask.block_mask, mask.mask_bits, 0, query.shape[2], 0, key.shape[2])
        mask = same if mask is None else mask & same
    options |= dict(mask=mask, bias=bias, causal=causal, align="top_left")
    results = ask(names, attention, query, key, value, **options, return_weights=bool(need_weights))
    out, weights = results if need_weights else (results, None)
    return out.transpose(1, 2).contiguous(), weights


def _offsets(others: dict[str, Any], batch: int) -> tuple[Tensor, Tensor] | None:
    offsets: dict[str, Any] = {name: others.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    if all(x is None for x in offsets.values()):
        return None
    for name, x in offsets.items():
        check_tensor(name, x, "(sequences + 1,)")
        if x.dtype not in (torch.int32, torch.int64):
            fail(TypeError, name, "an int32 or int64 tensor", x.dtype)
    if batch != 1:
        fail(ValueError, "cu_seq_lens_q", "a batch of 1, with all sequences packed in it", f"a batch of {batch}")
    return offsets["cu_seq_lens_q"].int(), offsets["cu_seq_lens_k"].int()


def _pairs(name: str, scores: Tensor | None, keys: int) -> Tensor | None:
    """Return a mask or bias with rank 4 and one column per key. Some masks of transformers 4 have more columns."""
    if scores is None:
        return None
    check_place(name, scores)
    return scores[(None,) * (4 - scores.dim())][..., :keys]
