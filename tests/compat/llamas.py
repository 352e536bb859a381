"""Llamas whose attention is not, or not all, that of transformers; and models of any family by each way to ask."""

import copy

import pytest
import torch

from fusedattn.compat import transformers as compat

from ..close import assert_as_good, exactly
from .families import GROUPED, padding, tokens, weighted

transformers = pytest.importorskip("transformers")
compat.register()
from transformers.models.llama.modeling_llama import (  # noqa: E402
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

ROUTES = ["from_config", "from_pretrained", "set_attn_implementation", "deepcopy"]


def made(model, route, tmp_path, name="fusedattn"):
    """A model of the same weights that has asked for `name`, by each way there is to ask."""
    if route == "set_attn_implementation":
        other = copy.deepcopy(model)
        other.set_attn_implementation(name)
    elif route == "from_pretrained":
        model.save_pretrained(tmp_path)
        other = type(model).from_pretrained(tmp_path, attn_implementation=name)
    else:
        other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=name)
        other = copy.deepcopy(other) if route == "deepcopy" else other
        other.load_state_dict(model.state_dict())
    return other.eval()


@torch.no_grad()
def logits(model, inputs, **options):
    inputs = {name: value for name, value in inputs.items() if name != "labels"} | options
    if "decoder_input_ids" not in inputs and model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens(3, 9)
    torch.manual_seed(0)
    return model(**inputs).logits


def scored(self, hidden_states, position_embeddings, attention_mask):
    """Scores and values of a LlamaAttention, (B, H, S, S) and (B, H, S, D)."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (
        project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    group = self.num_key_value_groups
    scores = query @ key.repeat_interleave(group, 1).mT * self.scaling + attention_mask
    return scores, value.repeat_interleave(group, 1)


class OwnAttention(LlamaAttention):
    """Inherits the call of the interface, and does not run it."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        scores, value = scored(self, hidden_states, position_embeddings, attention_mask)
        out = scores.softmax(-1) @ value
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class ExpAttention(LlamaAttention):
    """The same, in no word that says so."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        scores, value = scored(self, hidden_states, position_embeddings, attention_mask)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        out = weights / weights.sum(-1, keepdim=True) @ value
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class PassingOn(LlamaAttention):
    """Calls the interface by way of the class above."""

    def forward(self, *arguments, **options):
        return super().forward(*arguments, **options)


class Changed(transformers.LlamaForCausalLM):
    """A Llama with attention of these classes, one a layer."""

    attentions: tuple = ()

    def __init__(self, config):
        super().__init__(config)
        for index, attention in enumerate(self.attentions):
            self.model.layers[index].self_attn = attention(config, index)
        self.post_init()


class SparseAttention(LlamaAttention):
    """Hides keys by the mask where the interface takes one, and else hands it their indices."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        most = torch.arange(hidden_states.shape[1])[None, :, None] // 2  # of each row one key, about in the middle
        indices = None
        if self.config._attn_implementation in ("eager", "sdpa"):
            chosen = torch.zeros(1, 1, *hidden_states.shape[1:2] * 2, dtype=torch.bool).scatter(3, most[None], True)
            attention_mask = attention_mask.masked_fill(~chosen, torch.finfo(hidden_states.dtype).min)
        else:
            indices = most
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        rows = [x(hidden_states).view(shape).transpose(1, 2) for x in (self.q_proj, self.k_proj, self.v_proj)]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, _ = attend(self, *rows, attention_mask, scaling=self.scaling, indices=indices)
        return self.o_proj(out.flatten(2)), None


class HalfSparse(Changed):
    attentions = (SparseAttention, LlamaAttention)


class HalfOwn(Changed):
    attentions = (OwnAttention, LlamaAttention)


class AllOwn(Changed):
    attentions = (OwnAttention, OwnAttention)


class HalfExp(Changed):
    attentions = (ExpAttention, LlamaAttention)


class NotCausal(LlamaAttention):
    """Takes None for a mask that hides nothing, where a causal model leaves the mask out."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.is_causal = False


class MaskedOnly(Changed):
    attentions = (NotCausal, NotCausal)


class Unmasked(LlamaAttention):
    """Hands on no mask, and does not say what that means."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        del self.is_causal

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        return super().forward(hidden_states, position_embeddings, None, **options)


class Open(Changed):
    attentions = (Unmasked, Unmasked)


class Inheriting(Changed):
    attentions = (PassingOn, PassingOn)


class OnlyEager(Changed):
    """Calls, but says that its code is for eager's masks."""

    _supports_sdpa = _supports_flex_attn = _supports_flash_attn = False


def changed(cls, **options):
    return weighted(cls._from_config(transformers.LlamaConfig(**GROUPED, **options), attn_implementation="eager"))


SHOWN = padding(9) == 1  # what a row says that sees nothing is eager's mean, or our 0
PADDED = dict(input_ids=tokens(3, 9), attention_mask=padding(9), use_cache=False)


def eagers(model, inputs=PADDED):
    """Return the logits of an eager model, in its dtype and in float64."""
    return logits(model, inputs), exactly(logits, model, inputs)


def assert_eagers(model, want, inputs=PADDED):
    """The logits of rows that see something are as good as those that `eagers` gave."""
    assert_as_good(*(x[SHOWN] for x in (logits(model, inputs), *want)))
