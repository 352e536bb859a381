"""Hugging Face Transformers: tiny random models of each family, ours against eager; and the function they call."""

import copy
import functools
import math
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

import fusedattn as fa
from fusedattn.compat import transformers as compat

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
BY_NAME = {family.name: family for family in FAMILIES}
GENERATING = [
    family for family in FAMILIES if family.kind not in ("encoder", "image") and family.name != "BERT decoder"
]


@pytest.fixture(autouse=True, scope="module")
def _registered():
    compat.register()


@pytest.fixture
def calls(monkeypatch):
    """The keywords of each call of `fusedattn.attention` by way of transformers."""
    seen = []

    def attention(*args, **options):
        seen.append(options)
        return fa.attention(*args, **options)

    monkeypatch.setattr(compat, "attention", attention)
    return seen


@functools.cache
def model_of(name):
    """Weights large enough for attention to be far from uniform."""
    family = BY_NAME[name]
    if MAJOR < family.since:
        pytest.skip(f"{name} has attention of its own in transformers {MAJOR}")
    model = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.options)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise if parameter.dim() > 1 else 1 + noise)
    return model


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


def outcome(model, implementation, inputs):
    """The loss, the logits that count and the gradient of each parameter."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    logits = out.logits[inputs["labels"] != -100] if out.logits.dim() == 3 else out.logits
    return dict(loss=out.loss.detach(), logits=logits.detach()) | {
        name: parameter.grad for name, parameter in model.named_parameters()
    }


def assert_same(got, want):
    """To float32 rounding: 1e-5 of the largest element, or of 1."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        if expected is None:
            assert got[name] is None, name
        else:
            atol = 1e-5 * max(1.0, expected.abs().max().item())
            torch.testing.assert_close(got[name], expected, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def pairs(*cases):
    """A test of (family, something) that is named for both."""
    return pytest.mark.parametrize(("family", "case"), [pytest.param(f, c, id=f"{f.name}, {c}") for f, c in cases])


@pairs(*((f, case) for f in FAMILIES for case in ("plain", "padded") if (f.kind, case) != ("image", "padded")))
def test_logits_loss_and_gradients_are_eagers(family, case, calls):
    model, inputs = model_of(family.name), inputs_of(family, case == "padded")
    want = outcome(model, "eager", inputs)
    assert not calls
    got = outcome(model, "fusedattn", inputs)
    assert len(calls) == (6 if family.kind in ("seq2seq", "speech") else 2)  # each layer, and cross attention
    assert_same(got, want)


def generated(model, implementation, inputs, **options):
    """Tokens (B, L) and the scores of each step, or of the beams."""
    model.set_attn_implementation(implementation)
    out = model.generate(
        **inputs,
        max_new_tokens=6,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    return out.sequences, torch.stack(out.scores)


CACHES = {
    "dynamic": dict(cache_implementation="dynamic"),
    "static": dict(cache_implementation="static"),
    "beams": dict(num_beams=3),
    "in chunks": dict(prefill_chunk_size=4),
    "no cache": dict(use_cache=False),
}


@pairs(*((f, case) for f in GENERATING for case in CACHES if f.kind == "decoder" or case != "in chunks"))
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_generated_tokens_are_eagers(family, case, padded, calls):
    if MAJOR < 5 and (family.name, case) == ("DeepSeek-V3", "static"):
        pytest.skip("the static cache of transformers 4 takes values for as wide as keys")
    model, inputs = model_of(family.name), inputs_of(family, padded)
    for name in ("labels", "decoder_attention_mask"):
        inputs.pop(name, None)
    want, want_scores = generated(model, "eager", inputs, **CACHES[case])
    assert not calls
    got, scores = generated(model, "fusedattn", inputs, **CACHES[case])
    assert calls and len(scores) == 6
    assert torch.equal(got, want)
    torch.testing.assert_close(scores, want_scores, rtol=0, atol=1e-4)


def test_a_window_that_begins_to_bind_while_tokens_are_generated():
    model, inputs = model_of("Mistral"), dict(input_ids=tokens(3, 2))
    for cache in ("dynamic", "static"):
        want, _ = generated(model, "eager", inputs, cache_implementation=cache)
        got, _ = generated(model, "fusedattn", inputs, cache_implementation=cache)
        assert torch.equal(got, want)


@pytest.mark.skipif(MAJOR < 5, reason="transformers 4 makes a mask there")
def test_the_prompt_in_a_static_cache_is_causal_and_sees_no_empty_slot(calls):
    generated(model_of("Llama"), "fusedattn", dict(input_ids=tokens(2, 5)), cache_implementation="static")
    assert calls[0]["causal"] and calls[0]["mask"] is None and not calls[-1]["causal"]


def test_packed_sequences_do_not_see_each_other():
    model = model_of("Llama")
    model.set_attn_implementation("fusedattn")
    ids = tokens(1, 7)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    packed = model(ids, position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(part, use_cache=False).logits for part in ids.split((3, 4), dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")  # 4.57 has no other
@pytest.mark.parametrize(
    ("name", "reentrant"),
    # Where both halves of T5 are reentrant, the order in which the encoder's gradient is summed differs, eager's too.
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
    assert len(calls) == 3 * once  # each was computed again
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_a_model_under_a_name_without_its_mask_function_is_caught():
    """The padding mask is dropped without a word, and the comparison above would say so."""
    transformers.AttentionInterface.register("fusedattn_without_mask", compat.fusedattn_forward)
    model, inputs = model_of("Llama"), inputs_of(BY_NAME["Llama"], padded=True)
    want = outcome(model, "eager", inputs)
    wrong = outcome(model, "fusedattn_without_mask", inputs)
    assert (wrong["logits"] - want["logits"]).abs().max() > 0.1
    with pytest.raises(AssertionError, match="loss|logits"):
        assert_same(wrong, want)
    assert_same(outcome(model, "fusedattn", inputs), want)


def test_a_model_that_is_loaded_with_it(tmp_path):
    model = model_of("Llama")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="fusedattn")
    assert loaded.config._attn_implementation == "fusedattn"
    model.set_attn_implementation("eager")
    torch.testing.assert_close(loaded(tokens(2, 5)).logits, model(tokens(2, 5)).logits, rtol=0, atol=1e-5)


def test_hidden_rows_are_finite_in_half_precision():
    model = copy.deepcopy(model_of("Gemma 2")).to(torch.bfloat16)
    got = outcome(model, "fusedattn", inputs_of(BY_NAME["Gemma 2"], padded=True))
    assert all(x.isfinite().all() for x in got.values() if x is not None)
    everything = model(input_ids=tokens(3, 9), attention_mask=padding(9)).logits
    assert everything.dtype == torch.bfloat16 and everything.isfinite().all()


def test_a_tiny_llama_through_the_kernels(device, calls):
    options = dict(GROUPED, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).to(device)
    ids = tokens(2, 5).to(device)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], device=device)
    for inputs in (
        dict(labels=ids),
        dict(labels=ids.masked_fill(mask * mask.roll(1, 1) == 0, -100), attention_mask=mask),
    ):
        want = outcome(model, "eager", dict(input_ids=ids) | inputs)
        with fa.use_backend("triton"):
            got = outcome(model, "fusedattn", dict(input_ids=ids) | inputs)
        assert_same(got, want)
    assert len(calls) == 2


class Module:
    """What transformers hands over in front of the query."""

    def __init__(self, is_causal=None):
        if is_causal is not None:
            self.is_causal = is_causal


def drawn(B=2, Hq=4, Hkv=2, Lq=5, Lk=7, D=6, Dv=3, dtype=torch.float32):
    """query, key, value as views of (B, L, H, D), value of a wider tensor, all of which want gradients."""
    query, key = torch.randn(B, Lq, Hq, D, dtype=dtype), torch.randn(B, Lk, Hkv, D, dtype=dtype)
    value = torch.randn(B, Lk, Hkv, 2 * Dv, dtype=dtype)
    return [x.transpose(1, 2).requires_grad_() for x in (query, key, value[..., Dv:])]


def eager(query, key, value, scores=0.0, visible=None, scaling=None, softcap=None, s_aux=None):
    """(B, Lq, Hq, Dv): what models compute, with -inf where nothing is to be seen."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    found = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        found = softcap * torch.tanh(found / softcap)
    found = found + scores
    if visible is not None:
        found = found.masked_fill(~visible, -math.inf)
    if s_aux is not None:
        found = torch.cat([found, s_aux[:, None, None].to(found).expand(*found.shape[:-1], 1)], -1)
    return (found.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def upper_left(rows, columns):
    return torch.ones(rows, columns, dtype=torch.bool).tril()


def assert_attends(got, want, inputs):
    """Output and gradients; the output as transformers wants it."""
    out, weights = got
    assert weights is None and out.is_contiguous() and out.dtype == inputs[0].dtype
    torch.testing.assert_close(out, want, rtol=0, atol=2e-6)
    gradient = torch.randn_like(out)
    for x, y in zip(
        torch.autograd.grad(out, inputs, gradient), torch.autograd.grad(want, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("is_causal", "attribute", "causal"),
    [(None, None, True), (None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
@pytest.mark.parametrize("Lk", [3, 5, 7])
def test_causality_without_a_mask(is_causal, attribute, causal, Lk):
    inputs = drawn(Lk=Lk)
    got = compat.fusedattn_forward(Module(attribute), *inputs, None, is_causal=is_causal)
    assert_attends(got, eager(*inputs, visible=upper_left(5, Lk) if causal else None), inputs)


def test_one_query_sees_all_keys():
    inputs = drawn(Lq=1)
    assert_attends(compat.fusedattn_forward(Module(True), *inputs, None, is_causal=True), eager(*inputs), inputs)


def test_the_empty_slots_of_a_static_cache_may_hold_anything():
    query, key, value = drawn(Lk=9)
    want = eager(query, key[:, :, :5], value[:, :, :5], visible=upper_left(5, 5))
    with torch.no_grad():
        key[:, :, 5:], value[:, :, 5:] = math.nan, math.nan
    out, _ = compat.fusedattn_forward(Module(True), query, key, value, None)
    torch.testing.assert_close(out, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_is_all_there_is(kind, rank):
    """Neither causality nor a window comes on top of it; columns past the last key are cut."""
    inputs = drawn()
    visible = torch.rand(2, 4, 5, 9) < 0.6 if rank == 4 else torch.rand((4, 5, 9)[-rank:]) < 0.6
    visible[..., 0] = True
    mask = (
        visible if kind == "bool" else torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    )
    got = compat.fusedattn_forward(Module(True), *inputs, mask, is_causal=True, sliding_window=2)
    assert_attends(got, eager(*inputs, visible=visible[..., :7]), inputs)


@pytest.mark.parametrize("mask", [None, "bool", "float"])
@pytest.mark.parametrize("shape", [(1, 4, 5, 7), (2, 4, 5, 7), (1, 4, 1, 7)], ids=str)
def test_position_bias_and_its_gradient(mask, shape):
    *inputs, bias = *drawn(), torch.randn(shape).transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    visible = torch.rand(2, 1, 5, 7) < 0.6
    visible[..., 0] = True
    scores = torch.where(visible, torch.randn(visible.shape), torch.finfo(torch.float32).min)
    given = {None: None, "bool": visible, "float": scores}[mask]
    got = compat.fusedattn_forward(Module(False), *inputs, given, scaling=1.0, position_bias=bias)
    if mask == "float":
        want = eager(*inputs, scores + bias, scaling=1.0)
    else:
        want = eager(*inputs, bias, given, scaling=1.0)
    assert_attends(got, want, [*inputs, bias])


def test_position_bias_is_cut_with_the_static_cache():
    *inputs, bias = *drawn(Lk=9), torch.randn(1, 4, 5, 9, requires_grad=True)
    got = compat.fusedattn_forward(Module(True), *inputs, None, position_bias=bias)
    assert_attends(got, eager(*inputs, bias, upper_left(5, 9)), [*inputs, bias])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sinks_softcap_and_scaling(dtype):
    *inputs, sinks = *drawn(), torch.randn(4).to(dtype).requires_grad_()
    options = dict(scaling=2.0, softcap=1.5, s_aux=sinks)
    got = compat.fusedattn_forward(Module(True), *inputs, None, **options)
    assert_attends(got, eager(*inputs, visible=upper_left(5, 7), **options), inputs)
    (grad,) = torch.autograd.grad(compat.fusedattn_forward(Module(True), *inputs, None, **options)[0].sum(), sinks)
    assert grad.dtype == dtype and grad.abs().min() > 0


def test_rows_without_a_key_are_finite():
    inputs = drawn()
    hidden = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
    out, _ = compat.fusedattn_forward(Module(True), *inputs, hidden, position_bias=torch.randn(1, 4, 5, 7))
    assert (out == 0).all()
    lowest = torch.full((2, 1, 5, 7), torch.finfo(torch.float32).min)
    got = compat.fusedattn_forward(Module(True), *inputs, lowest)
    mean = inputs[2].mean(2, keepdim=True).repeat_interleave(2, 1).expand(-1, -1, 5, -1).transpose(1, 2)
    torch.testing.assert_close(got[0], mean, rtol=0, atol=2e-6)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum() + got[0].sum(), inputs))


def test_dropout_is_applied_as_given_and_follows_the_seed():
    inputs = drawn(Lq=20, Lk=20)
    module = torch.nn.Module().eval()
    torch.manual_seed(4)
    out, _ = compat.fusedattn_forward(module, *inputs, None, dropout=0.5)
    torch.manual_seed(4)
    want = fa.attention(*inputs, causal=True, dropout_p=0.5).transpose(1, 2)
    assert torch.equal(out, want) and not torch.equal(compat.fusedattn_forward(module, *inputs, None)[0], want)


def test_queries_for_all_samples_come_as_a_batch_of_one():
    query = torch.randn(1, 4, 5, 6, requires_grad=True)
    inputs = [query, *drawn(B=3)[1:]]
    got = compat.fusedattn_forward(Module(False), *inputs, None)
    assert_attends(got, eager(*inputs), inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_unknown_keywords_and_backends(dtype):
    inputs = drawn(dtype=dtype)
    out, weights = compat.fusedattn_forward(
        Module(True),
        *inputs,
        None,
        output_attentions=True,
        position_ids=torch.arange(5),
        cu_seq_lens_q=None,
        indices=None,
    )
    assert out.shape == (2, 5, 4, 3) and out.dtype == dtype and out.is_contiguous() and weights is None
    with fa.use_backend("triton"), pytest.raises(NotImplementedError):
        compat.fusedattn_forward(Module(True), *[x.to("meta") for x in inputs], None)


def test_compiled_without_a_graph_break_at_any_length():
    compiled = torch.compile(
        functools.partial(compat.fusedattn_forward, Module(True)), fullgraph=True, dynamic=True, backend="eager"
    )
    for lengths in (dict(Lq=5, Lk=8), dict(Lq=6, Lk=9)):
        inputs = drawn(**lengths)
        torch.testing.assert_close(compiled(*inputs, None)[0], compat.fusedattn_forward(Module(True), *inputs, None)[0])


@pytest.mark.parametrize(
    ("name", "error", "options"),
    [
        ("attention_mask", TypeError, dict(attention_mask=torch.ones(5, 7, dtype=torch.int64))),
        ("mask", ValueError, dict(attention_mask=torch.ones(5, 6, dtype=torch.bool))),
        ("bias", ValueError, dict(position_bias=torch.ones(1, 3, 5, 7))),
        ("softcap", ValueError, dict(softcap=0.0)),
        ("sinks", ValueError, dict(s_aux=torch.ones(3))),
        ("dropout_p", ValueError, dict(dropout=1.5)),
        ("indices", NotImplementedError, dict(indices=torch.zeros(2, 5, 1, dtype=torch.int64))),
        ("block_indices", NotImplementedError, dict(block_indices=torch.zeros(2, 2, 5, 1, dtype=torch.int64))),
        ("sinks", NotImplementedError, dict(sinks=torch.zeros(2, 4, 5, 1))),
        ("head_mask", NotImplementedError, dict(head_mask=torch.ones(4))),
    ],
)
def test_what_it_cannot_do_is_named(name, error, options):
    with pytest.raises(error, match=f"^{name}: "):
        compat.fusedattn_forward(Module(True), *drawn(), **options)


@pytest.mark.parametrize(
    ("name", "error"),
    [("my_flash", ValueError), ("me/fused", ValueError), ("paged|fused", ValueError), ("", ValueError), (1, TypeError)],
)
def test_a_name_that_transformers_would_take_for_another_is_refused(name, error):
    with pytest.raises(error, match="^name: "):
        compat.register(name)
    assert name not in transformers.AttentionInterface()


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention"])
def test_a_name_that_transformers_has_is_refused(name):
    before = transformers.AttentionInterface().get(name)
    with pytest.raises(ValueError, match="^name: "):
        compat.register(name)
    assert transformers.AttentionInterface().get(name) is before


def test_another_name_twice():
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    compat.register("ours")
    compat.register("ours")
    assert transformers.AttentionInterface()["ours"] is compat.fusedattn_forward
    assert AttentionMaskInterface()["ours"] is sdpa_mask


def test_without_transformers_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="transformers"):
        compat.register()


def test_importing_it_imports_no_transformers():
    program = "import sys, fusedattn.compat.transformers; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
