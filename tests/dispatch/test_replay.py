"""Tests that replays are right for other tensors, and that a call with another signature is not replayed."""

import contextlib
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fusedattn as fa
from fusedattn.dispatch import replay
from fusedattn.operators import repeats

from ..close import assert_like
from ..conftest import in_threads
from ..inside import BACKENDS, HKV, HQ, OPTIONS, SK, SQ, Seen, by, differentiated, draw, learned, same

pytestmark = pytest.mark.usefixtures("deterministic")


class Whole(int):
    pass


def attend(inputs, options, **more):
    return fa.attention(*inputs, **options, **more, backend="triton")


def everything(inputs, options, backend):
    results = by(backend)(*inputs, **options, return_lse=True, return_weights=True)
    if not torch.is_grad_enabled():
        return results
    total = sum((x.float().nan_to_num(0, 0, 0) * torch.arange(x.shape[-1], device=x.device)).sum() for x in results)
    return [*results, *torch.autograd.grad(total, [*inputs, *learned(options)])]


@pytest.fixture
def found(monkeypatch):
    """Return a list that gets the replay of each call, or None for a call with a new signature."""
    answers, find = [], replay.find

    def watched(*arguments):
        answers.append(find(*arguments))
        return answers[-1]

    monkeypatch.setattr(replay, "find", watched)
    return answers


def test_a_backward_is_repeated_where_nothing_but_numbers_changed(device, poison, monkeypatch, passes, launched):
    """A backward is replayed, except with an unaligned gradient, or if torch now wants deterministic results."""
    repeated, again = [], replay.Replay.again
    monkeypatch.setattr(replay.Replay, "again", lambda *given: repeated.append(again(*given)) or repeated[-1])
    for first, ordered in [(0, False)] * 4 + [(1, False), (0, True), (0, False), (0, True)]:
        passes(1 + ordered)
        inputs = draw(device, requires_grad=True)
        out = attend(inputs, dict(causal=True))
        incoming = torch.randn(out.numel() + 1, device=device)[first:][: out.numel()].view(out.shape)
        want = lambda *inputs, grad=incoming: torch.autograd.grad(  # noqa: E731
            fa.reference.eager(*inputs, causal=True), inputs, grad
        )
        assert_like(torch.autograd.grad(out, inputs, incoming), want, *inputs)
    assert [found is not None for found in repeated] == [False, True, True, True, False, False, True, True]
    assert [name for name, _ in launched if name in ("one_pass", "dq")] == ["one_pass", "one_pass", "dq"]


@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize("name, grads", [*((name, True) for name in OPTIONS), ("masks", False), ("added", False)])
@pytest.mark.one_in(3)
def test_other_tensors_of_the_same_kind(name, grads, backend, device, poison, found):
    for again in range(3):
        inputs, options = draw(device, requires_grad=grads), OPTIONS[name](SQ, SK, device)
        with torch.set_grad_enabled(grads):
            assert_like(everything(inputs, options, backend), everything, inputs, options, "eager")
        assert (found[again] is not None) == (again > 0)


@pytest.mark.parametrize("backend", ["triton", None])
@pytest.mark.parametrize("rank, grads", [(2, True), (3, True), (3, False)])
def test_tensors_of_rank_2_and_3(rank, grads, backend, device, poison, found):
    for again in range(3):
        inputs = [(x[:, 0] if rank == 3 else x[0, 0]).clone().requires_grad_(grads) for x in draw(device)]
        options = dict(mask=torch.rand(SQ, SK, device=device) < 0.7, dropout_p=0.3 * (rank == 2), seed=again)
        with torch.set_grad_enabled(grads):
            assert_like(everything(inputs, options, backend), everything, inputs, options, "eager")
        assert (found[again] is not None) == (again > 0)


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("alone", [False, True], ids=["of all", "alone"])
@pytest.mark.one_in(4)
def test_which_gradients_are_asked_for_may_change(alone, twice, device, poison):
    for asked in ("qkv", "q", "k", "qv", "kv"):
        inputs = draw(device)
        for x, name in zip(inputs, "qkv", strict=True):
            x.requires_grad_(name in asked or not alone)
        wanted = [x for x, name in zip(inputs, "qkv", strict=True) if name in asked]
        for take in (
            lambda out, lse: out.sum(),
            lambda out, lse: lse.sin().sum(),
            lambda out, lse: (out.double() * torch.arange(out.numel(), device=device).view(out.shape).sin()).sum(),
            lambda out, lse: out.transpose(1, 2).contiguous().sin().sum() + lse[:, :, 1:].sum(),
        ):

            def gradients(backend, inputs, wanted, take=take):
                total = take(*by(backend)(*inputs, return_lse=True, causal=True))
                grads = torch.autograd.grad(total, wanted, materialize_grads=True, create_graph=twice)
                if not twice:
                    return grads
                squares = sum(x.square().sum() for x in grads) + 0 * sum(x.sum() for x in wanted)
                return torch.autograd.grad(squares, wanted, materialize_grads=True)

            for backend in (*BACKENDS, *["cpu"] * (device == "cpu")):
                assert_like(gradients(backend, inputs, wanted), gradients, "eager", inputs, wanted)


