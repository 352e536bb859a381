"""Tests that models which call transformers' attention interface use ours; others stay eager, with a warning."""

import copy
import functools
import types

import pytest
import torch

from fusedattn.compat import transformers as compat

from ..close import assert_as_good, exactly
from . import families
from .families import BY_NAME, GROUPED, MAJOR, SILENT, drawn, inputs_of, logits, padding, tokens, transformers, weighted

pytestmark = pytest.mark.usefixtures("told")
compat.register()
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb  # noqa: E402

ROUTES = ["from_config", "from_pretrained", "set_attn_implementation", "deepcopy"]
SHOWN = padding(9) == 1  # a row that sees no key is a mean in eager, and 0 in ours
PADDED = dict(input_ids=tokens(3, 9), attention_mask=padding(9), use_cache=False)
PLAIN = dict(PADDED, attention_mask=None)


def made(model, route, tmp_path=None, name="fusedattn"):
    """Return a model with the weights of `model` whose attention implementation `name` was set by a route."""
    if route == "set_attn_implementation":
        other = copy.deepcopy(model)
        other.set_attn_implementation(attn_implementation=name)
    elif route == "from_pretrained":
        model.save_pretrained(tmp_path)
        other = type(model).from_pretrained(tmp_path, attn_implementation=name)
    else:
        other = type(model)._from_config(copy.deepcopy(model.config), attn_implementation=name)
        other = copy.deepcopy(other) if route == "deepcopy" else other
        other.load_state_dict(model.state_dict())
    return other.eval()


def eagers(model, inputs=PADDED):
    return logits(model, inputs), exactly(logits, model, inputs)


def assert_eagers(model, want, inputs=PADDED):
    assert_as_good(*(x[SHOWN] for x in (logits(model, inputs), *want)))


class OwnAttention(LlamaAttention):
    """Attention with a formula of its own, although its base class calls transformers' attention interface."""

    def weights(self, scores):
        return scores.softmax(-1)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (f(hidden_states).view(shape).transpose(1, 2) for f in projections)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = (x.repeat_interleave(self.num_key_value_groups, 1) for x in (key, value))
        scores = query @ key.mT * self.scaling + attention_mask
        return self.o_proj((OwnAttention.weights(self, scores) @ value).transpose(1, 2).flatten(2)), None


class ExpAttention(OwnAttention):
    """Attention that calls the formula of OwnAttention, so its own source does not show it."""

    def forward(self, *arguments, **options):
        return OwnAttention.forward(self, *arguments, **options)


class PassingOn(LlamaAttention):
    def forward(self, *arguments, **options):
        return super().forward(*arguments, **options)


class NotCausal(LlamaAttention):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.is_causal = False


