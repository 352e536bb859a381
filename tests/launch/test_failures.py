"""Tests kernels that do not compile or load: Triton fails at each stage, and the next backend takes the call."""

import contextlib
import errno
import subprocess
import threading
import warnings

import pytest
import torch

pytest.importorskip("triton", reason="kernels need Triton")

from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction

import fusedattn as fa
from fusedattn.dispatch import backends
from fusedattn.launch import failures, forward

from ..close import assert_like
from ..inside import OPTIONS, alike, compiled, draw, learned, leaves, same
from ..offline import absent

FORWARD, UNIVERSAL, BACKWARD = {"forward"}, {"fusedattn.kernels.forward"}, {"preprocess", "one_pass", "dkdv", "dq"}
COMPILER = subprocess.CalledProcessError(1, ["gcc", "launcher.c"])
STAGES = {
    "the language": ("compile", CompilationError("out = tl.dot(q, k)", None, "no such product")),
    "a pass": ("compile", RuntimeError("PassManager::run failed")),
    "ptxas": ("compile", PTXASError("ptxas fatal: Unsupported .version 9.9")),
    "no ptxas": ("compile", FileNotFoundError("ptxas")),
    "no cache": ("compile", PermissionError(13, "Permission denied", "/root/.triton/cache")),
    "no compiler": ("compile", RuntimeError("Failed to find C compiler. Please specify via CC")),
    "no header": ("load", COMPILER),
    "the launcher": ("load", ImportError("cuda_utils.so: undefined symbol: cuLaunchKernelEx")),
    "the driver": ("load", RuntimeError("Triton Error [CUDA]: device kernel image is invalid")),
    "the last tile": ("load", OutOfResources(300000, 101376, "shared memory")),
}


@pytest.fixture
def failing(monkeypatch, tiles):
    """Return a function (stage, error, names) that simulates a GPU on which Triton fails for the named kernels."""
    monkeypatch.setattr(backends, "_on_gpu", lambda call: True)
    for table in (backends.BACKENDS, backends.DECODERS):
        monkeypatch.setitem(table, "cpu", table["cpu"]._replace(reasons=lambda *_: ["it is for CPUs"]))
    tiles.choose(lambda found: tuple(tiles.table.Tile(16, x.keys and 16, 4, 1) for x in found[:1]))
    compile_one, tried = JITFunction._do_compile, []

    def fail(stage, error, names):
        def do_compile(self, *arguments, **options):
            tried.append(self.fn.__name__)
            if stage == "compile" and not names.isdisjoint((self.fn.__name__, self.fn.__module__)):
                raise error
            return compile_one(self, *arguments, **options)

        def load(kernel):
            absent._load(kernel)  # Triton, too, sets the launcher before it loads the binary
            if stage == "load" and kernel.name in names:
                raise error

        monkeypatch.setattr(JITFunction, "_do_compile", do_compile)
        return absent.gpu(load=load), tried

    return fail


@contextlib.contextmanager
def slower(gpu, count=1):
    """Enter a simulated GPU, where `count` warnings about a slower path are expected; return their texts afterwards."""
    said = []
    with gpu, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(x.message) for x in caught if "fusedattn takes a slower path" in str(x.message)]
    assert len(said) == count


