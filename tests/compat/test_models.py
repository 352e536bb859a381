"""Tests tiny random models of each family of Hugging Face Transformers against eager attention."""

import copy
import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import fusedattn as fa
from fusedattn.compat import transformers as compat

from .. import sample
from ..close import assert_as_good, assert_like, exactly, flat
from ..inside import Seen
from .families import BY_NAME, FAMILIES, GROUPED, MAJOR, drawn, inputs_of, padding, tokens, weighted

transformers = pytest.importorskip("transformers")
MaskPlan = pytest.importorskip("fusedattn.compat._hf").MaskPlan
GENERATING = [x for x in FAMILIES if x.kind not in ("encoder", "image") and x.name != "BERT decoder"]


@pytest.fixture(autouse=True, scope="module")
def _registered():
    compat.register()
    compat.register("blocks", masks="blocks")


@functools.cache
def model_of(name):
    family = BY_NAME[name]
    if MAJOR < family.since:
        pytest.skip(f"{name} has attention of its own in transformers {MAJOR}")
    return drawn(family)


def outcome(model, implementation, inputs):
    model.set_attn_implementation(implementation)
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    logits = out.logits[inputs["labels"] != -100] if out.logits.dim() == 3 else out.logits
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return dict(loss=out.loss.detach(), logits=logits.detach()) | grads


def assert_same(got, want, exact):
    assert [name for name in got if got[name] is None] == [name for name in want if want[name] is None]
    assert_as_good(got["logits"], want["logits"], exact["logits"], "logits")
    # All gradients together: the error of eager for a few elements is up to chance.
    assert_as_good(*(flat(x for name, x in each.items() if name != "logits") for each in (got, want, exact)))


NAMES = "fusedattn", "blocks"
TRAINED = [x for x in sample.checkered(FAMILIES, ["plain", "padded"], NAMES) if "ViT-padded" not in x.id]


@pytest.mark.parametrize("family, case, name", TRAINED)
def test_logits_loss_and_gradients_are_eagers(family, case, name, calls):
    model, inputs = model_of(family.name), inputs_of(family, case == "padded")
    want = outcome(model, "eager", inputs)
    assert not calls
    got = outcome(model, name, inputs)
    assert len(calls) == (6 if family.kind in ("seq2seq", "speech") else 2)  # each layer, and cross attention
    assert {type(x["mask"]) for x in calls} <= {type(None), MaskPlan if name == "blocks" else torch.Tensor}
    assert_same(got, want, exactly(outcome, model, "eager", inputs))


@pytest.mark.parametrize("name", ["Mistral", "PaliGemma"])
def test_no_mask_of_all_pairs_is_made(name, monkeypatch):
    monkeypatch.setattr("fusedattn.call.bits.CHUNK", 2**14)
    model, ids, pairs = model_of(name), tokens(2, 768), 768 * 768
    more = dict(token_type_ids=(torch.arange(768) > 300).long().expand(2, -1)) if name == "PaliGemma" else {}
    for implementation in NAMES:
        model.set_attn_implementation(implementation)
        with Seen() as seen:
            model.model(ids, **more)
        largest = max(nbytes for *_, nbytes in seen.made)
        assert largest < pairs / 2 if implementation == "blocks" else largest >= pairs


def test_compiled_code_makes_plans_of_any_size_once():
    model, counter, mask = model_of("Llama"), CompileCounter(), transformers.AttentionMaskInterface()["blocks"]
    model.set_attn_implementation("blocks")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def made(shown):
        batch, length = shown.shape
        rows = dict(q_length=length) if MAJOR > 4 else dict(cache_position=torch.arange(length))
        return mask(batch_size=batch, kv_length=length, attention_mask=shown, config=model.config, **rows).block_mask

    for sizes in ((2, 9), (3, 13), (4, 16)):  # a block in Triton's interpreter has 16 rows
        assert len(made(torch.ones(sizes, dtype=torch.bool))) == sizes[0]
    assert counter.frame_count == 1


@pytest.mark.parametrize("name, width", [("Gemma 4", 512), ("DeepSeek-V3", 192)])
@pytest.mark.one_in(2)
def test_wide_heads_by_kernels(name, width, device, monkeypatch):
    widths = []
    attention = lambda *x, **options: widths.append(x[0].shape[3]) or fa.attention(*x, **options)  # noqa: E731
    monkeypatch.setattr(compat, "attention", attention)
    model = copy.deepcopy(model_of(name)).to(device)
    inputs = {key: x.to(device) for key, x in inputs_of(BY_NAME[name], padded=True).items()}
    want, exact = outcome(model, "eager", inputs), exactly(outcome, model, "eager", inputs)
    with fa.use_backend("triton"):
        assert_same(outcome(model, "fusedattn", inputs), want, exact)
    assert max(widths) == width


def generated(model, implementation, inputs, **options):
    model.set_attn_implementation(implementation)
    options |= dict(max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_scores=True)
    out = model.generate(**inputs, **options)
    return out.sequences, torch.stack(out.scores)


CACHES = {
    "dynamic": dict(cache_implementation="dynamic"),
    "static": dict(cache_implementation="static"),
    "beams": dict(num_beams=3),
    "in chunks": dict(prefill_chunk_size=4),
    "no cache": dict(use_cache=False),
}
GENERATED = sample.product(GENERATING, NAMES, CACHES, [False, True])
GENERATED = [x for x in GENERATED if x.values[0].kind == "decoder" or x.values[2] != "in chunks"]