class Unmasked(LlamaAttention):
    """Attention that drops the mask and does not declare `is_causal`."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        del self.is_causal

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        return super().forward(hidden_states, position_embeddings, None, **options)


class Changed(transformers.LlamaForCausalLM):
    attentions: tuple = (PassingOn, PassingOn)

    def __init__(self, config):
        super().__init__(config)
        for index, attention in enumerate(self.attentions):
            self.model.layers[index].self_attn = attention(config, index)
        self.post_init()


def llama(name, *attentions, **flags):
    return type(name, (Changed,), dict(attentions=attentions, **flags))


HalfOwn = llama("HalfOwn", OwnAttention, LlamaAttention)
AllOwn = llama("AllOwn", OwnAttention, OwnAttention)
HalfExp = llama("HalfExp", ExpAttention, LlamaAttention)
MaskedOnly = llama("MaskedOnly", NotCausal, NotCausal)
Open = llama("Open", Unmasked, Unmasked)
# The model calls the interface, but declares support for eager's masks only.
FOR_EAGER = dict.fromkeys(("_supports_sdpa", "_supports_flex_attn", "_supports_flash_attn"), False)
OnlyEager = llama("OnlyEager", PassingOn, PassingOn, **FOR_EAGER)


def changed(cls=Changed, **options):
    config = transformers.LlamaConfig(**GROUPED, **options)
    return weighted(cls._from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize(
    "family, route", list(zip(SILENT, ROUTES + ROUTES, strict=False)), ids=lambda x: getattr(x, "name", x)
)
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


@pytest.mark.parametrize("name", ["Llama", "BART", "T5", "Whisper", "ViT"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_model_that_calls_has_no_warning_and_no_floating_mask(name, route, told, calls, tmp_path):
    family = BY_NAME[name]
    if family.since > MAJOR:
        pytest.skip(f"{name} has attention of its own in transformers {MAJOR}")
    got = made(drawn(family, attn_implementation="eager"), route, tmp_path)
    assert type(got.config._attn_implementation) is str and got.config._attn_implementation == "fusedattn"
    logits(got, inputs_of(family, name != "ViT"))
    assert calls and not told()
    if name != "T5" and (MAJOR, name) != (4, "BART"):  # T5 has a position bias, BART makes its own mask
        assert all(call["bias"] is None for call in calls)


JUDGED = [
    (AllOwn, 0, "AllOwn, whose code"),
    (HalfOwn, 1, "OwnAttention of HalfOwn, which"),
    (HalfExp, 1, "ExpAttention of HalfExp, which"),
    *[(kind, 2, None) for kind in (Changed, MaskedOnly, Open, OnlyEager)],
]


@pytest.mark.parametrize("cls, used, text", JUDGED, ids=lambda x: getattr(x, "__name__", None))
@pytest.mark.parametrize("route", [ROUTES[0], ROUTES[2]])
def test_it_is_the_code_that_runs_which_is_judged(cls, used, text, route, told, calls, tmp_path):
    model = changed(cls)
    got = made(model, route, tmp_path)
    for inputs in (PADDED, PLAIN):
        calls.clear()
        assert_eagers(got, eagers(model, inputs), inputs)
        assert len(calls) == used
        assert all(call["bias"] is not None for call in calls) == (cls in (AllOwn, HalfOwn, HalfExp, OnlyEager))
    assert all(text in one for one in told()) and len(told()) == (text is not None)


def hooked(module):
    module._old_forward = module.forward
    space = {"__name__": "accelerate.hooks"}
    exec("def new_forward(module, *args, **options): return module._old_forward(*args, **options)", space)
    return functools.update_wrapper(functools.partial(space["new_forward"], module), module._old_forward)


REPLACED = {
    "method": (lambda module: types.MethodType(OwnAttention.forward, module), False),
    "in name": (lambda module: functools.wraps(module.forward)(functools.partial(OwnAttention.forward, module)), False),
    "no softmax": (lambda module: types.MethodType(ExpAttention.forward, module), False),
    "hooked": (hooked, True),
    "same": (lambda module: module.forward, True),
    "above": (lambda module: types.MethodType(LlamaAttention.forward, module), True),
}


@pytest.mark.parametrize("replace, still_calls", REPLACED.values(), ids=REPLACED)
@pytest.mark.parametrize("layers", [(0, 1), (0,)], ids=["all", "one"])
def test_a_forward_that_an_instance_has_of_its_own(replace, still_calls, layers, told, calls):
    model = changed()
    exact = exactly(logits, model, PADDED)
    for index in layers:
        attention = model.model.layers[index].self_attn
        attention.forward = replace(attention)
    want = logits(model, PADDED), exact
    model.set_attn_implementation("fusedattn")
    assert_eagers(model, want)
    assert len(calls) == (2 if still_calls else 2 - len(layers)) and len(told()) == (not still_calls)
    if still_calls:
        assert [call["bias"] for call in calls] == [None, None]


@pytest.mark.skipif(MAJOR < 5, reason="transformers 4 reads no is_causal in a config, and makes no mask for ViT")
def test_what_no_mask_means_is_for_each_module_to_say(calls):
    model = changed(is_causal=False)
    want = eagers(model, PLAIN)
    model.set_attn_implementation("fusedattn")
    assert_as_good(logits(model, PLAIN), *want)
    model = drawn(BY_NAME["ViT"], attn_implementation="eager")
    inputs = inputs_of(BY_NAME["ViT"], padded=False)
    want = eagers(model, inputs)
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True
    model.set_attn_implementation("fusedattn")
    assert_as_good(logits(model, inputs), *want)
    assert len(calls) == 4


@pytest.mark.parametrize("cls", [HalfOwn, AllOwn, OnlyEager, Changed])
def test_a_name_that_is_written_into_the_config_by_hand(cls):
    model = changed(cls)
    want = eagers(model)
    model.config._attn_implementation = "fusedattn"
    assert_eagers(model, want)
    model.set_attn_implementation("fusedattn")
    model.set_attn_implementation("eager")
    model.model.layers[0].self_attn = weighted(OwnAttention(model.config, 0))
    want = eagers(model)
    model.config._attn_implementation = "fusedattn"
    assert_eagers(model, want)


@pytest.mark.parametrize("cls", [HalfOwn, AllOwn, MaskedOnly])
@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1)], ids=str)
def test_two_models_of_one_config(cls, asked):
    config = transformers.LlamaConfig(**GROUPED, attn_implementation="eager")
    models = [weighted(each(config)) for each in (cls, Changed)]
    want = [[eagers(model, inputs) for inputs in (PADDED, PLAIN)] for model in models]
    for index in asked:
        models[index].set_attn_implementation("fusedattn")
        for model, expected in zip(models, want, strict=True):
            for inputs, each in zip((PADDED, PLAIN), expected, strict=True):
                assert_eagers(model, each, inputs)


def test_copies_stay_judged_and_what_is_saved_says_nothing_of_it(calls, tmp_path):
    bart = drawn(BY_NAME["BART"], attn_implementation="fusedattn")
    decoder = bart.config.get_text_config(decoder=True)  # generate() with a static cache uses it
    assert decoder is not bart.config and compat.masks_of(decoder) == compat.masks_of(bart.config) is not None
    for name in ("Llama", "DPT"):  # DPT has a to_dict of its own in transformers 4
        options = GROUPED | dict(is_hybrid=False, backbone_out_indices=[0, 1], neck_hidden_sizes=[8, 8])
        config = getattr(transformers, f"{name}Config")(**(options if name == "DPT" else GROUPED))
        model = getattr(transformers, f"{name}Model")._from_config(config, attn_implementation="fusedattn")
        assert compat.masks_of(model.config) is not None
        model.config.save_pretrained(tmp_path)
        assert "fusedattn" not in (tmp_path / "config.json").read_text()


def see_and_speak(text):
    vision = transformers.CLIPVisionConfig(**families.IMAGE)
    options = dict(image_token_index=63, vision_feature_layer=-1)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, **options)
    return transformers.LlavaForConditionalGeneration._from_config(config, attn_implementation="eager")


SEEN = dict(
    input_ids=torch.cat([torch.full((3, 9), 63), tokens(3, 9).clamp(max=62)], dim=1),
    attention_mask=torch.cat([torch.ones(3, 9, dtype=torch.long), padding(9).flip(1)], dim=1),
    pixel_values=families.images(3),
)
# {name: (model, inputs, number of attentions that are ours, names in the warning)}
PARTS = {
    "Llava": (lambda: see_and_speak(transformers.LlamaConfig(**GROUPED)), SEEN, 3, []),  # one layer of CLIP runs
    "Llava, XGLM": (lambda: see_and_speak(transformers.XGLMConfig(**families.XGLM)), SEEN, 1, ["XGLMModel"]),
}


@pytest.mark.parametrize("route", ROUTES[1:3])
@pytest.mark.parametrize("make, inputs, used, warned", PARTS.values(), ids=PARTS)
def test_the_parts_of_a_model_are_judged_one_by_one(make, inputs, used, warned, route, told, calls, tmp_path):
    model = weighted(make())
    shown = inputs["attention_mask"] == 1

    def result(model, inputs):
        return model(**inputs).logits[shown]

    with torch.no_grad():
        want, exact = result(model, inputs), exactly(result, model, inputs)
        assert not calls
        assert_as_good(result(made(model, route, tmp_path), inputs), want, exact)
    assert len(calls) >= used
    assert [name in text for name, text in zip(warned, told(), strict=True)] == [True] * len(warned)


def test_a_part_may_be_asked_for_alone(told, calls):
    model = weighted(see_and_speak(transformers.LlamaConfig(**GROUPED)))
    want, exact, shown = logits(model, SEEN), exactly(logits, model, SEEN), SEEN["attention_mask"] == 1
    for asked in ({"text_config": "fusedattn", "vision_config": "eager"}, {"vision_config": "fusedattn"}):
        model.set_attn_implementation("eager")
        calls.clear()
        model.set_attn_implementation(asked)
        assert_as_good(logits(model, SEEN)[shown], want[shown], exact[shown])
        assert len(calls) == 2 and not told()


def test_models_of_other_implementations_are_left_alone(told):
    config = transformers.LlamaConfig(**GROUPED)
    llama, bloom = transformers.LlamaForCausalLM(config), drawn(BY_NAME["Bloom"], attn_implementation="eager")
    assert [model.config._attn_implementation for model in (llama, bloom)] == ["sdpa", "eager"]
    llama.set_attn_implementation("eager")
    assert llama.config._attn_implementation == "eager" and not told()
    transformers.MambaForCausalLM._from_config(
        transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4),
        attn_implementation="fusedattn",
    )
    assert ["MambaForCausalLM" in text for text in told()] == [True]  # a model without attention warns too


def test_a_judged_model_is_compiled_without_a_graph_break():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**dict(GROUPED, num_hidden_layers=1)))
    model.eval().set_attn_implementation("fusedattn")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(logits(compiled, PADDED), logits(model, PADDED))