@compiled
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.one_in(3)
def test_the_naive_path_takes_the_call_and_all_of_its_kind(stage, failing):
    when, error = STAGES[stage]
    gpu, tried = failing(when, error, FORWARD)
    on_hopper = draw("cpu", dtype=torch.bfloat16, requires_grad=True)
    inputs = *on_hopper[:2], on_hopper[2][..., :4]  # Hopper kernels do not support 4 columns
    options = dict(causal=True, dropout_p=0.1, seed=3)
    want = fa.reference.attention(*inputs, **options, return_lse=True)
    with slower(gpu) as said:
        same(fa.attention(*inputs, **options, return_lse=True), want)
        assert fa.explain(*inputs, **options).backend == "naive"
        (why,) = fa.explain(*inputs, **options).reasons["triton"]
        before = len(tried)
        found = fa.attention(*inputs, **options, return_lse=True)
        same(torch.autograd.grad(found[0].sum(), inputs), torch.autograd.grad(want[0].sum(), inputs))
        assert tried[before:] == []
        for name, given, kind in (("triton", inputs, options), ("hopper", on_hopper, dict(causal=True))):
            with pytest.raises(NotImplementedError, match="^backend: ") as raised:
                fa.attention(*given, **kind, backend=name)
            assert type(error).__name__ in str(raised.value) and "\n" not in str(raised.value)
    assert why in said[0] and type(error).__name__ in why
    assert ("install a C compiler" in said[0]) == (stage in ("no compiler", "no header"))
    assert ("empty Triton's cache" in said[0]) == (stage == "the launcher")


@compiled
@pytest.mark.parametrize("kernels", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_a_named_backend_that_fails_raises_each_time(kernels, failing):
    gpu, _ = failing("compile", PTXASError("ptxas fatal"), kernels)
    inputs = draw("cpu", requires_grad=True)
    with gpu:
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="^backend: .*PTXASError.*ptxas fatal"):
                try:
                    raise TimeLimit("handled already")
                except TimeLimit:
                    torch.autograd.grad(fa.attention(*inputs, backend="triton").sum(), inputs)
    gpu, _ = failing("compile", PTXASError("ptxas fatal"), kernels)
    failures.forget()
    with gpu, fa.use_backend("triton"), pytest.raises(NotImplementedError, match="^backend: "):
        torch.autograd.grad(fa.attention(*inputs).sum(), inputs)


@compiled
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.one_in(3)
def test_a_backward_that_fails_is_computed_by_the_naive_path(name, failing, monkeypatch):
    """If a backward kernel fails, the naive path computes the gradients; the launched kernels compute nothing here."""
    gpu, _ = failing("compile", PTXASError("ptxas fatal"), BACKWARD)
    inputs, options = draw("cpu", requires_grad=True), OPTIONS[name](9, 11, "cpu")
    wanted = [*inputs, *learned(options)]
    incoming = torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9)
    got = lambda f: torch.autograd.grad(f(*inputs, **options, return_lse=True), wanted, incoming)  # noqa: E731
    with slower(gpu) as said:
        for _ in range(2):
            assert_like(got(fa.attention), got, fa.reference.eager)
        assert fa.explain(*inputs, **options).backend == "naive"  # of both forward and backward
        assert fa.explain(*[x.detach() for x in inputs], **OPTIONS["plain"](9, 11, "cpu")).backend == "triton"
    assert "PTXASError" in said[0]


@compiled
def test_of_the_kernel_for_hopper_the_universal_one_is_next(failing, monkeypatch):
    gpu, _ = failing("compile", PTXASError("ptxas fatal"), FORWARD)
    seen = []
    monkeypatch.setattr(forward, "_forward", lambda out, lse, stats, call: seen.append(out.fill_(7.0)))
    inputs = draw("cpu", dtype=torch.bfloat16)
    capped, sinks = dict(causal=True, softcap=2.0), dict(sinks=torch.zeros(2))
    with gpu, pytest.warns(UserWarning, match="PTXASError") as caught:
        assert fa.explain(*inputs).backend == "hopper"
        assert (fa.attention(*inputs) == 7).all() and len(seen) == 1
        assert fa.explain(*inputs).backend == "triton"
        with pytest.raises(NotImplementedError, match="^backend: "):
            fa.attention(*inputs, backend="hopper")
        for _ in range(2):  # kernels with other options are not those that failed
            assert fa.explain(*inputs, **sinks).backend == "hopper"
            fa.attention(*inputs, **capped)
            assert fa.explain(*inputs, **capped).backend == "triton"
    plain, other = (str(x.message) for x in caught)
    assert len(seen) == 3 and "causal, softcap" in other and "softcap" not in plain


