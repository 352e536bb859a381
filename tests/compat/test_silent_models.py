"""Hugging Face models of which no part, or not each, calls the attention interface: eager's answer, and a warning."""

import pytest
import torch

from .. import sample
from ..close import assert_as_good, exactly
from .families import FAMILIES, GROUPED, MAJOR, SILENT, TINY, drawn, inputs_of, padding, tokens, weighted
from .llamas import (
    PADDED,
    ROUTES,
    HalfOwn,
    HalfSparse,
    OwnAttention,
    changed,
    logits,
    made,
    transformers,
)

pytestmark = pytest.mark.usefixtures("told")
judge = pytest.importorskip("fusedattn.compat._hf_models")
CALLING = [family for family in FAMILIES if family.since <= MAJOR]


@pytest.mark.parametrize(("family", "route"), sample.one_in(3, sample.product(SILENT, ROUTES)))
def test_a_model_that_does_not_call_is_eager_and_says_so_once(family, route, told, calls, tmp_path):
    model = drawn(family, attn_implementation="eager")
    assert not told()
    got = made(model, route, tmp_path)
    assert [family.model in text for text in told()] == [True]
    for padded in (False, True):
        inputs = inputs_of(family, padded)
        assert torch.equal(logits(got, inputs), logits(model, inputs))
    made(model, route, tmp_path)
    assert len(told()) == 1 and not calls


def test_one_that_was_built_with_attention_of_its_own_keeps_it(told):
    """As it does where it is told to be "eager": transformers refuses."""
    falcon = next(family for family in SILENT if family.name == "Falcon")
    model = drawn(falcon, attn_implementation="sdpa")
    inputs = inputs_of(falcon, padded=True)
    want = logits(model, inputs)
    model.set_attn_implementation("fusedattn")
    assert model.config._attn_implementation == "sdpa" and torch.equal(logits(model, inputs), want)
    assert ["FalconForCausalLM" in text for text in told()] == [True]


@pytest.mark.parametrize(("family", "route"), sample.one_in(3, sample.product(CALLING, ROUTES)))
def test_a_model_that_calls_has_no_warning_and_no_floating_mask(family, route, told, calls, tmp_path):
    model = drawn(family, attn_implementation="eager")
    got = made(model, route, tmp_path)
    assert type(got.config._attn_implementation) is str and got.config._attn_implementation == "fusedattn"
    for padded in (False, True):
        inputs = inputs_of(family, padded and family.kind != "image")
        visible = inputs["labels"] != -100
        results = logits(got, inputs), logits(model, inputs), exactly(logits, model, inputs)
        if results[0].dim() == 3 and results[0].shape[:2] == visible.shape:
            results = [x[visible] for x in results]
        assert_as_good(*results)
    assert calls and not told()
    if family.name != "T5" and (MAJOR, family.name) != (4, "BART"):  # a bias of positions, a mask that it makes itself
        assert all(call["bias"] is None for call in calls)


@pytest.mark.parametrize(
    ("name", "options", "used", "text"),
    [
        (
            "BigBirdPegasusModel",  # the decoder calls, the encoder does not
            dict(
                vocab_size=64,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=40,
                decoder_ffn_dim=40,
                max_position_embeddings=64,
                block_size=4,
                num_random_blocks=1,
                pad_token_id=0,
            ),
            4,
            " of BigBirdPegasusModel, which",
        ),
        (
            "GitModel",  # its image encoder calls, the decoder chooses its class by the name
            dict(TINY, vision_config=next(f.options for f in FAMILIES if f.name == "ViT")),
            2,
            "GitSelfAttention of GitModel, which",
        ),
    ],
    ids=["BigBirdPegasus", "GIT"],
)
@pytest.mark.parametrize("route", ROUTES)
def test_the_part_that_calls_is_used(name, options, used, text, route, told, calls, tmp_path):
    config = getattr(transformers, name.replace("Model", "Config"))(**options)
    model = weighted(getattr(transformers, name)._from_config(config, attn_implementation="eager"))
    got = made(model, route, tmp_path)
    inputs = dict(input_ids=tokens(3, 9), attention_mask=padding(9))
    if name == "GitModel":
        inputs["pixel_values"] = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(7))
    else:
        inputs["decoder_input_ids"] = tokens(3, 9)

    def hidden(model, inputs):
        return model(**inputs).last_hidden_state

    with torch.no_grad():
        want, exact = hidden(model, inputs), exactly(hidden, model, inputs)
        assert not calls
        assert_as_good(hidden(got, inputs), want, exact)
    assert len(calls) == used
    if not (MAJOR < 5 and route == "set_attn_implementation"):  # transformers 4 sets the image encoder alone
        assert [text in one for one in told()] == [True]


