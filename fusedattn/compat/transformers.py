"""Hugging Face Transformers: after `register()`, attn_implementation="fusedattn" is one more that its models take."""

from typing import Any

import torch
from torch import Tensor, nn

from ..api import attention, attention_varlen
from ..call.rules import check_strided, fail
from ._hf_names import NAMES, REFUSED, masks_of

# What transformers takes a name for that holds one of these.
RESERVED = {"flash": "FlashAttention", "/": "a kernel of the hub", "|": "a prefix"}


def register(name: str = "fusedattn") -> None:
    """Make `name` an attn_implementation of every model that calls transformers' AttentionInterface.

    Examples:
        >>> from transformers import AutoModel, BertConfig
        >>> fusedattn.compat.transformers.register()
        >>> config = BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=256)
        >>> model = AutoModel.from_config(config, attn_implementation="fusedattn")  # or from_pretrained(path, ...)
        >>> model.set_attn_implementation("fusedattn")  # or later

    Attention is then ours in training, in generate() with any cache and under gradient checkpointing, in each part of a
    model whose code calls the interface. A part that does not (Bloom, LED, MPT, DeBERTa-v2; in transformers 4 also BERT
    and T5), or that passes sparse indices or a sink for each query (DeepSeek-V3.2), computes what it does with "eager".
    A warning names the class of the model, once. Code is read when a model is built or loaded and when
    `set_attn_implementation` is called: this wraps these methods of PreTrainedModel, which do as before for every other
    name. After replacing attention in a model, call `set_attn_implementation` again. A model gets eager's floating
    masks, as large as the scores, where its code is mixed or replaced by functions that are not a method of its
    classes, and where the name was written into a config by hand. generate_batch() takes no registered name.
    output_attentions=True gets weights in models that hand the keyword to attention; set it in the config for those
    that do not, such as GPT-2.

    Registering twice, or under two names, does no harm.

    Raises:
        ImportError: without transformers 4.54 or newer.
        TypeError, ValueError: for a name that is no string, is empty, holds what transformers reads as something else
            ("flash", "/" or "|"), or is taken.
    """
    if not isinstance(name, str):
        fail(TypeError, "name", "a string", type(name).__name__)
    if not name:
        fail(ValueError, "name", "a name", repr(name))
    for part, meaning in RESERVED.items():
        if part in name:
            fail(ValueError, "name", f"a name without {part!r}, which transformers takes for {meaning}", repr(name))
    try:
        from transformers import AttentionInterface

        from ._hf import install
    except ImportError as error:
        raise ImportError("fusedattn.compat.transformers: needs transformers 4.54 or newer") from error
    registered = AttentionInterface().get(name)
    if name == "eager" or registered not in (None, fusedattn_forward):
        fail(ValueError, "name", "a name of its own", f"{name!r}, which transformers has")
    install(name, fusedattn_forward)


