"""Hugging Face models of which no part, or not each, calls the attention interface: eager's answer, and a warning."""

import copy
import functools
import json
import pickle
import types
import warnings

import pytest
import torch

import fusedattn as fa
from fusedattn.compat import transformers as compat

from .. import sample
from .families import FAMILIES, GROUPED, MAJOR, SILENT, TINY, drawn, inputs_of, padding, tokens, weighted

transformers = pytest.importorskip("transformers")
compat.register()
judge = pytest.importorskip("fusedattn.compat._hf_models")
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb  # noqa: E402

CALLING = [family for family in FAMILIES if family.since <= MAJOR]
ROUTES = ["from_config", "from_pretrained", "set_attn_implementation", "deepcopy"]


@pytest.fixture(autouse=True)
def told():
    """The warnings of ours: each test is the first to see a model."""
    before = set(judge._warned)
    judge._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield Told(caught)
    judge._warned.clear()
    judge._warned.update(before)


class Told:
    def __init__(self, caught):
        self.caught = caught

    def __call__(self):
        return [str(each.message) for each in self.caught if "fusedattn is not used" in str(each.message)]


@pytest.fixture
def calls(monkeypatch):
    """The keywords of each call of `fusedattn.attention` by way of transformers."""
    seen = []

    def attention(*args, **options):
        seen.append(options)
        return fa.attention(*args, **options)

    monkeypatch.setattr(compat, "attention", attention)
    return seen


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
        want, out = logits(model, inputs), logits(got, inputs)
        if out.dim() == 3 and out.shape[:2] == visible.shape:
            want, out = want[visible], out[visible]
        torch.testing.assert_close(out, want, rtol=0, atol=1e-5 * max(1.0, want.abs().max().item()))
    assert calls and not told()
    if family.name != "T5" and (MAJOR, family.name) != (4, "BART"):  # a bias of positions, a mask that it makes itself
        assert all(call["bias"] is None for call in calls)


class OwnAttention(LlamaAttention):
    """Inherits the call of the interface, and does not run it."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        group = self.num_key_value_groups
        scores = query @ key.repeat_interleave(group, 1).mT * self.scaling + attention_mask
        out = scores.softmax(-1) @ value.repeat_interleave(group, 1)
        return self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


class ExpAttention(LlamaAttention):
    """The same, in no word that says so."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        group = self.num_key_value_groups
        scores = query @ key.repeat_interleave(group, 1).mT * self.scaling + attention_mask
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        out = weights / weights.sum(-1, keepdim=True) @ value.repeat_interleave(group, 1)
        return self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


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


JUDGED = [
    (AllOwn, 0, "AllOwn, whose code"),
    (HalfOwn, 1, "OwnAttention of HalfOwn, which"),
    (HalfExp, 1, "ExpAttention of HalfExp, which"),
    (Inheriting, 2, None),
    (MaskedOnly, 2, None),
    (Open, 2, None),
    (OnlyEager, 2, None),
]


@pytest.mark.parametrize(
    ("cls", "used", "text", "route"),
    sample.one_in(
        3, [pytest.param(*each, route, id=f"{each[0].__name__}-{route}") for each in JUDGED for route in ROUTES]
    ),
)
def test_it_is_the_code_that_runs_which_is_judged(cls, used, text, route, told, calls, tmp_path):
    model = changed(cls)
    got = made(model, route, tmp_path)
    for inputs in (PADDED, dict(PADDED, attention_mask=None)):
        calls.clear()
        torch.testing.assert_close(logits(got, inputs)[SHOWN], logits(model, inputs)[SHOWN], rtol=0, atol=1e-5)
        assert len(calls) == used
        assert all(call["bias"] is not None for call in calls) == (cls in (AllOwn, HalfOwn, HalfExp, OnlyEager))
    assert all(text in one for one in told()) and len(told()) == (text is not None)


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
    with torch.no_grad():
        want = model(**inputs).last_hidden_state
        assert not calls
        torch.testing.assert_close(got(**inputs).last_hidden_state, want, rtol=0, atol=1e-5)
    assert len(calls) == used
    if not (MAJOR < 5 and route == "set_attn_implementation"):  # transformers 4 sets the image encoder alone
        assert [text in one for one in told()] == [True]


