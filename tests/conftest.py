"""Fixtures of all tests, and changes that make Triton's interpreter faster."""

import collections
import gc
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from . import cases

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
gc.set_threshold(200_000, 20, 20)  # torch and Triton have a million objects: scanning them took 7 to 15% of the time


def _call_device_function_at_once(self, *args, **kwargs):
    """Replace `InterpretedFunction.__call__`, which spent two fifths of its time on patching `tl` at each call.

    A launch patches `tl` for our functions. For Triton's own functions the first call does, and `tl` stays patched.
    """
    from triton.runtime import interpreter

    if self.fn.__module__ not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(self.fn.__module__)
    return self.rewrite()(*args, **kwargs)


_patched: set[str] = set()


def _numpy_dtype(kind):
    """Replace `_get_np_dtype`, which builds the table of all dtypes at each call: a tenth of the interpreter's time."""
    name = kind.scalar.name
    if name not in _dtypes:
        _dtypes[name] = _dtype_of(kind)
    return _dtypes[name]


def _make_tensor(self, handle, kind):
    """Replace `tensor.__init__`, which builds a shape's objects at each call: an eighth of the interpreter's time."""
    shape = kind.shape if kind.is_block() else ()
    if shape not in _shapes:
        _tensor_of(self, handle, kind)
        _shapes[shape] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _shapes[shape]


def _make_block_type(self, element_type, shape):
    """Replace `block_type.__init__`, which checks a shape and formats its name at each call."""
    key = (*shape,)
    if key not in _block_types:
        _block_type_of(self, element_type, shape)
        _block_types[key] = self.shape, self.numel, str(self.shape)
    self.element_ty, (self.shape, self.numel, printed) = element_type, _block_types[key]
    self.name = f"<{printed}, {element_type}>"


def _broadcast(self, lhs, rhs):
    """Replace `broadcast_impl_value`: tensors with the same shape object, from `_make_tensor`, need no broadcast."""
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast_of(self, lhs, rhs)


def _check_operands(self, lhs, rhs, *allowed, **more):
    """Replace `binary_op_type_checking_impl`, a fifth of the time, for operands whose dtypes it would leave alone."""
    if type(lhs) is language.tensor and lhs.dtype.name in _STAY:
        if type(rhs) is language.tensor and rhs.dtype.name == lhs.dtype.name:
            return _broadcast(self, lhs, rhs)
        if type(rhs) is int and -(2**31) <= rhs < 2**31 or type(rhs) is float and lhs.dtype.name in _STAY[:2]:
            return _broadcast(self, lhs, self.scalar_constant(rhs, dtype=lhs.dtype))
    return _check_operands_of(self, lhs, rhs, *allowed, **more)


def _cast(self, input, dst_ty, *rounding):
    return input if input.dtype.name == dst_ty.scalar.name else _cast_of(self, input, dst_ty, *rounding)


def _unwrap(x):
    if isinstance(x, (list, tuple, language.tuple)):
        return _unwrap_of(x)
    return x.value if isinstance(x, language.constexpr) else x


def _patch_attribute(owner, name, member, builder, scope):
    """Replace `_patch_attr`: Triton's wrappers, called more than any function, copied their keywords each time."""
    function = getattr(member, "__wrapped__", member)

    def call(*args, **options):
        options["_semantic"] = upstream.interpreter_semantic
        return function(*args, **options)

    scope.set_attr(owner, name, call)


def _add_by_descriptor(builder, kind, descriptor, value, offsets):
    """Add a tile to memory by a TMA descriptor, as some tiles do; Triton's interpreter lacks this operation."""
    assert kind == ir.DESCRIPTOR_REDUCE_KIND.ADD, kind
    pointers, inside = descriptor.materialize_pointers(offsets)
    add = ir.ATOMIC_OP.FADD, pointers, value, inside, ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
    return builder.create_atomic_rmw(*add)


