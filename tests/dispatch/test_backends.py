"""Tests the choice of a backend, and the reasons why others are not chosen."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedattn as fa
from fusedattn.call.options import AssumedGPU, override
from fusedattn.dispatch import backends
from fusedattn.launch import failures

from ..conftest import run_python


def draw(dtype=torch.float32, dim=8, device="cpu"):
    return [torch.randn(1, 2, 4, dim, dtype=dtype, device=device) for _ in range(3)]


def test_a_call_on_the_cpu_takes_cpu():
    said = fa.explain(*draw())
    assert said.backend == "cpu" and said.reasons["triton"] and said.tiles == {}
    assert str(said).startswith("takes cpu\nnot hopper: ") and "\nnot triton: " in str(said)
    assert said.reasons["naive"] == ["'cpu' takes the call and is preferred"]
    assert fa.explain(*draw(), backend="cpu").backend == "cpu"


LEARNED = torch.zeros(2, 4, requires_grad=True)
BIAS = dict(bias=LEARNED[:, :1][None, :, None])
GRADIENTS = {  # {name: (options, gradient that the naive formula computes)}
    "bias": (BIAS, None),
    "bias beside a key_mask": (BIAS | dict(key_mask=torch.ones(4, dtype=torch.bool)), "gradient of bias"),
    "slopes": (dict(alibi_slopes=LEARNED[:, 0]), "gradient of alibi_slopes"),
    "weights": (dict(return_weights=True), None),
}


@pytest.mark.parametrize("options, lacks", [(dict(softcap=2.0), "softcap"), (dict(dropout_p=0.5, seed=1), "dropout")])
def test_what_cpu_does_not_take_naive_does(options, lacks):
    inputs, reason = draw(), f"it does not support {lacks}"
    said = fa.explain(*inputs, **options)
    assert said.backend == "naive" and said.reasons["cpu"] == [reason]
    assert str(said).startswith("takes naive\n") and f"\nnot cpu: {reason}" in str(said)
    named = fa.explain(*inputs, **options, backend="cpu")
    assert named.backend is None and named.reasons["cpu"] == [reason]
    assert named.reasons["naive"] == ["'cpu' is named, and a named backend never falls back"]
    with pytest.raises(NotImplementedError, match=f"'cpu' cannot take this call: {reason}"):
        fa.attention(*inputs, **options, backend="cpu")
    assert torch.equal(*(fa.attention(*inputs, **options, backend=name) for name in (None, "naive")))


@pytest.mark.parametrize("options, lacks", GRADIENTS.values(), ids=GRADIENTS)
def test_a_gradient_changes_no_backend_and_explain_says_who_computes_it(options, lacks):
    leaves = [x.requires_grad_() for x in draw()]
    said = fa.explain(*leaves, **options)
    assert said.backend == "cpu" and len(said.backward) == (lacks is not None)
    assert lacks is None or (lacks in said.backward[0] and f"not cpu for the backward: {said.backward[0]}" in str(said))


def test_a_cache_on_the_cpu_takes_cpu(monkeypatch):
    taken = []
    for name in ("cpu", "naive"):
        known = backends.DECODERS[name]
        spied = known._replace(run=lambda *call, known=known: taken.append(known.name) or known.run(*call))
        monkeypatch.setitem(backends.DECODERS, name, spied)
    query, *caches = draw()
    given = dict(cache_seqlens=torch.tensor([3], dtype=torch.int32))
    for options in ({}, dict(softcap=2.0)):
        fa.attention_decode(query, *caches, **given, **options)
    assert taken == ["cpu", "naive"]
    with pytest.raises(NotImplementedError, match="'cpu' cannot take this call: it does not support softcap"):
        fa.attention_decode(query, *caches, **given, softcap=2.0, backend="cpu")


@pytest.mark.parametrize("rows, taken", [(127, "triton"), (128, "hopper")])
def test_a_cache_on_a_gpu_takes_hopper_for_many_queries(rows, taken, monkeypatch):
    for name, known in backends.DECODERS.items():
        monkeypatch.setitem(backends.DECODERS, name, known._replace(run=lambda *_, name=name: (name, None, None)))
    cache, ends = torch.zeros(1, 1, 256, 64, dtype=torch.bfloat16), torch.tensor([200], dtype=torch.int32)
    with override(gpu=AssumedGPU(90)):
        assert fa.attention_decode(cache[:, :, :rows], cache, cache, cache_seqlens=ends) == taken


def test_cpu_refuses_tensors_elsewhere():
    with pytest.raises(NotImplementedError, match="'cpu' cannot take this call"):
        fa.attention(*draw(device="meta"), backend="cpu")
    with FakeTensorMode():
        assert [fa.explain(*draw(device=device)).backend for device in ("meta", "cuda:99")] == ["naive"] * 2


@pytest.mark.parametrize(
    "why, sizes, options",
    [
        ("128 queries or more of a sequence, not 9", dict(rows=9), {}),
        ("pages have 64 keys, not a multiple of 128", dict(page=64), {}),
        ("pages have 1 keys", dict(page=1, row=0), {}),
        ("does not support key_mask", {}, dict(key_mask=torch.ones(1, 256) > 0)),
        ("float16 and bfloat16, not torch.float32", dict(dtype=torch.float32), {}),
        ("strides of key_cache", dict(dim=20), {}),
        ("do not start at multiples", dict(page=128, between=8), {}),
    ],
)
def test_hopper_says_which_caches_it_does_not_take(why, sizes, options):
    usual = dict(rows=128, page=256, dim=64, dtype=torch.bfloat16, between=0, row=None)
    rows, page, dim, dtype, between, row = (usual | sizes).values()
    pool = torch.zeros(256 // page, page * dim + between, dtype=dtype)
    cache, query = pool[:, : page * dim].view(-1, 1, page, dim), torch.zeros(1, 1, rows, dim, dtype=dtype)
    cache = cache.as_strided(cache.shape, (*cache.stride()[:2], dim if row is None else row, 1))
    table, ends = torch.arange(256 // page, dtype=torch.int32)[None], torch.tensor([200], dtype=torch.int32)
    paged = dict(cache_seqlens=ends, block_table=table, backend="hopper")
    with override(gpu=AssumedGPU(90)), pytest.raises(NotImplementedError, match=f"'hopper' cannot take .*{why}"):
        fa.attention_decode(query, cache, cache, **paged, **options)


def test_one_that_is_named_runs_or_says_why_not(device):
    for dim in (8, 512):
        assert fa.explain(*draw(dim=dim, device=device), backend="triton").backend == "triton"
    wide = draw(dim=513, device=device)
    with pytest.raises(NotImplementedError, match="'triton' cannot take this call: .*of query is 513, more than 512"):
        fa.attention(*wide, backend="triton")
    said = fa.explain(*wide, backend="triton")
    assert said.backend is None and "NotImplementedError" in str(said) and len(said.reasons["triton"]) == 2
    assert fa.attention(*wide, backend="naive").shape == (1, 2, 4, 513)


def test_explain_names_tiles(device):
    said = fa.explain(*draw(device=device), causal=True, backend="triton")
    assert set(said.tiles) == {"forward", "preprocess", "one_pass", "postprocess"} and "forward: tiles of" in str(said)
    for learned in (False, True):  # gradients that sum over whole rows need the dq pass
        sinks = torch.zeros(2, device=device, requires_grad=learned)
        said = fa.explain(*draw(device=device), sinks=sinks, backend="triton")
        assert ("one_pass" in said.tiles) != learned == ("dq" in said.tiles)


def test_use_backend_is_for_the_thread_and_the_call_wins(device):
    with fa.use_backend("triton"):
        assert fa.explain(*draw(device=device)).backend == "triton"
        assert fa.explain(*draw(device=device), backend="naive").backend == "naive"
        with fa.use_backend("naive"):
            assert fa.explain(*draw(device=device)).backend == "naive"
            with fa.use_backend(None):
                assert fa.explain(*draw()).backend == "cpu"
        with fa.use_backend("cpu"):
            assert fa.explain(*draw()).backend == "cpu"
        with ThreadPoolExecutor(1) as other:
            assert other.submit(fa.explain, *draw()).result().backend == "cpu"
            inside = fa.use_backend("naive")
            other.submit(inside.__enter__).result()
            inside.__exit__(None, None, None)  # as of a generator that another thread closes
        tasks = fa.use_backend("naive"), fa.use_backend("cpu")
        for task in tasks:
            task.__enter__()
        for task in tasks:  # as of asyncio tasks: the first one ends first
            task.__exit__(None, None, None)
        with pytest.raises(NotImplementedError):
            fa.attention(*draw(dim=600, device=device))
    assert fa.explain(*draw()).backend == "cpu"
    for wrong in ("fast", 3):
        with pytest.raises(ValueError, match=f"^name: .*'hopper'.* got {wrong!r}$"):
            fa.use_backend(wrong)
    with pytest.raises(KeyError), fa.use_backend("triton"):
        raise KeyError
    decorated = fa.use_backend("naive")(fa.explain)
    assert [decorated(*draw()).backend for _ in range(2)] == ["naive", "naive"]
    assert fa.explain(*draw()).backend == "cpu"


def test_a_gpu_call_that_triton_cannot_take_warns_once_a_reason(monkeypatch):
    with FakeTensorMode():
        call = backends.checked(backends.Arguments(*draw(device="cuda")))
    monkeypatch.setattr(failures, "_warned", set())
    for reasons, expected in ((["too old"], 1), (["too old"], 0), (["too old", "too wide"], 1), ([], 0)):
        table = {**backends.BACKENDS, "triton": backends.BACKENDS["triton"]._replace(reasons=lambda *_, r=reasons: r)}
        table["hopper"] = table["hopper"]._replace(reasons=lambda *_: ["another GPU"])
        monkeypatch.setattr(backends, "BACKENDS", table)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert backends.choose(call, False).name == ("naive" if reasons else "triton")
        assert len(caught) == expected and all("takes a slower path: the naive one" in str(w.message) for w in caught)


class OtherTriton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, does):
        self.exec_module = does

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "triton" else None


BROKEN = [
    (RuntimeError("libcuda is\n another"), "Triton cannot be imported (RuntimeError: another)"),
    (OSError("libtriton.so: no file"), "Triton cannot be imported (OSError: libtriton.so: no file)"),
    (ImportError("no triton._C", name="triton._C"), "Triton cannot be imported (no triton._C)"),
    (None, "Triton is 3.5.1+git12, older than 3.6"),
    (TimeoutError("late"), None),  # raised by a signal handler
]


@pytest.mark.parametrize("error, why", BROKEN)
def test_a_triton_that_is_broken_or_old_is_a_reason_like_any_other(error, why, monkeypatch):
    def does(module):
        if error is not None:
            raise error
        module.__version__ = "3.5.1+git12"

    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "meta_path", [OtherTriton(does), *sys.meta_path])
    for kind in ("cpu", "cuda"):
        with contextlib.nullcontext() if why else pytest.raises(TimeoutError):
            assert backends._find_machine_reasons.__wrapped__(torch.device(kind)) == (why,)


MACHINES = {
    "no Triton": ("sys.modules['triton'] = None", "Triton is not installed"),
    # Triton's interpreter needs NumPy, which `pip install fusedattn` alone does not bring.
    "no NumPy": ("sys.modules['numpy'] = None; os.environ['TRITON_INTERPRET'] = '1'", "Triton cannot be imported ("),
    "a CPU": ("os.environ.pop('TRITON_INTERPRET', None)", "on the CPU, but its kernels need an NVIDIA GPU"),
}


@pytest.mark.parametrize("machine, reason", MACHINES.values(), ids=MACHINES)
@pytest.mark.one_in(4)
def test_without_a_triton_that_works_all_else_does(machine, reason):
    program = (
        f"import os, sys, warnings\nwarnings.simplefilter('ignore')\n{machine}\n"
        "import torch, fusedattn as fa\n"
        "x, lengths = torch.randn(1, 1, 3, 8), torch.tensor([2], dtype=torch.int32)\n"
        "mask = torch.eye(3) > 0; plan = fa.plan(mask)\n"
        "assert torch.equal(fa.attention(x, x, x, mask=plan), x)\n"
        "print(fa.explain(x, x, x))\n"
        "def decode(*x, backend): fa.attention_decode(*x, cache_seqlens=lengths, backend=backend)\n"
        "for attend in (fa.attention, decode):\n"
        "    try: attend(x, x.clone(), x.clone(), backend='triton')\n"
        "    except NotImplementedError as error: print(error)\n"
    )
    printed = run_python("-c", program)
    assert "takes cpu" in printed and printed.count(reason) == 4


def test_a_triton_that_kernels_cannot_be_imported_with(monkeypatch):
    pytest.importorskip("triton", reason="kernels need Triton")
    monkeypatch.delitem(sys.modules, "fusedattn.launch.run", raising=False)
    monkeypatch.delattr("fusedattn.launch.run", raising=False)
    monkeypatch.delattr("triton.runtime.errors.OutOfResources")
    (why,) = backends._find_machine_reasons.__wrapped__(torch.device("cuda"))
    assert why.startswith("its kernels cannot be imported with Triton") and "(ImportError: cannot import name" in why


@pytest.mark.parametrize("other", [".nvidia.hopper as x; del x.warpgroup_mma", " as x; del x.shared_memory_descriptor"])
@pytest.mark.one_in(2)
def test_a_triton_of_which_gluon_lacks_something_has_the_other_kernels_and_no_warning(other, device):
    if device != "cpu":
        pytest.skip("about what is imported")
    program = (
        f"import triton.experimental.gluon.language{other}\n"
        "import torch, fusedattn as fa\n"
        "x = torch.randn(1, 1, 3, 8, dtype=torch.bfloat16)\n"
        "print(fa.attention(x, x, x, backend='triton').shape, fa.explain(x, x, x, capability=(9, 0)))\n"
        "from fusedattn.call import options, rules\n"
        "x = torch.randn(1, 1, 16, 320, dtype=torch.bfloat16)\n"
        "call = rules.checked(options.Arguments(x, x, x, bias=x[..., :16]))\n"
        "torch.ops.fusedattn.forward(*call, False, False, False, 'hopper')\n"  # in a graph from another machine
    )
    # Triton 3.6's interpreter itself raises deprecation warnings.
    printed = run_python("-W", "error", "-W", "ignore::DeprecationWarning", "-c", program)
    assert "takes triton" in printed and printed.count("this version of Triton lacks") == 2


@pytest.mark.parametrize("options", [{}, dict(return_weights=True), dict(capability=(9, 0))], ids=str)
def test_explain_in_a_compiled_program_says_what_eager_code_is_told(options):
    def ask(query):
        said = fa.explain(query, query, query, **options)
        return query + 1, said

    query = torch.randn(2, 4, 16, 64, dtype=torch.bfloat16)
    assert torch.compile(ask, backend="eager")(query)[1] == ask(query)[1]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="explain runs outside of graphs"):
        torch.compile(ask, backend="eager", fullgraph=True)(query)
