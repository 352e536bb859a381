"""The demo's generation: through a cache its model says what it says without, and what differs is found."""

import pytest
import torch

from fusedattn import backends
from fusedattn.cli.demo import model as demo, verify
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


def greedy(model, prompt, cached):
    """(tokens, logits): the likeliest bytes, until the context is full."""
    return demo.write(model, prompt, CONTEXT + 1 - prompt.shape[1], cached)


def empty(batch, dtype=torch.float32):
    """Caches in which what is not written is NaN."""
    shape = demo.LAYERS, 2, batch, demo.HEADS, CONTEXT, demo.DIM
    return torch.full(shape, float("nan"), dtype=dtype)


@pytest.mark.parametrize("pieces", [(CONTEXT,), (1,) * CONTEXT, (7, 1, 1, 20, 35)], ids=["whole", "single", "mixed"])
def test_a_text_in_pieces_has_the_logits_of_the_whole(pieces, model):
    model.double()
    tokens = torch.randint(256, (2, CONTEXT))
    caches, got, read = empty(2, torch.float64), [], 0
    with torch.no_grad():
        for piece in tokens.split(pieces, 1):
            got.append(demo.read_on(model, caches, piece, read))
            read += piece.shape[1]
        expected = model(tokens)
    torch.testing.assert_close(torch.cat(got, 1), expected, rtol=0, atol=1e-11)
    assert read == CONTEXT and caches.isfinite().all()


def test_there_is_room_for_the_context_and_no_more(model):
    caches = empty(1)
    with torch.no_grad():
        demo.read_on(model, caches, torch.zeros(1, CONTEXT, dtype=torch.long), 0)
        for more in (1, 2):
            expected = f"at most {CONTEXT}, those before `first` included, got {CONTEXT + more}"
            with pytest.raises(ValueError, match=expected):
                demo.read_on(model, caches, torch.zeros(1, more, dtype=torch.long), CONTEXT)
        with pytest.raises(ValueError, match=f"got {CONTEXT + 1}"):
            model(torch.zeros(1, CONTEXT + 1, dtype=torch.long))


@pytest.mark.parametrize("length", [1, 40, CONTEXT])
def test_greedy_with_a_cache_is_greedy_without(length, model):
    prompt = torch.randint(256, (2, length))
    without, cached = (greedy(model, prompt, cached) for cached in (False, True))
    tokens, logits = without
    assert tokens.shape == (2, CONTEXT + 1) and logits.shape == (2, CONTEXT + 1 - length, 256)
    assert torch.equal(tokens[:, :length], prompt) and torch.equal(tokens[:, length:], logits.argmax(-1))
    found = verify.generation(model, without, cached)
    assert torch.equal(tokens, cached[0]) and found["logits"].ok and found["bytes"].ok


def test_a_text_may_be_longer_than_the_context_and_random(model):
    model.double()
    prompt = torch.randint(256, (2, 60))
    tokens, logits = demo.write(model, prompt, 10, temperature=0.6)
    assert tokens.shape == (2, 70) and logits.shape == (2, 10, 256)
    expected = model(tokens[:, -1 - CONTEXT : -1])[:, -1]
    torch.testing.assert_close(logits[:, -1], expected, rtol=0, atol=1e-11)
    drawn = [demo.write(model, prompt, 10, temperature=temperature)[0] for temperature in (1e-6, 1e-6, 50.0, 50.0)]
    assert torch.equal(drawn[0], demo.write(model, prompt, 10)[0]) and torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[2], drawn[3])


def swapped(given, step, token):
    """The same text with another byte chosen at a step, and nothing right after it."""
    tokens, logits = (one.clone() for one in given)
    tokens[:, step - logits.shape[1]] = token
    logits[:, step + 1 :] = float("nan")
    return tokens, logits


def test_bytes_may_part_at_a_tie_alone(model):
    last = model.head[-1]
    with torch.no_grad():
        last.weight[66], last.bias[66] = last.weight[65], 100.0
        last.bias[65] = last.bias[66]
    without = greedy(model, torch.randint(256, (1, 30)), False)
    assert set(without[0][0, 30:].tolist()) <= {65, 66}
    for token, right in ((131 - int(without[0][0, 34]), True), (67, False)):
        found = verify.generation(model, without, swapped(without, 4, token))
        assert found["logits"].ok and found["bytes"].ok == right
    assert "byte 5 is another" in found["bytes"].why
    late = without[1].clone()
    late[:, -1, 7] += 1e-2
    assert not verify.generation(model, without, (without[0], late))["logits"].ok


def test_each_text_is_read_as_far_as_it_is_the_same(model):
    without = greedy(model, torch.randint(256, (3, 30)), False)
    parted = swapped(without, 4, 67)
    tokens, logits = without[0].clone(), without[1].clone()
    tokens[1], logits[1] = parted[0][1], parted[1][1]
    found = verify.generation(model, without, (tokens, logits))
    assert found["logits"].ok and "byte 5 is another" in found["bytes"].why
    logits[2, -1, 7] += 1e-2
    assert not verify.generation(model, without, (tokens, logits))["logits"].ok
    # Of two texts that part the byte is named that is further off.
    steps, wrong = {0: CONTEXT - 30, 1: 4}, {0: int(without[0][0, -1]) ^ 1, 1: 67}
    tokens[0, -1] = wrong[0]

    def off(text):
        found = without[1][text, steps[text]]
        return abs(found[without[0][text, 30 + steps[text]]] - found[wrong[text]])

    step = steps[max(steps, key=off)]
    assert f"byte {step + 1} is" in verify.generation(model, without, (tokens, logits))["bytes"].why


def slightly_wrong(decode, need_lse, need_weights):
    out, *rest = formula.run_decode(decode, need_lse, need_weights)
    return out * 1.001, *rest


def never_extended(decode, need_lse, need_weights):
    return formula.run_decode(decode._replace(lengths=torch.zeros_like(decode.lengths)), need_lse, need_weights)


@pytest.mark.parametrize("run, wrong", [(slightly_wrong, {"logits"}), (never_extended, {"logits", "bytes"})])
def test_a_cache_that_is_wrong_is_found(run, wrong, model, monkeypatch):
    monkeypatch.setitem(backends.DECODERS, "cpu", backends.DECODERS["cpu"]._replace(run=run))
    prompt = torch.randint(256, (1, 30))
    found = verify.generation(model, *(greedy(model, prompt, cached) for cached in (False, True)))
    assert {name for name, one in found.items() if not one.ok} == wrong
