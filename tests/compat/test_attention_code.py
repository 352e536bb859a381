"""The code that runs says whether a model calls the attention interface: of classes, of instances, and of both."""

import copy
import functools
import json
import pickle
import types

import pytest

from fusedattn.compat import transformers as compat

from .. import sample
from ..close import assert_as_good, exactly
from .families import FAMILIES, GROUPED, MAJOR, drawn, padding, weighted
from .llamas import (
    PADDED,
    ROUTES,
    AllOwn,
    ExpAttention,
    HalfExp,
    HalfOwn,
    Inheriting,
    LlamaAttention,
    MaskedOnly,
    OnlyEager,
    Open,
    OwnAttention,
    PassingOn,
    assert_eagers,
    changed,
    eagers,
    logits,
    made,
    transformers,
)

pytestmark = pytest.mark.usefixtures("told")


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
        assert_eagers(got, eagers(model, inputs), inputs)
        assert len(calls) == used
        assert all(call["bias"] is not None for call in calls) == (cls in (AllOwn, HalfOwn, HalfExp, OnlyEager))
    assert all(text in one for one in told()) and len(told()) == (text is not None)


def test_a_class_whose_forward_is_replaced_is_judged_again(monkeypatch, told, calls):
    model = changed(Inheriting)
    want = eagers(model)
    model.set_attn_implementation("fusedattn")
    logits(model, PADDED)
    assert len(calls) == 2
    monkeypatch.setattr(PassingOn, "forward", OwnAttention.forward)
    model.set_attn_implementation("fusedattn")
    assert_as_good(logits(model, PADDED), *want)
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
    exact = exactly(logits, model, PADDED)
    for index in layers:
        attention = model.model.layers[index].self_attn
        attention.forward = replacement(attention)
    want = logits(model, PADDED), exact
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
    want = eagers(model)
    for module in model.modules():
        if not isinstance(module, transformers.PreTrainedModel):
            module.forward = (replacement if isinstance(module, LlamaAttention) else hooked)(module)
    model.set_attn_implementation("fusedattn")
    assert_eagers(model, want)
    assert [call["bias"] for call in calls] == [None, None] and not told()


def test_what_wraps_a_forward_in_name_only_is_read(monkeypatch, told, calls):
    model = changed(Inheriting)
    want = eagers(model)

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
    want = eagers(model, dict(PADDED, attention_mask=None))
    model.set_attn_implementation("fusedattn")
    assert_as_good(logits(model, dict(PADDED, attention_mask=None)), *want)
    assert len(calls) == 2


def test_a_mask_function_that_returns_the_wrong_kind_is_caught(monkeypatch):
    """As it was before: a bool mask, or None, for code that adds it."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    model = changed(HalfOwn)
    want = eagers(model)
    model.set_attn_implementation("fusedattn")
    assert_as_good(logits(model, PADDED), *want)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "fusedattn", sdpa_mask)
    assert (logits(model, PADDED) - want[0]).abs().max() > 0.1


@pytest.mark.parametrize("cls", [HalfOwn, AllOwn, OnlyEager])
def test_a_name_by_hand_after_another_model_of_its_class_of_configs_was_judged(cls):
    model, other = changed(cls), made(changed(Inheriting), "from_config", None)
    want = eagers(model)
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
        want = eagers(model)
        model.config._attn_implementation = "fusedattn"
        assert_eagers(model, want)
        assert calls[-1]["bias"] is not None


@pytest.mark.parametrize("cls", [HalfOwn, AllOwn, MaskedOnly])
@pytest.mark.parametrize("asked", [(0,), (1,), (0, 1), (1, 0)], ids=str)
def test_two_models_of_one_config(cls, asked):
    config = transformers.LlamaConfig(**GROUPED, attn_implementation="eager")
    models = [weighted(each(config)) for each in (cls, Inheriting)]
    given = [dict(PADDED, attention_mask=mask) for mask in (padding(9), None)]
    want = [[eagers(model, inputs) for inputs in given] for model in models]
    for index in asked:
        models[index].set_attn_implementation("fusedattn")
        for model, expected in zip(models, want, strict=True):
            for inputs, each in zip(given, expected, strict=True):
                assert_eagers(model, each, inputs)


def test_an_ordinary_model_after_one_that_is_not_has_no_floating_mask(calls):
    for cls in (HalfOwn, Inheriting):
        calls.clear()
        logits(made(changed(cls), "from_config", None), PADDED)
    assert [call["bias"] for call in calls] == [None, None]


def test_a_copied_config_stays_judged_and_a_pickled_or_saved_one_does_not(calls, tmp_path):
    model = changed(Inheriting)
    before, want = model.config.to_dict(), eagers(model)
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
