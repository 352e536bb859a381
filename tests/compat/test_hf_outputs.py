"""Attention weights of Transformers' models, and packed sequences given as `cu_seq_lens_q` and `cu_seq_lens_k`."""

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from fusedattn.compat import transformers as compat

from ..close import assert_like

SIZES = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=50)
LENGTHS = (4, 1, 6)
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


@pytest.fixture(autouse=True)
def registered():
    compat.register()


def llama(implementation, dtype=torch.float64, **more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **more)
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation)
    return model.to(dtype).eval()


def bert(implementation):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES)
    return transformers.BertModel._from_config(config, attn_implementation=implementation).double().eval()


def ids():
    return torch.randint(0, 50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model", [llama, bert])
@pytest.mark.parametrize("padded", [False, True])
def test_attentions_are_eagers(model, padded):
    given = dict(input_ids=ids(), output_attentions=True)
    if padded:
        given["attention_mask"] = torch.ones_like(given["input_ids"]).index_fill(1, torch.tensor([9, 10]), 0)
    got = model("fusedattn")(**given).attentions
    assert len(got) == 2
    assert_like(got, lambda model: model(**given).attentions, model("eager"))
    assert not model("fusedattn")(input_ids=ids()).attentions, "nobody asked"


def test_attentions_may_be_asked_for_in_the_config():
    model = llama("fusedattn", output_attentions=False)
    model.config._output_attentions = True  # transformers refuses to set it beside any name but "eager"
    assert model(ids()).attentions[0].shape == (1, 4, 11, 11)


def packed(**more):
    lengths = dict(max_length_q=max(LENGTHS), max_length_k=max(LENGTHS))
    return dict(cu_seq_lens_q=OFFSETS, cu_seq_lens_k=OFFSETS, **lengths) | more


@pytest.mark.parametrize("positions", [False, True], ids=["no position ids", "position ids"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_packed_sequences_do_not_see_each_other(positions, dtype):
    """Rotary embedding knows differences of positions alone, so that these need not begin anew."""
    model, tokens = llama("fusedattn", dtype), ids()
    begun_anew = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    given = dict(position_ids=begun_anew) if positions else {}
    got = model(tokens, **given, **packed()).logits

    def alone(model):
        return torch.cat([model(part).logits for part in tokens.split(LENGTHS, 1)], 1)

    assert_like(got, alone, llama("eager", dtype))
    got.sum().backward()
    assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)