@pytest.mark.parametrize("family, name, case, padded", sample.one_in(21, GENERATED))
def test_generated_tokens_are_eagers(family, name, case, padded, calls):
    if MAJOR < 5 and (family.name, case) == ("DeepSeek-V3", "static"):
        pytest.skip("the static cache of transformers 4 takes values for as wide as keys")
    model, left_out = model_of(family.name), ("labels", "decoder_attention_mask")
    inputs = {key: x for key, x in inputs_of(family, padded).items() if key not in left_out}
    want, want_scores = generated(model, "eager", inputs, **CACHES[case])
    assert not calls
    got, scores = generated(model, name, inputs, **CACHES[case])
    tokens_too, exact = exactly(generated, model, "eager", inputs, **CACHES[case])
    assert calls and len(scores) == 6 and torch.equal(got, want) and torch.equal(tokens_too, want)
    assert_as_good(scores, want_scores, exact)


@pytest.mark.skipif(MAJOR < 5, reason="transformers 4 makes a mask there")
def test_the_prompt_in_a_static_cache_is_causal_and_sees_no_empty_slot(calls):
    generated(model_of("Llama"), "fusedattn", dict(input_ids=tokens(2, 5)), cache_implementation="static")
    assert calls[0]["causal"] and calls[0]["mask"] is None and not calls[-1]["causal"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="came with transformers 5")
def test_layers_that_share_keys_may_be_handed_the_last_rows_alone(name, calls):
    """Layers that share keys are right for the last queries alone; only the mask shows that the first are missing."""
    options = dict(vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, global_head_dim=8, num_hidden_layers=4)
    options |= dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=32, num_kv_shared_layers=2)
    config = transformers.Gemma4TextConfig(**{**GROUPED, **options, "head_dim": 8})
    model = weighted(transformers.Gemma4ForCausalLM._from_config(config, attn_implementation="eager"))
    x, repeating = tokens(2, 9), tokens(1, 5).repeat(1, 3)

    def found(model, name):
        model.set_attn_implementation(name)
        with torch.no_grad():
            results = model(x, use_cache=False, logits_to_keep=3).logits.flatten()
        for more in (dict(inputs=x, cache_implementation="static"), dict(inputs=repeating, prompt_lookup_num_tokens=3)):
            results = torch.cat((results, *map(torch.flatten, generated(model, name, more))))
        return results

    assert_as_good(found(model, name), found(model, "eager"), exactly(found, model, "eager"))
    assert calls


@pytest.mark.parametrize("name", ["Llama", "BERT"])
@pytest.mark.parametrize("padded", [False, True])
def test_attentions_are_eagers_where_they_are_asked_for(name, padded):
    model, inputs = model_of(name), inputs_of(BY_NAME[name], False) | dict(output_attentions=True)
    if padded:
        inputs["attention_mask"] = torch.ones(3, 9).long().index_fill(1, torch.tensor([7, 8]), 0)

    def found(model, implementation):
        model.set_attn_implementation(implementation)
        return model(**inputs).attentions

    got = found(model, "fusedattn")
    assert len(got) == 2 and not model(**inputs | dict(output_attentions=None)).attentions
    assert_like(got, found, model, "eager")
    if name == "Llama" and not padded:
        model.set_attn_implementation("fusedattn")
        model.config._output_attentions = True  # transformers refuses to set it with any name but "eager"
        assert model(inputs["input_ids"]).attentions[0].shape == (3, 4, 9, 9)
        model.config._output_attentions = False


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("given", ["offsets", "positions", "both"])
def test_packed_sequences_do_not_see_each_other(given, name):
    model, ids, lengths = model_of("Llama"), tokens(1, 11), (4, 1, 6)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    of = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=6, max_length_k=6)
    positions = dict(position_ids=torch.cat([torch.arange(n) for n in lengths])[None])
    packed = dict(offsets=of, positions=positions, both=of | positions)[given]
    alone = lambda model: torch.cat([model(part, use_cache=False).logits for part in ids.split(lengths, 1)], 1)  # noqa: E731
    model.set_attn_implementation("eager")
    want, exact = alone(model), exactly(alone, model)
    model.set_attn_implementation(name)
    assert_as_good(model(ids, use_cache=False, **packed).logits, want, exact)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # 4.57 lacks the new name
@pytest.mark.parametrize(
    ("name", "reentrant"),
    # T5 with reentrant checkpoints is left out: it sums the encoder's gradient in another order, with eager, too.
    [("Llama", False), ("Llama", True), ("Gemma 2", False), ("Gemma 2", True), ("T5", False)],
)
def test_checkpointing_changes_no_bit_of_a_gradient(name, reentrant, calls):
    model = copy.deepcopy(model_of(name)).train()
    inputs = inputs_of(BY_NAME[name], padded=True) | dict(use_cache=False)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    torch.manual_seed(1)
    want = outcome(model, "fusedattn", inputs)
    once = len(calls)
    assert all(call["dropout_p"] > 0 for call in calls)
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    torch.manual_seed(1)
    got = outcome(model, "fusedattn", inputs)
    assert len(calls) == 3 * once  # each call was computed again
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_hidden_rows_are_finite_in_half_precision():
    model = copy.deepcopy(model_of("Gemma 2")).to(torch.bfloat16)
    got = outcome(model, "fusedattn", inputs_of(BY_NAME["Gemma 2"], padded=True))
    assert all(x.isfinite().all() for x in got.values() if x is not None)
    everything = model(input_ids=tokens(3, 9), attention_mask=padding(9)).logits
    assert everything.dtype == torch.bfloat16 and everything.isfinite().all()