@pytest.mark.skipif(MAJOR < 5, reason="ViT of transformers 4 asks for no mask")
def test_a_mask_that_hides_nothing_is_there_where_none_would_be_causal(calls):
    family = next(family for family in FAMILIES if family.name == "ViT")
    model = drawn(family, attn_implementation="eager")
    inputs = inputs_of(family, padded=False)
    want, exact = logits(model, inputs), exactly(logits, model, inputs)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True
    model.set_attn_implementation("fusedattn")
    assert_as_good(logits(model, inputs), want, exact)
    assert len(calls) == 2


def test_a_name_that_is_written_into_the_config_by_hand():
    for family in SILENT[:1] + CALLING[:1]:
        model = drawn(family, attn_implementation="eager")
        inputs = inputs_of(family, padded=True)
        want, exact = logits(model, inputs), exactly(logits, model, inputs)
        model.config._attn_implementation = "fusedattn"
        assert_as_good(logits(model, inputs), want, exact)


def test_a_part_that_is_asked_alone_shares_its_config_with_what_is_around_it():
    model = weighted(see_and_speak(transformers.LlamaConfig(**GROUPED), attn_implementation="eager"))
    llama = model.model.language_model
    llama.layers[0].self_attn = weighted(OwnAttention(llama.config, 0))
    want, exact, inner = logits(model, SEEN), exactly(logits, model, SEEN), transformers.LlamaModel(llama.config)
    inner.set_attn_implementation("fusedattn")
    shown = SEEN["attention_mask"] == 1
    assert_as_good(logits(model, SEEN)[shown], want[shown], exact[shown])


def test_models_of_other_implementations_are_not_looked_at(monkeypatch, told):
    monkeypatch.setattr(judge, "survey", None)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))
    bloom = transformers.BloomForCausalLM._from_config(
        transformers.BloomConfig(**SILENT[0].options), attn_implementation="eager"
    )
    assert [type(model.config._attn_implementation) for model in (llama, bloom)] == [str, str]
    assert [model.config._attn_implementation for model in (llama, bloom)] == ["sdpa", "eager"]
    llama.set_attn_implementation("eager")
    assert llama.config._attn_implementation == "eager" and not told()


def image_to_text(**options):
    """ViT, which calls, and TrOCR, which does not."""
    vision = transformers.ViTConfig(**next(f.options for f in FAMILIES if f.name == "ViT"))
    text = transformers.TrOCRConfig(**next(f.options for f in SILENT if f.name == "TrOCR"))
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, text)
    return transformers.VisionEncoderDecoderModel._from_config(config, **options)


def test_the_parts_of_an_encoder_decoder_are_judged_one_by_one(told, calls, tmp_path):
    model = weighted(image_to_text(attn_implementation="eager"))
    images = torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(7))
    inputs = dict(pixel_values=images, decoder_input_ids=tokens(3, 9), decoder_attention_mask=padding(9))
    want, exact = logits(model, inputs), exactly(logits, model, inputs)
    assert not calls and not told()
    for route in ROUTES:
        calls.clear()
        assert_as_good(logits(made(model, route, tmp_path), inputs), want, exact)
        assert len(calls) == 2, route  # the layers of ViT
    assert ["TrOCRForCausalLM" in text for text in told()] == [True]