def fusedattn_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`fusedattn.attention` as transformers calls attention.

    A mask holds causality, window, padding and packing, and nothing comes on top of it. Without one, attention is
    causal if `is_causal` says so and there is more than one query, the first query level with the first key: the one
    query of a decoding step sees all keys, the prompt in a static cache none of the empty slots. In a model that gets
    eager's masks, no mask hides nothing.

    Args:
        module: has `is_causal`, for where the keyword is None; without either it is True.
        query, key, value: (B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv), any strides; B may be 1 for some of them.
        attention_mask: broadcastable to (B, Hq, Lq, Lk); bool, True = may attend, or floating, added to the scores.
            Columns after the last key are left out.
        position_bias: floating, of such a shape, added to the scores.
        dropout: the share of weights dropped, in training or not.
        scaling: 1 / sqrt(D) by default.
        softcap: as in `fusedattn.attention`.
        s_aux: floating (Hq,), a sink for each head.
        cu_seq_lens_q, cu_seq_lens_k: int32 (n + 1,), where packed sequences begin, in a batch of 1. No query sees a key
            of another sequence, whether there is a mask or not. max_length_q, max_length_k: the longest lengths.
        output_attentions: whether weights are wanted; by default as the module's config says.
        others: ignored, such as `sliding_window`, but for those in REFUSED.

    Returns:
        (output (B, Lq, Hq, Dv) in query's dtype, contiguous; weights (B, Hq, Lq, Lk), after dropout, or None). A row
        that sees nothing is 0.

    Raises:
        TypeError, ValueError: as `fusedattn.attention`.
        NotImplementedError: for a keyword in REFUSED that is not None.
    """
    for name, meaning in REFUSED.items():
        if others.get(name) is not None:
            fail(NotImplementedError, name, f"None, for {meaning} is not implemented", type(others[name]).__name__)
    for name, x in dict(query=query, key=key, value=value).items():
        check_strided(**{name: x})
        if x.dim() != 4:
            fail(ValueError, name, "rank 4, (B, H, L, D)", tuple(x.shape))
    pairs = dict(attention_mask=attention_mask, position_bias=position_bias)
    check_strided(**{name: x for name, x in pairs.items() if x is not None})
    dtype = torch.bool if attention_mask is None else attention_mask.dtype
    if not (dtype == torch.bool or dtype.is_floating_point):
        fail(TypeError, "attention_mask", "a bool or floating tensor", dtype)

    # Queries that are learned for all samples come as a batch of one.
    batch = max(x.shape[0] for x in (query, key, value))
    query, key, value = (x.expand(batch, -1, -1, -1) if x.shape[0] == 1 else x for x in (query, key, value))
    length = query.shape[2]
    config = getattr(module, "config", None)
    eager_masks = getattr(config, "_attn_implementation", None) in NAMES and masks_of(config) is None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(length > 1 and attention_mask is None and causal and not eager_masks)
    if causal and key.shape[2] > length:
        key, value = key[:, :, :length], value[:, :, :length]
    # Some masks of transformers 4 are longer than the keys.
    mask, bias = _pairs(attention_mask, key.shape[2]), _pairs(position_bias, key.shape[2])
    if mask is not None and mask.dtype != torch.bool:
        bias = mask if bias is None else bias + mask
        mask = None
    options: dict[str, Any] = dict(scale=scaling, softcap=softcap, sinks=s_aux, dropout_p=dropout)
    weights_wanted = others.get("output_attentions")
    weights_wanted = getattr(config, "output_attentions", False) if weights_wanted is None else weights_wanted
    if (offsets := _offsets(others, batch)) is not None:
        if mask is None and bias is None and not weights_wanted:
            longest = {f"max_seqlen_{side}": others.get(f"max_length_{side}") for side in "qk"}
            options |= {name: x.item() if isinstance(x, Tensor) else x for name, x in longest.items()}
            q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
            return attention_varlen(q, k, v, *offsets, causal=causal, **options)[None], None
        rows, keys = (
            torch.searchsorted(x[1:], torch.arange(of.shape[2], device=x.device), right=True)
            for x, of in zip(offsets, (query, key), strict=True)
        )
        same = (rows[:, None] == keys)[None, None]
        mask = same if mask is None else mask & same
    options |= dict(mask=mask, bias=bias, causal=causal, align="top_left")
    if weights_wanted:
        out, weights = attention(query, key, value, **options, return_weights=True)
    else:
        out, weights = attention(query, key, value, **options), None
    return out.transpose(1, 2).contiguous(), weights


def _offsets(others: dict[str, Any], batch: int) -> tuple[Tensor, Tensor] | None:
    """Return where packed sequences begin, of queries and of keys, if the model was given that; else None."""
    given: dict[str, Any] = {name: others.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    if all(x is None for x in given.values()):
        return None
    check_strided(**given)
    if batch != 1:
        fail(ValueError, "cu_seq_lens_q", "a batch of 1 beside it, which holds all sequences", f"a batch of {batch}")
    for name, x in given.items():
        if x.dtype not in (torch.int32, torch.int64):
            fail(TypeError, name, "an int32 or int64 tensor", x.dtype)
        if x.dim() != 1:
            fail(ValueError, name, "rank 1, (sequences + 1,)", tuple(x.shape))
    rows, keys = (x.int() for x in given.values())
    return rows, keys


def _pairs(scores: Tensor | None, keys: int) -> Tensor | None:
    """Return a mask or bias in rank 4, as torch broadcasts it, cut to the number of keys."""
    if scores is None:
        return None
    scores = scores[(None,) * (4 - scores.dim())]
    return scores[..., :keys] if scores.shape[-1] > keys else scores