@compiled
def test_a_part_that_fails_is_known_by_its_call(failing, tiles, record_after):
    """The universal kernels take a backward in parts whose kernel fails, and its later calls at once."""
    record_after(2)  # as for a user: the first launch of a kind is not recorded, so it warns
    gpu, tried = failing("compile", PTXASError("ptxas fatal"), {"stored_backward"})
    tiles("SCORES_BYTES", 2 * 128 * 300)
    inputs = alike(1, 2, 300, 256, dtype=torch.bfloat16, requires_grad=True)
    window = dict(window=(200, 0))  # which hides no keys of the first part
    with slower(gpu) as said:
        for kernels in ("hopper_bwd_ds", "dkdv"):
            assert kernels in str(fa.explain(*inputs, **window))
            torch.autograd.grad(fa.attention(*inputs, **window), inputs, inputs[0].detach())
    assert "hopper_bwd_ds" in said[0] and BACKWARD & {*tried}


@compiled
def test_packed_sequences_and_caches(failing):
    gpu, _ = failing("compile", PTXASError("ptxas fatal"), {"fill_slots", "append", "decode"})
    query, key, value = leaves(*[torch.randn(10, 2, 8) for _ in range(3)])
    offsets = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    cache = torch.randn(2, 2, 2, 12, 8)
    lengths, new = torch.tensor([3, 5], dtype=torch.int32), torch.randn(3, 2, 2, 1, 8)
    call = dict(cache_seqlens=lengths, new_key=new[1], new_value=new[2], causal=True)
    with slower(gpu, 3):  # one for each kernel
        got = fa.attention_varlen(query, key, value, offsets, offsets, causal=True)
        want = fa.reference.attention_varlen(query, key, value, offsets, offsets, causal=True)
        same([got], [want])
        inputs = query, key, value
        same(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(want.sum(), inputs))
        for _ in range(2):
            ours, other = cache.clone(), cache.clone()
            got = fa.attention_decode(new[0], *ours, **call, return_lse=True)
            same(got, fa.reference.attention_decode(new[0], *other, **call, return_lse=True))
            assert torch.equal(ours, other) and not torch.equal(ours, cache)
        with pytest.raises(NotImplementedError, match="^backend: "):
            fa.attention_decode(new[0], *cache, **call, backend="triton")
        with pytest.raises(NotImplementedError, match="^backend: "):
            fa.attention_varlen(query, key, value, offsets, offsets, backend="triton")


@compiled
def test_a_compiled_graph(failing):
    gpu, _ = failing("compile", PTXASError("ptxas fatal"), FORWARD | BACKWARD)
    inputs = draw("cpu", requires_grad=True)
    want = torch.autograd.grad(fa.reference.attention(*inputs, causal=True).square().sum(), inputs)
    with gpu, pytest.warns(UserWarning, match="PTXASError"):
        graph = torch.compile(lambda *x: fa.attention(*x, causal=True).square(), backend="aot_eager", fullgraph=True)
        same(torch.autograd.grad(graph(*inputs).sum(), inputs), want)


class TimeLimit(Exception):
    """Error that a signal handler raises."""


def _because(error, why):
    error.__context__ = why
    return error


WRAPPED = _because(CompilationError(None, None, "late"), TimeLimit("late"))
OUTSIDE = RuntimeError("Triton Error [CUDA]: out of memory"), TimeoutError("late"), TimeLimit("late"), WRAPPED


@compiled
@pytest.mark.parametrize("error", OUTSIDE, ids=repr)
def test_an_error_from_outside_reaches_the_caller(error, failing):
    gpu, _ = failing("load", error, FORWARD)
    with gpu:
        with pytest.raises(type(error.__context__ or error), match="late|out of memory"):
            fa.attention(*draw("cpu"))
        assert fa.explain(*draw("cpu")).backend == "triton"