@pytest.mark.skipif(MAJOR < 5, reason="ViT of transformers 4 asks for no mask")
def test_a_mask_that_hides_nothing_is_there_where_none_would_be_causal(calls):
    family = next(family for family in FAMILIES if family.name == "ViT")
    model = drawn(family, attn_implementation="eager")
    inputs = inputs_of(family, padded=False)
    want = logits(model, inputs)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True
    model.set_attn_implementation("fusedattn")
    torch.testing.assert_close(logits(model, inputs), want, rtol=0, atol=1e-5)
    assert len(calls) == 2


def test_a_class_whose_forward_is_replaced_is_judged_again(monkeypatch, told, calls):
    model = changed(Inheriting)
    want = logits(model, PADDED)
    model.set_attn_implementation("fusedattn")
    logits(model, PADDED)
    assert len(calls) == 2
    monkeypatch.setattr(PassingOn, "forward", OwnAttention.forward)
    model.set_attn_implementation("fusedattn")
    torch.testing.assert_close(logits(model, PADDED), want, rtol=0, atol=1e-5)
    assert len(calls) == 2 and len(told()) == 1


class Unreadable:
    """Code in C, as far as can be seen."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments, **options):
        return self.function(*arguments, **options)


def wrapped(forward):
    """As one that takes times."""

    @functools.wraps(forward)
    def run(*arguments, **options):
        return forward(*arguments, **options)

    return run


def handed(forward, *arguments, **options):
    return forward(*arguments, **options)


def hooked(module):
    """As accelerate does."""

    def new_forward(module, *arguments, **options):
        return module._old_forward(*arguments, **options)

    module._old_forward = module.forward
    return functools.update_wrapper(functools.partial(new_forward, module), module._old_forward)


def own(module):
    return types.MethodType(OwnAttention.forward, module)


@pytest.mark.parametrize(
    "replacement",
    [
        own,
        lambda module: functools.partial(OwnAttention.forward, module),
        lambda module: wrapped(own(module)),
        lambda module: functools.wraps(module.forward)(functools.partial(OwnAttention.forward, module)),
        lambda module: Unreadable(own(module)),
        lambda module: types.MethodType(ExpAttention.forward, module),
        lambda module: wrapped(copy.deepcopy(module).forward),  # of a config that stays "eager"
    ],
    ids=["method", "partial", "wrapped", "named after", "unreadable", "no softmax", "another's"],
)
@pytest.mark.parametrize("layers", [(0, 1), (0,)], ids=["all", "one"])
@pytest.mark.parametrize("loaded", [False, True], ids=["set", "set again"])
def test_a_forward_that_an_instance_has_of_its_own(replacement, layers, loaded, told, calls):
    model = changed(Inheriting)
    if loaded:
        model.set_attn_implementation("fusedattn")
        model.config._attn_implementation = "eager"
    for index in layers:
        attention = model.model.layers[index].self_attn
        attention.forward = replacement(attention)
    want = logits(model, PADDED)
    model.set_attn_implementation("fusedattn")
    assert_eagers(model, want)
    assert len(calls) == 2 - len(layers) and len(told()) == 1
    assert ("PassingOn" in told()[0]) == (len(layers) == 1)


@pytest.mark.parametrize(
    "replacement",
    [
        hooked,
        lambda module: wrapped(module.forward),
        lambda module: functools.partial(module.forward),
        lambda module: functools.partial(handed, module.forward),
        lambda module: types.MethodType(LlamaAttention.forward, module),
        lambda module: module.forward,
    ],
    ids=["hooked", "wrapped", "partial", "argument", "method", "same"],
)
def test_a_forward_of_an_instance_that_still_calls(replacement, told, calls):
    model = changed(Inheriting)
    want = logits(model, PADDED)
    for module in model.modules():
        if not isinstance(module, transformers.PreTrainedModel):
            module.forward = (replacement if isinstance(module, LlamaAttention) else hooked)(module)
    model.set_attn_implementation("fusedattn")
    assert_eagers(model, want)
    assert [call["bias"] for call in calls] == [None, None] and not told()


def test_what_wraps_a_forward_in_name_only_is_read(monkeypatch, told, calls):
    model = changed(Inheriting)
    want = logits(model, PADDED)

    @functools.wraps(PassingOn.forward)
    def forward(self, *arguments, **options):
        return OwnAttention.forward(self, *arguments, **options)

    monkeypatch.setattr(PassingOn, "forward", forward)
    model.set_attn_implementation("fusedattn")
    assert_eagers(model, want)
    assert not calls and len(told()) == 1


@pytest.mark.skipif(MAJOR < 5, reason="transformers 4 reads no is_causal in a config")
def test_a_decoder_that_is_made_to_see_both_ways(calls):
    model = changed(Inheriting, is_causal=False)
    want = logits(model, dict(PADDED, attention_mask=None))
    model.set_attn_implementation("fusedattn")
    torch.testing.assert_close(logits(model, dict(PADDED, attention_mask=None)), want, rtol=0, atol=1e-5)
    assert len(calls) == 2


def test_a_mask_function_that_returns_the_wrong_kind_is_caught(monkeypatch):
    """As it was before: a bool mask, or None, for code that adds it."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    model = changed(HalfOwn)
    want = logits(model, PADDED)
    model.set_attn_implementation("fusedattn")
    torch.testing.assert_close(logits(model, PADDED), want, rtol=0, atol=1e-5)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "fusedattn", sdpa_mask)
    assert (logits(model, PADDED) - want).abs().max() > 0.1