if INTERPRETED and importlib.util.find_spec("triton"):
    from triton._C.libtriton import ir
    from triton.language import core as language, semantic
    from triton.runtime import interpreter as upstream

    upstream.InterpreterBuilder.create_descriptor_reduce = _add_by_descriptor
    _dtypes, _dtype_of = {}, upstream._get_np_dtype
    upstream.InterpretedFunction.__call__ = _call_device_function_at_once
    upstream._get_np_dtype = _numpy_dtype
    _shapes, _tensor_of = {}, language.tensor.__init__
    language.tensor.__init__ = _make_tensor
    _block_types, _block_type_of = {}, language.block_type.__init__
    language.block_type.__init__ = _make_block_type
    _STAY = ("fp32", "fp64", "int32", "int64")
    _operators = semantic.TritonSemantic
    _broadcast_of, _operators.broadcast_impl_value = _operators.broadcast_impl_value, _broadcast
    _cast_of, _operators.cast = _operators.cast, _cast
    _check_operands_of = _operators.binary_op_type_checking_impl
    _operators.binary_op_type_checking_impl = _check_operands
    upstream._patch_attr = _patch_attribute
    _unwrap_of, language._unwrap_if_constexpr = language._unwrap_if_constexpr, _unwrap
    _careful = upstream.interpreter_builder.options
    upstream.interpreter_builder.options = replace(_careful, sanitize_overflow=False)


def pytest_configure(config):
    """Limit each worker of xdist, and the processes it starts, to one thread: there are as many workers as cores."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark for `make test-all` all parameters of tests marked `one_in(n)`, except for the first and each n-th."""
    counts = collections.Counter()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is not None:
            test = item.nodeid.partition("[")[0]
            if counts[test] % mark.args[0]:
                item.add_marker(pytest.mark.matrix)
            counts[test] += 1


def pytest_collection_finish():
    """Exclude modules and tests, which exist until the end, from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)  # Python 3.11 has 700, which costs a tenth of the time of compiling kernels


def pytest_generate_tests(metafunc):
    """Run a test that has the argument `device` in the interpreter, and again on a GPU."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@pytest.fixture
def device(request):
    pytest.importorskip("triton", reason="kernels need Triton")
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("on the CPU kernels need TRITON_INTERPRET=1")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("needs a GPU, and TRITON_INTERPRET unset")
    if request.param == "cuda" and request.node.callspec.params.get("backend") == "cpu":
        pytest.skip("the backend is for CPU tensors")
    return request.param


@pytest.fixture(params=["naive", "triton"])
def backend(request, device):
    return request.param


@pytest.fixture
def cuda():
    triton = pytest.importorskip("triton", reason="kernels need Triton")
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        pytest.skip("needs a GPU, and TRITON_INTERPRET unset")
    return "cuda"


def pytest_runtest_logfinish():
    """End a worker of xdist whose GPU has failed; otherwise all its later tests would fail. Other workers run them."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def wrap_allocations(monkeypatch, wrap, names=("new_empty", "new_empty_strided")):
    """Replace each function that allocates memory for the package by `wrap(function, its name)`."""
    from fusedattn.call import private

    for name in names:
        monkeypatch.setattr(torch.Tensor, name, wrap(getattr(torch.Tensor, name), name))
    for name, make in private.EMPTY.items():
        monkeypatch.setitem(private.EMPTY, name, wrap(make, "scratch"))


@pytest.fixture
def poison(monkeypatch):
    """Fill new memory of the package with NaN, so that an element which no kernel writes fails every comparison."""

    def poisoned(make, _):
        def new_nan(*shape, **options):
            made = make(*shape, **options)
            return made.fill_(float("nan")) if made.dtype.is_floating_point and not made.is_meta else made

        return new_nan

    wrap_allocations(monkeypatch, poisoned)


@pytest.fixture
def passes():
    """Return a function: passes(2) makes the backward take two passes, by torch's deterministic mode, passes(1) one."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield lambda number: torch.use_deterministic_algorithms(number == 2, warn_only=True)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def two_passes(passes):
    passes(2)


@pytest.fixture
def deterministic(passes):
    """Ask torch for deterministic algorithms on a GPU; otherwise the bits of dq may change from run to run."""
    if not INTERPRETED:
        passes(2)