@compiled
def test_a_forward_on_hopper_keeps_its_backward_if_the_universal_forward_fails(failing):
    gpu, _ = failing("compile", PTXASError("ptxas fatal"), UNIVERSAL)
    inputs = alike(1, 2, 9, 256, dtype=torch.bfloat16, requires_grad=True)
    with slower(gpu, 0):
        with pytest.raises(NotImplementedError, match="ptxas fatal"):
            fa.attention(*inputs, backend="triton")
        for options in (dict(backend="hopper"), dict(causal=True)):
            torch.autograd.grad(fa.attention(*inputs, **options), inputs, inputs[0].detach())


KILLED = _because(PTXASError("code -9"), subprocess.CalledProcessError(-9, ["ptxas"]))
PASSING = OSError(errno.ENOSPC, "No space left"), TimeoutError(errno.ETIMEDOUT, "late"), MemoryError("host"), KILLED


@compiled
@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_a_failure_that_may_pass_is_tried_again(error, failing, monkeypatch):
    gpu, tried = failing("compile", error, UNIVERSAL)
    inputs = draw("cpu", requires_grad=True)
    detached = tuple(x.detach() for x in inputs)

    def results(attend):
        return *torch.func.jvp(attend, detached, detached), *torch.autograd.grad(attend(*inputs).sum(), inputs)

    with slower(gpu) as said:
        for _ in range(2):
            tried.clear()
            assert_like(results(fa.attention), results, fa.reference.attention)
            assert "forward" in tried and fa.explain(*inputs).backend == "triton"
        monkeypatch.setattr(torch.Tensor, "isnan", None)  # backwards of other kinds do not wait for the GPU
        half = alike(1, 2, 9, 256, dtype=torch.bfloat16, requires_grad=True)
        torch.autograd.grad(fa.attention(*half), half, half[0].detach())
    assert type(error).__name__ in said[0]


@compiled
def test_a_second_thread_waits_until_a_kernel_is_loaded():
    launched, others = [], []
    call = torch.no_grad()(lambda: fa.attention(*draw("cpu"), backend="triton"))

    def load(kernel):
        kernel._run = absent.Run(lambda *given: launched.append(given[4]))  # Triton sets it first
        others.append(threading.Thread(target=call))
        others[-1].start()
        others[-1].join(0.5)
        kernel.function = 7

    with absent.gpu(90, load=load):
        call()
        others[0].join()
    assert launched == [7, 7]


KERNELS = {  # {kernel: (sizes, options, backend before it fails, backend after)}
    "combine": (dict(sk=4096, dtype=torch.bfloat16), {}, "hopper", "triton"),  # the Hopper forward would split the keys
    "forward": ({}, dict(bias=torch.zeros(9, 11)), "triton", "naive"),
    "weights": ({}, dict(return_weights=True), "triton", "naive"),
    "block_mask": ({}, OPTIONS["masks"](9, 11, "cpu"), "triton", "naive"),
}


@compiled
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_call_whose_kernel_fails_is_left_to_another_backend(kernel, failing):
    sizes, options, before, after = KERNELS[kernel]
    gpu, tried = failing("compile", PTXASError("ptxas fatal"), {kernel})
    inputs = draw("cpu", **sizes)
    with slower(gpu) as said:
        assert fa.explain(*inputs, **options).backend == before
        first = fa.attention(*inputs, **options)
        assert fa.explain(*inputs, **options).backend == after
        tried.clear()
        again = fa.attention(*inputs, **options)
        assert tried == []
        if after == "naive":
            same([first, again], [fa.reference.attention(*inputs, **options)] * 2)
            half = [dict(bias=torch.zeros(9, 11).half())] * (kernel != "block_mask")
            for other in ({}, dict(causal=True, softcap=2.0), *half):
                assert fa.explain(*inputs, **other).backend == "triton"
            assert fa.explain(*draw("cpu", dtype=torch.bfloat16)).backend == "hopper"
    assert kernel in said[0]