def test_a_name_that_is_written_into_the_config_by_hand():
    for family in SILENT[:1] + CALLING[:1]:
        model = drawn(family, attn_implementation="eager")
        inputs = inputs_of(family, padded=True)
        want = logits(model, inputs)
        model.config._attn_implementation = "fusedattn"
        torch.testing.assert_close(logits(model, inputs), want, rtol=0, atol=1e-5)


def assert_eagers(model, want, inputs=PADDED):
    torch.testing.assert_close(logits(model, inputs)[SHOWN], want[SHOWN], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cls", [HalfOwn, AllOwn, OnlyEager])
def test_a_name_by_hand_after_another_model_of_its_class_of_configs_was_judged(cls):
    model, other = changed(cls), made(changed(Inheriting), "from_config", None)
    want = logits(model, PADDED)
    for name in ("fusedattn", other.config._attn_implementation):
        model.config._attn_implementation = name
        assert_eagers(model, want)


def test_a_name_by_hand_where_another_judged_one_was(calls):
    """What was changed in between was not read."""
    model = changed(Inheriting)
    model.set_attn_implementation("fusedattn")
    for quietly in (False, True):
        if quietly:
            model.config._attn_implementation = "eager"
        else:
            model.set_attn_implementation("eager")
        model.model.layers[0].self_attn = weighted(OwnAttention(model.config, 0))
        want = logits(model, PADDED)
        model.config._attn_implementation = "fusedattn"
        assert_eagers(model, want)
        assert calls[-1]["bias"] is not None


@pytest.mark.parametrize("cls", [HalfOwn, AllOwn, MaskedOnly])
@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1), (1, 0)], ids=str)
def test_two_models_of_one_config(cls, asked):
    config = transformers.LlamaConfig(**GROUPED, attn_implementation="eager")
    models = [weighted(each(config)) for each in (cls, Inheriting)]
    given = [dict(PADDED, attention_mask=mask) for mask in (padding(9), None)]
    want = [[logits(model, inputs) for inputs in given] for model in models]
    for index in asked:
        models[index].set_attn_implementation("fusedattn")
        for model, expected in zip(models, want, strict=True):
            for inputs, each in zip(given, expected, strict=True):
                assert_eagers(model, each, inputs)


def test_a_part_that_is_asked_alone_shares_its_config_with_what_is_around_it():
    model = weighted(see_and_speak(transformers.LlamaConfig(**GROUPED), attn_implementation="eager"))
    llama = model.model.language_model
    llama.layers[0].self_attn = weighted(OwnAttention(llama.config, 0))
    want, inner = logits(model, SEEN), transformers.LlamaModel(llama.config)
    inner.set_attn_implementation("fusedattn")
    shown = SEEN["attention_mask"] == 1
    torch.testing.assert_close(logits(model, SEEN)[shown], want[shown], rtol=0, atol=1e-5)