def see_and_speak(text, **options):
    """CLIP's vision and a language model."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=12,
        patch_size=4,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=63, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration._from_config(config, **options)


SEEN = dict(
    input_ids=torch.cat([torch.full((3, 9), 63), tokens(3, 9).clamp(max=62)], dim=1),
    attention_mask=torch.cat([torch.ones(3, 9, dtype=torch.long), padding(9).flip(1)], dim=1),
    pixel_values=torch.randn(3, 3, 12, 12, generator=torch.Generator().manual_seed(7)),
)


@pytest.mark.parametrize(
    ("text", "used", "warned"),
    [
        (transformers.LlamaConfig(**GROUPED), 3, []),  # vision_feature_layer=-1 needs both layers of CLIP
        (transformers.XGLMConfig(**next(f.options for f in SILENT if f.name == "XGLM")), 2, ["XGLMModel"]),
    ],
    ids=["Llama", "XGLM"],
)
def test_the_parts_of_a_model_that_sees_are_judged_one_by_one(text, used, warned, told, calls, tmp_path):
    model = weighted(see_and_speak(text, attn_implementation="eager"))
    want, exact, shown = logits(model, SEEN), exactly(logits, model, SEEN), SEEN["attention_mask"] == 1
    for route in ROUTES:
        calls.clear()
        got = logits(made(model, route, tmp_path), SEEN)
        assert_as_good(got[shown], want[shown], exact[shown])
        assert len(calls) >= used, route
    assert [name in text for name, text in zip(warned, told(), strict=True)] == [True] * len(warned)


def test_a_part_may_be_asked_for_alone(told, calls):
    model = weighted(see_and_speak(transformers.LlamaConfig(**GROUPED), attn_implementation="eager"))
    want, exact, shown = logits(model, SEEN), exactly(logits, model, SEEN), SEEN["attention_mask"] == 1
    for asked in ({"text_config": "fusedattn", "vision_config": "eager"}, {"vision_config": "fusedattn"}):
        model.set_attn_implementation("eager")
        calls.clear()
        model.set_attn_implementation(asked)
        assert_as_good(logits(model, SEEN)[shown], want[shown], exact[shown])
        assert len(calls) == 2 and not told()


@pytest.mark.parametrize("route", ROUTES)
def test_a_model_that_hands_on_what_is_refused_is_eager_and_says_so(route, told, calls, tmp_path):
    """All of it: the attention that is sparse looks at the name that its config has."""
    model = changed(HalfSparse)
    got = made(model, route, tmp_path)
    assert got.config._attn_implementation == "eager"
    assert torch.equal(logits(got, PADDED), logits(model, PADDED)) and not calls
    assert ["HalfSparse, whose code hands transformers' AttentionInterface indices" in text for text in told()] == [
        True
    ]


@pytest.mark.skipif(not hasattr(transformers, "DeepseekV32Config"), reason="came with transformers 5")
def test_sparse_attention_of_transformers(told, calls):
    options = dict(num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4)
    options |= dict(v_head_dim=7, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1)
    options |= dict(moe_intermediate_size=16, index_topk=3, index_n_heads=2, index_head_dim=8)
    config = transformers.DeepseekV32Config(**{**TINY, **options})
    model = weighted(transformers.DeepseekV32ForCausalLM._from_config(config, attn_implementation="eager"))
    want = logits(model, PADDED)
    model.set_attn_implementation("fusedattn")
    assert torch.equal(logits(model, PADDED), want) and not calls
    assert ["DeepseekV32ForCausalLM" in text for text in told()] == [True]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_what_does_not_call_generates_as_eager_does(cache, told):
    for model, inputs in (
        (
            drawn(SILENT[0], attn_implementation="eager"),
            dict(input_ids=tokens(3, 5), attention_mask=padding(5).flip(1)),
        ),
        (changed(HalfOwn), dict(PADDED)),
    ):
        options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None)
        if isinstance(model, HalfOwn):
            inputs["use_cache"] = False  # OwnAttention has none
        else:
            options["cache_implementation"] = cache
        want = model.generate(**inputs, **options)
        got = made(model, "from_config", None).generate(**inputs, **options)
        assert torch.equal(got, want)
    assert len(told()) == 2


def test_a_judged_model_is_compiled_without_a_graph_break():
    for model in (made(changed(HalfOwn), "from_config", None), drawn(CALLING[0])):
        if not isinstance(model, HalfOwn):
            model.set_attn_implementation("fusedattn")
        inputs = PADDED if isinstance(model, HalfOwn) else inputs_of(CALLING[0], padded=True)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.equal(logits(compiled, inputs), logits(model, inputs))


def test_no_attention_at_all_is_said_too(told):
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    transformers.MambaForCausalLM._from_config(config, attn_implementation="fusedattn")
    assert ["MambaForCausalLM" in text for text in told()] == [True]
