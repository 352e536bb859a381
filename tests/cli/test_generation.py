"""The demo's generation: through a cache its model says what it says without, and what differs is found."""

import pytest
import torch

from fusedattn import backends
from fusedattn.cli.demo import model as demo, verify
from fusedattn.cli.demo.generation import Greedy, greedy
from fusedattn.cli.demo.text import CONTEXT
from fusedattn.naive import formula

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = demo.LanguageModel().eval()
    with torch.no_grad():  # untrained, it would say the same whatever it has seen
        for parameter in made.parameters():
            parameter.mul_(2)
    return made


def verdicts(model, without, cached):
    return {one.result: one.verdict for one in verify.generation(model, without, cached)}


@pytest.mark.parametrize("pieces", [(CONTEXT,), (1,) * CONTEXT, (7, 1, 1, 20, 35)], ids=["whole", "single", "mixed"])
def test_a_text_in_pieces_has_the_logits_of_the_whole(pieces, model):
    model.double()
    tokens = torch.randint(256, (2, CONTEXT))
    cache = demo.Cache(model, 2)
    for kept in cache.layers:
        kept.keys.fill_(float("nan"))
        kept.values.fill_(float("nan"))
    with torch.no_grad():
        got = torch.cat([model(piece, cache) for piece in tokens.split(pieces, 1)], 1)
        expected = model(tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-11)
    assert cache.length == CONTEXT and cache.lengths.tolist() == [CONTEXT] * 2


def test_there_is_room_for_the_context_and_no_more(model):
    cache = demo.Cache(model, 1)
    with torch.no_grad():
        model(torch.zeros(1, CONTEXT, dtype=torch.long), cache)
        for more in (1, 2):
            with pytest.raises(
                ValueError, match=f"at most {CONTEXT}, those of the cache included, got {CONTEXT + more}"
            ):
                model(torch.zeros(1, more, dtype=torch.long), cache)
        with pytest.raises(ValueError, match=f"got {CONTEXT + 1}"):
            model(torch.zeros(1, CONTEXT + 1, dtype=torch.long))


@pytest.mark.parametrize("length", [1, 40, CONTEXT])
def test_greedy_with_a_cache_is_greedy_without(length, model):
    prompt = torch.randint(256, (2, length))
    without, cached = (greedy(model, prompt, cached) for cached in (False, True))
    assert without.tokens.shape == (2, CONTEXT + 1) and without.generated == 2 * (CONTEXT + 1 - length)
    assert torch.equal(without.tokens[:, :length], prompt)
    assert torch.equal(without.tokens[:, length:], without.logits.argmax(-1))
    found = verdicts(model, without, cached)
    assert torch.equal(without.tokens, cached.tokens) and found["logits"].ok and found["bytes"].ok


def swapped(given, step, token):
    """The same text with another byte chosen at a step, and nothing right after it."""
    tokens, first = given.tokens.clone(), given.tokens.shape[1] - given.logits.shape[1]
    tokens[:, first + step] = token
    logits = given.logits.clone()
    logits[:, step + 1 :] = float("nan")
    return Greedy(tokens, logits)


def test_bytes_may_part_at_a_tie_alone(model):
    last = model.head[-1]
    with torch.no_grad():
        last.weight[66], last.bias[66] = last.weight[65], 100.0
        last.bias[65] = last.bias[66]
    without = greedy(model, torch.randint(256, (1, 30)), False)
    assert set(without.tokens[0, 30:].tolist()) <= {65, 66}
    for token, right in ((131 - int(without.tokens[0, 34]), True), (67, False)):
        found = verdicts(model, without, swapped(without, 4, token))
        assert found["logits"].ok and found["bytes"].ok == right
    assert "byte 5 is another" in found["bytes"].why
    late = without._replace(logits=without.logits.clone())
    late.logits[:, -1, 7] += 1e-2
    assert not verdicts(model, without, late)["logits"].ok


def test_each_text_is_read_as_far_as_it_is_the_same(model):
    without = greedy(model, torch.randint(256, (3, 30)), False)
    parted = swapped(without, 4, 67)
    tokens, logits = without.tokens.clone(), without.logits.clone()
    tokens[1], logits[1] = parted.tokens[1], parted.logits[1]
    found = verdicts(model, without, Greedy(tokens, logits))
    assert found["logits"].ok and "byte 5 is another" in found["bytes"].why
    logits[2, -1, 7] += 1e-2
    assert not verdicts(model, without, Greedy(tokens, logits))["logits"].ok
    # Of two texts that part the byte is named that is further off.
    steps, wrong = {0: CONTEXT - 30, 1: 4}, {0: int(without.tokens[0, -1]) ^ 1, 1: 67}
    tokens[0, -1] = wrong[0]

    def off(text):
        found = without.logits[text, steps[text]]
        return abs(found[without.tokens[text, 30 + steps[text]]] - found[wrong[text]])

    step = steps[max(steps, key=off)]
    assert f"byte {step + 1} is" in verdicts(model, without, Greedy(tokens, logits))["bytes"].why


def slightly_wrong(decode, need_lse, need_weights):
    out, *rest = formula.run_decode(decode, need_lse, need_weights)
    return out * 1.001, *rest


def never_extended(decode, need_lse, need_weights):
    return formula.run_decode(decode._replace(lengths=torch.zeros_like(decode.lengths)), need_lse, need_weights)


@pytest.mark.parametrize("run, wrong", [(slightly_wrong, {"logits"}), (never_extended, {"logits", "bytes"})])
def test_a_cache_that_is_wrong_is_found(run, wrong, model, monkeypatch):
    monkeypatch.setitem(backends.DECODERS, "naive", backends.DECODERS["naive"]._replace(run=run))
    prompt = torch.randint(256, (1, 30))
    found = verdicts(model, *(greedy(model, prompt, cached) for cached in (False, True)))
    assert {name for name, one in found.items() if not one.ok} == wrong