def test_gradients_of_results_with_equal_shapes(device, poison):
    """A backward of an output is not repeated for weights, whose gradient has the same shape and strides here."""
    for name in ("out", "weights", "out", "out", "weights"):
        inputs = [x.requires_grad_() for x in draw(device)[:2] + [torch.randn(2, HKV, SK, SK, device=device)]]
        incoming = torch.randn(2, HQ, SQ, SK, device=device)

        def gradients(backend, inputs=inputs, incoming=incoming, name=name):
            results = by(backend)(*inputs, return_weights=True)
            return torch.autograd.grad(results[name == "weights"], inputs, incoming, materialize_grads=True)

        assert_like(gradients("triton"), gradients, "eager")


def test_one_tensor_in_three_places_then_three_then_an_unaligned_one(device, found):
    x = torch.randn(2, 2, SQ, 16, device=device)
    inputs = [torch.randn_like(x) for _ in range(3)]
    shifted = torch.empty(x.numel() + 1, device=device)[1:].view(x.shape).copy_(x)
    for tensors in ((x, x, x), inputs, (x, x, x), inputs, (inputs[0], shifted, inputs[2])):
        assert_like(attend(tensors, {}), fa.reference.eager, *tensors)
    assert [answer is not None for answer in found] == [False, True, True, True, False]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (dict(causal=True), dict(causal=1)),
        (dict(scale=1.0), dict(scale=True)),
        (dict(softcap=1.0), dict(softcap=True)),
        (dict(dropout_p=0.0), dict(dropout_p=False)),
        (dict(window=(1, 0)), dict(window=(1.0, 0))),
        (dict(dropout_p=0.5, seed=1), dict(dropout_p=0.5, seed=True)),
        (dict(dropout_p=0.5, seed=1), dict(dropout_p=0.5, seed=2**63)),
        (dict(dropout_p=0.5, seed=Whole(1)), dict(dropout_p=0.5, seed=Whole(2**63))),
        ({}, dict(align=["bottom_right"])),
        ({}, dict(mask=[[True]])),
    ],
)
def test_what_is_refused_is_refused_after_something_like_it(right, wrong, device):
    inputs = draw(device)
    attend(inputs, right)
    (name,) = wrong.keys() - (right.keys() if "seed" not in wrong else {"dropout_p"}) or wrong
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
        attend(inputs, wrong)


@pytest.mark.parametrize("name", ["key", "value"])
def test_no_tensor_is_refused_after_recorded_calls(name, device):
    inputs = dict(zip(("query", "key", "value"), draw(device), strict=True))
    for _ in range(3):
        fa.attention(**inputs, backend="triton")
    for wrong in (None, [1.0], inputs[name].tolist(), fa.plan(torch.ones(SQ, SK, device=device).bool())):
        for backend in ("triton", None):
            with pytest.raises(TypeError, match=f"^{name}: expected"):
                fa.attention(**inputs | {name: wrong}, backend=backend)


def test_a_named_backend_is_part_of_the_kind(device, found):
    inputs = draw(device)
    attend(inputs, {})
    fa.attention(*inputs, backend="naive")
    assert found[-1] is None
    with fa.use_backend("triton"):
        fa.attention(*inputs)
        assert found[-1] is not None
    with pytest.raises(ValueError, match="^backend: expected"):
        fa.attention(*inputs, backend="cuda")


def test_dropout_draws_as_it_does_the_first_time(device):
    inputs, options = draw(device), dict(dropout_p=0.4)
    first, second = (attend(inputs, options) for _ in range(2))
    assert not torch.equal(first, second)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append([attend(inputs, options) for _ in range(2)])
        replay.forget()
    same(*found)
    seeds = 3, 4, 3, torch.tensor([3], device=device), torch.tensor(3, device=device)
    seeded = [attend(inputs, dict(options, seed=seed)) for seed in seeds]
    assert all(torch.equal(seeded[0], x) for x in seeded[2:])
    assert not torch.equal(seeded[0], seeded[1])
    plain = attend(inputs, {})
    for seed in (3, torch.tensor([3], device=device)):  # without dropout_p a seed is unused
        assert all(torch.equal(attend(inputs, dict(seed=seed)), plain) for _ in range(2))