def test_an_ordinary_model_after_one_that_is_not_has_no_floating_mask(calls):
    for cls in (HalfOwn, Inheriting):
        calls.clear()
        logits(made(changed(cls), "from_config", None), PADDED)
    assert [call["bias"] for call in calls] == [None, None]


def test_a_copied_config_stays_judged_and_a_pickled_or_saved_one_does_not(calls, tmp_path):
    model = changed(Inheriting)
    before, want = model.config.to_dict(), logits(model, PADDED)
    model.set_attn_implementation("fusedattn")
    for copied in (copy.copy(model.config), copy.deepcopy(model.config), copy.deepcopy(model).config):
        assert compat.masks_of(copied) is compat.masks_of(model.config) is not None
    bart = drawn(next(family for family in FAMILIES if family.name == "BART"), attn_implementation="fusedattn").config
    decoders = bart.get_text_config(decoder=True)  # as generate() with a static cache takes it
    assert decoders is not bart and compat.masks_of(decoders) is not None
    pickled = pickle.loads(pickle.dumps(model))
    assert pickled.config._attn_implementation == "fusedattn" and compat.masks_of(pickled.config) is None
    assert_eagers(pickled, want)
    pickled.set_attn_implementation("fusedattn")
    calls.clear()
    assert_eagers(pickled, want)
    assert [call["bias"] for call in calls] == [None, None]
    assert model.config.to_dict() == before and "fusedattn" not in json.dumps(before)


@pytest.mark.parametrize("name", ["Llama", "DPT"])  # whose to_dict in transformers 4 is all its own
def test_what_is_saved_says_nothing_of_it(name, tmp_path):
    options = GROUPED | dict(is_hybrid=False, backbone_out_indices=[0, 1], neck_hidden_sizes=[8, 8])
    config = getattr(transformers, f"{name}Config")(**(options if name == "DPT" else GROUPED))
    model = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="fusedattn")
    assert compat.masks_of(model.config) is not None
    model.config.save_pretrained(tmp_path)
    assert "fusedattn" not in (tmp_path / "config.json").read_text()
    loaded = type(config).from_pretrained(tmp_path, attn_implementation="fusedattn")
    assert loaded._attn_implementation == "fusedattn" and compat.masks_of(loaded) is None


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
    want = logits(model, inputs)
    assert not calls and not told()
    for route in ROUTES:
        calls.clear()
        torch.testing.assert_close(logits(made(model, route, tmp_path), inputs), want, rtol=0, atol=1e-5)
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
    want = logits(model, SEEN)
    shown = SEEN["attention_mask"] == 1
    for route in ROUTES:
        calls.clear()
        got = logits(made(model, route, tmp_path), SEEN)
        torch.testing.assert_close(got[shown], want[shown], rtol=0, atol=1e-5)
        assert len(calls) >= used, route
    assert [name in text for name, text in zip(warned, told(), strict=True)] == [True] * len(warned)


def test_a_part_may_be_asked_for_alone(told, calls):
    model = weighted(see_and_speak(transformers.LlamaConfig(**GROUPED), attn_implementation="eager"))
    want, shown = logits(model, SEEN), SEEN["attention_mask"] == 1
    for asked in ({"text_config": "fusedattn", "vision_config": "eager"}, {"vision_config": "fusedattn"}):
        model.set_attn_implementation("eager")
        calls.clear()
        model.set_attn_implementation(asked)
        torch.testing.assert_close(logits(model, SEEN)[shown], want[shown], rtol=0, atol=1e-5)
        assert len(calls) == 2 and not told()


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
        torch.testing.assert_close(logits(compiled, inputs), logits(model, inputs), rtol=0, atol=1e-5)


def test_no_attention_at_all_is_said_too(told):
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    transformers.MambaForCausalLM._from_config(config, attn_implementation="fusedattn")
    assert ["MambaForCausalLM" in text for text in told()] == [True]