@pytest.fixture
def launched(monkeypatch):
    """Return a list of (name, arguments) of the kernel launches of the test, except for replays."""
    from fusedattn.launch import run

    seen, run_kernel = [], run.run_kernel

    def spy(name, programs, arguments, *rest, **options):
        seen.append((name, arguments))
        return run_kernel(name, programs, arguments, *rest, **options)

    monkeypatch.setattr(run, "run_kernel", spy)
    return seen


@pytest.fixture
def tiles(monkeypatch):
    """Return an object that changes the tile table for one test: tiles(name, value) replaces a table or function in it.

    tiles.change(*kernels, **fields) changes all tiles of some kernels in the interpreter.
    tiles.choose(function) makes calls use `function(their tiles)`.
    tiles.splits(n) makes n programs share the keys of a cached sequence; n may be a function in place of `splits`.
    tiles.multiprocessors(n) sets the number of multiprocessors of the GPU.
    """
    from fusedattn.dispatch import replay
    from fusedattn.launch import decode, run, tile_table

    class Tiles:
        table = tile_table

        def __call__(self, name, value):
            monkeypatch.setattr(tile_table, name, value)
            monkeypatch.setattr(tile_table, "fitting", {})
            replay.forget()

        def change(self, *kernels, **fields):
            old = tile_table.INTERPRETED
            self("INTERPRETED", old | {name: tuple(x._replace(**fields) for x in old[name]) for name in kernels})

        def choose(self, function, capability=None):
            find = tile_table.tiles_for
            self("tiles_for", lambda kernel, gpu, *a, **b: function(find(kernel, capability or gpu, *a, **b)))

        def splits(self, n):
            monkeypatch.setattr(decode, "splits", n if callable(n) else lambda *_: n)
            replay.forget()

        def multiprocessors(self, n):
            monkeypatch.setattr(run, "multiprocessors", lambda device: n)
            replay.forget()

    return Tiles()


@pytest.fixture
def record_after(monkeypatch):
    """Return a function: record_after(n) records the n-th equal call for replays, record_after(None) no call."""
    from fusedattn.dispatch import replay
    from fusedattn.operators import repeats

    def set_count(n):
        monkeypatch.setattr(repeats, "RECORD_AFTER", sys.maxsize if n is None else n)
        replay.forget()

    return set_count


@pytest.fixture
def unchecked(monkeypatch):
    """Skip the checks of offsets, lengths and pages on a CPU, as calls on a GPU do."""
    from fusedattn.call import decode, varlen

    for module in (decode, varlen):
        monkeypatch.setattr(module, "is_known", lambda x: False)


@pytest.fixture
def overflow(monkeypatch):
    """Make the interpreter check that each index fits its type, which takes two fifths of its time."""
    if INTERPRETED:
        monkeypatch.setattr(upstream.interpreter_builder, "options", _careful)


@pytest.fixture
def one_thread():
    """Limit torch to one thread: on a busy machine, tiny steps would only wait for other threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def impatient():
    """Make Python switch between threads as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(*functions):
    with ThreadPoolExecutor(len(functions)) as pool:
        for future in [pool.submit(function) for function in functions]:
            future.result()


def run_python(*arguments, cwd=None, **environment):
    """Run Python with some arguments and return its output. An environment variable that is None is removed."""
    known = {name: value for name, value in (os.environ | environment).items() if value is not None}
    done = subprocess.run([sys.executable, *arguments], env=known, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def at_once(monkeypatch):
    """Replace the timing of benchmarks by fixed numbers."""
    from fusedattn.bench import measure

    monkeypatch.setattr(measure, "times", lambda steps, *_: dict.fromkeys(steps, (1.0, 2.0, 3.0)))


@pytest.fixture(autouse=True)
def _anew(request, monkeypatch):
    """Seed each test, and forget compiled code and the replays of earlier tests, which may have used other tiles.

    The first call is recorded, and the next is replayed. Half of the cases run as a user's first call instead.
    """
    from fusedattn.dispatch import replay
    from fusedattn.launch import failures
    from fusedattn.operators import repeats

    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
    replay.forget()
    failures.forget()
    parameters = getattr(request.node, "callspec", None)
    case = parameters and parameters.params.get("case")
    first = hasattr(case, "name") and not cases.replayed(case)
    monkeypatch.setattr(repeats, "RECORD_AFTER", 2 if first else 1)