def test_plans(device, found):
    for again in range(2):
        inputs, mask = draw(device, requires_grad=True), torch.rand(SQ, SK, device=device) < 0.5
        got = everything(inputs, dict(mask=fa.plan(mask)), "triton")
        assert_like(got, everything, inputs, dict(mask=mask), "eager")
        assert (found[again] is not None) == bool(again)
    key_mask = torch.ones(SK, dtype=torch.bool, device=device)
    for _ in range(2):  # the tensors of these calls are those of the one below
        attend(draw(device), dict(mask=fa.plan(mask, key_mask)))
    with pytest.raises(ValueError, match="^key_mask: expected None, because mask is a plan"):
        attend(draw(device), dict(mask=fa.plan(mask), key_mask=key_mask[None]))


def test_what_must_see_operators_sees_them(device):
    inputs = draw(device)
    want = [attend(inputs, {}) for _ in range(2)][0]
    with Seen() as seen:
        assert torch.equal(attend(inputs, {}), want)
    assert "fusedattn.forward.default" in seen.names

    many = [torch.stack([x, x * 2]) for x in inputs]
    same(list(torch.vmap(lambda *x: attend(x, {}))(*many)), [want, attend([2 * x for x in inputs], {})])
    with torch.autocast(device, torch.bfloat16):
        assert attend(inputs, {}).dtype == torch.bfloat16
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
        assert torch.autograd.forward_ad.unpack_dual(attend((dual, *inputs[1:]), {})).tangent is not None


def test_modes_of_autograd(device):
    inputs = draw(device, requires_grad=True)
    want = attend(inputs, {})
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            out = attend(inputs, {})
        assert torch.equal(out, want)
        assert out.requires_grad == (mode is torch.enable_grad) and out.is_inference() == (mode is torch.inference_mode)


def test_what_the_backward_needs_is_kept_as_torch_keeps_it(device):
    packed = []
    inputs = draw(device, requires_grad=True)
    for _ in range(2):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
            out = attend(inputs, {})
        with Seen() as seen:
            grads = torch.autograd.grad(out.sum(), inputs)
        assert "fusedattn.backward.default" in seen.names
        same(grads, torch.autograd.grad(attend(inputs, {}).sum(), inputs))
        assert len(packed) == 5  # query, key, value, output and stats
        out = attend(inputs, {})
        same(torch.autograd.grad(out.sum(), inputs, retain_graph=True), torch.autograd.grad(out.sum(), inputs))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out.sum(), inputs)


@pytest.mark.parametrize(
    "backend, dtype, mean", [("triton", torch.float32, 0), ("cpu", torch.float32, 0), ("cpu", torch.bfloat16, 4)]
)
def test_what_was_kept_may_come_back_in_another_order(backend, dtype, mean, device):
    """Gradients are right if a hook returns saved tensors with other strides, as save_on_cpu(pin_memory=True) does."""

    as_it_is = lambda x: x  # noqa: E731
    contiguous = lambda x: x.clone(memory_format=torch.contiguous_format)  # noqa: E731
    by_columns = lambda x: contiguous(x.mT).mT  # noqa: E731

    def gradients(inputs, pack):
        with torch.autograd.graph.saved_tensors_hooks(pack, as_it_is):
            out = fa.attention(*inputs, backend=backend)
        return torch.autograd.grad(out.square().sum(), inputs)

    for order in ((as_it_is, contiguous, as_it_is), (contiguous, as_it_is, contiguous), (by_columns, as_it_is)):
        replay.forget()
        for pack in order:
            packed = (torch.randn(2, SQ, 3, 2, 16, device=device) + mean).to(dtype)
            inputs = [x.transpose(1, 2).requires_grad_() for x in packed.unbind(2)]
            want = lambda *x: torch.autograd.grad(fa.reference.eager(*x).square().sum(), x)  # noqa: E731
            assert_like(gradients(inputs, pack), want, *inputs)


def test_forwards_before_backwards_and_what_they_gave_stays(device):
    draws, found = [draw(device, requires_grad=True) for _ in range(3)], []

    def with_gradients(inputs, out, lse):
        return [out, lse, *torch.autograd.grad(out.sin().sum() + lse.cos().sum(), inputs)]

    outs = [attend(inputs, {}, return_lse=True) for inputs in draws]
    for inputs, results in reversed(list(zip(draws, outs, strict=True))):
        found.append(with_gradients(inputs, *results))
    want = lambda *x: with_gradients(x, *fa.reference.eager(*x, return_lse=True))  # noqa: E731
    for inputs, results in zip(reversed(draws), found, strict=True):
        assert_like(results, want, *inputs)


def test_gradients_that_come_in_as_they_like(device):
    inputs = draw(device, requires_grad=True)
    out, lse = attend(inputs, {}, return_lse=True)
    wide = torch.randn(*out.shape[:3], 2 * out.shape[3], device=device)
    shifted = torch.randn(out.numel() + 1, device=device)[1:].view(out.shape)
    tall = torch.randn(*lse.shape[:2], 2 * lse.shape[2], device=device)
    outs = [torch.ones((), device=device).expand(out.shape), wide[..., ::2], shifted, torch.randn_like(out)]
    outs += [torch._neg_view(outs[-1])]  # it looks like the recorded tensor before it
    flat = torch.ones((), device=device).expand(lse.shape)
    lses = [flat, tall[..., ::2], torch.randn_like(lse), torch.randn_like(lse), torch.zeros_like(lse)]
    for grads in zip(outs, lses, strict=True):
        want = lambda *grads: torch.autograd.grad(fa.reference.eager(*inputs, return_lse=True), inputs, grads)  # noqa: E731
        for _ in range(2):
            got = torch.autograd.grad(attend(inputs, {}, return_lse=True), inputs, grads)
            assert_like(got, want, *grads)
    for batch in (2, 1):
        few = [x[:batch].detach().requires_grad_() for x in inputs]
        given = torch.randn(2 * batch - 1, batch, *out.shape[1:], device=device)  # one looks like a recorded tensor

        def batched(backend, few, given, again=False):
            grads = torch.autograd.grad(by(backend)(*few), few, given, is_grads_batched=True, create_graph=again)
            return torch.autograd.grad(sum(x.sin().sum() for x in grads), few) if again else grads

        for again in (False, True):
            assert_like(batched("triton", few, given, again), batched, "eager", few, given, again)
    (grad, *_) = torch.autograd.grad(attend(inputs, {}).sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(grad, inputs, torch.stack([grad] * 3), is_grads_batched=True, create_graph=True)


@pytest.mark.parametrize("backend, dtype", [("triton", torch.float32), (None, torch.bfloat16)])
def test_a_checkpoint_is_computed_again_the_other_way(backend, dtype, device):
    (query, key, _), (_, value, _) = (draw(device, 2, SQ, 128, dtype, True) for _ in range(2))
    inputs = query, key, value
    want = torch.autograd.grad(by(backend)(*inputs).sum(), inputs)
    for inside in (True, False):
        with Seen() if inside else contextlib.nullcontext():
            out = checkpoint(by(backend), *inputs, use_reentrant=False)
        with contextlib.nullcontext() if inside else Seen():
            same(torch.autograd.grad(out.sum(), inputs), want)


CHANGES = dict(shape=lambda x: x[:, :, :4].contiguous(), dtype=lambda x: x.half())


@pytest.mark.parametrize("count", [1, 2], ids=["replayed", "first"])
@pytest.mark.parametrize("backend", ["triton", "cpu"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_saved_tensors_that_hooks_change_are_refused(change, backend, count, record_after):
    """A hook that changes the shape or dtype of any saved tensor raises; kernels would read out of bounds."""
    record_after(count)
    inputs = [(x + 4.0).bfloat16().requires_grad_() for x in draw("cpu")]  # more is saved for values with a mean

    def gradients(place):
        unpacked = []

        def unpack(x):
            unpacked.append(x)
            return change(x) if len(unpacked) == place else x

        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            out = fa.attention(*inputs, backend=backend)
        return torch.autograd.grad(out.sum(), inputs), len(unpacked)

    found, count = gradients(0)
    assert_like(found, lambda: torch.autograd.grad(fa.reference.eager(*inputs).sum(), inputs))
    assert count >= 5
    for place in 2 * (*range(1, count + 1),):
        with pytest.raises(ValueError, match="^saved_tensors_hooks: expected a tensor of torch.* and shape"):
            gradients(place)


def test_threads_that_forget_at_once(monkeypatch, one_thread, impatient):
    """Threads get right results while each call forgets a signature: lengths vary, and only two are kept."""
    monkeypatch.setattr(repeats, "MAX_KEPT", 2)
    most, threads = [], 4

    def work(number):
        for again in range(12):
            length, options = 1 + (number + again) % 7, dict(causal=again % 2 == 0)
            x = torch.randn(1, 1, length, 8, generator=torch.Generator().manual_seed(length))
            inputs = [y.requires_grad_() for y in (x, x + 0.5, x - 0.5)]
            got = differentiated(by("triton"), inputs, **options)
            assert_like(got, differentiated, functools.partial(fa.reference.eager, **options), inputs)
            most.append((len(replay._known), len(replay._recent)))

    in_threads(*(functools.partial(work, number) for number in range(threads)))
    assert max(max(each) for each in most) <= 2 + threads
