"""Fixtures: devices, NaN in new memory, tiles and replays, and a faster interpreter."""

import collections
import gc
import importlib.util
import os
import sys
from dataclasses import replace

import pytest
import torch

from . import cases

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
gc.set_threshold(200_000, 20, 20)  # torch and Triton are a million objects, which tests walk over and over: 7 to 15%


def _call_device_function_at_once(self, *args, **kwargs):
    """`InterpretedFunction.__call__` without what it does again at every call, two fifths of its time.

    It patches the language for the interpreter. For a function of ours the launch has done so; for one of Triton's own
    the first call does, and it stays.
    """
    from triton.runtime import interpreter

    if self.fn.__module__ not in _patched:
        interpreter._patch_lang(self.fn)
        _patched.add(self.fn.__module__)
    return self.rewrite()(*args, **kwargs)


_patched: set[str] = set()


def _numpy_dtype(kind):
    """`_get_np_dtype` without the table of all dtypes that it makes at every call, a tenth of the time."""
    name = kind.scalar.name
    if name not in _dtypes:
        _dtypes[name] = _dtype_of(kind)
    return _dtypes[name]


def _make_tensor(self, handle, kind):
    """`tensor.__init__` without the objects that a shape is made of anew at each call, an eighth of the time."""
    shape = kind.shape if kind.is_block() else ()
    if shape not in _shapes:
        _tensor_of(self, handle, kind)
        _shapes[shape] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _shapes[shape]


def _make_block_type(self, element_type, shape):
    """`block_type.__init__` without checking and printing a shape again."""
    key = (*shape,)
    if key not in _block_types:
        _block_type_of(self, element_type, shape)
        _block_types[key] = self.shape, self.numel, str(self.shape)
    self.element_ty, (self.shape, self.numel, printed) = element_type, _block_types[key]
    self.name = f"<{printed}, {element_type}>"


def _broadcast(self, lhs, rhs):
    """`broadcast_impl_value`, at once for tensors of one shape: `_make_tensor` gives them the same object."""
    return (lhs, rhs) if lhs.shape is rhs.shape else _broadcast_of(self, lhs, rhs)


def _check_operands(self, lhs, rhs, *allowed, **more):
    """`binary_op_type_checking_impl`, a fifth of the time, at once where the dtype of a tensor stays what it is."""
    if type(lhs) is language.tensor and lhs.dtype.name in _STAY:
        if type(rhs) is language.tensor and rhs.dtype.name == lhs.dtype.name:
            return _broadcast(self, lhs, rhs)
        if type(rhs) is int and -(2**31) <= rhs < 2**31 or type(rhs) is float and lhs.dtype.name in _STAY[:2]:
            return _broadcast(self, lhs, self.scalar_constant(rhs, dtype=lhs.dtype))
    return _check_operands_of(self, lhs, rhs, *allowed, **more)


def _cast(self, input, dst_ty, *rounding):
    """`cast`, at once where there is nothing to do."""
    return input if input.dtype.name == dst_ty.scalar.name else _cast_of(self, input, dst_ty, *rounding)


def _unwrap(x):
    """`_unwrap_if_constexpr`, at once for what it mostly gets."""
    if isinstance(x, (list, tuple, language.tuple)):
        return _unwrap_of(x)
    return x.value if isinstance(x, language.constexpr) else x


def _patch_attribute(owner, name, member, builder, scope):
    """`_patch_attr`, whose functions are called more than any other, without a copy of their options."""
    function = getattr(member, "__wrapped__", member)

    def call(*args, **options):
        options["_semantic"] = upstream.interpreter_semantic
        return function(*args, **options)

    scope.set_attr(owner, name, call)


if INTERPRETED and importlib.util.find_spec("triton"):
    from triton.language import core as language, semantic
    from triton.runtime import interpreter as upstream

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
    _check_operands_of, _operators.binary_op_type_checking_impl = (
        _operators.binary_op_type_checking_impl,
        _check_operands,
    )
    upstream._patch_attr = _patch_attribute
    _unwrap_of, language._unwrap_if_constexpr = language._unwrap_if_constexpr, _unwrap
    _careful = upstream.interpreter_builder.options
    upstream.interpreter_builder.options = replace(_careful, sanitize_overflow=False)


def pytest_configure(config):
    """Workers of xdist are as many as there are cores: threads of torch would only wait for each other."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave all but the first and each n-th parameter of tests marked `one_in(n)` to `make test-all`."""
    counts = collections.Counter()
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is not None:
            test = item.nodeid.partition("[")[0]
            if counts[test] % mark.args[0]:
                item.add_marker(pytest.mark.matrix)
            counts[test] += 1


def pytest_collection_finish():
    """Modules and tests stay until the end: the collector of garbage need not look at them after each few objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)  # of Python 3.11 it is 700: a tenth of the time that kernels take to compile


def pytest_generate_tests(metafunc):
    """A test that takes `device` runs its kernels in the interpreter, and again on a GPU."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@pytest.fixture
def device(request):
    pytest.importorskip("triton", reason="kernels need Triton")
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("on the CPU kernels need TRITON_INTERPRET=1")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("needs a GPU, and TRITON_INTERPRET unset")
    return request.param


@pytest.fixture
def cuda():
    """The GPU, where kernels are compiled for it."""
    triton = pytest.importorskip("triton", reason="kernels need Triton")
    if triton.knobs.runtime.interpret or not torch.cuda.is_available():
        pytest.skip("needs a GPU, and TRITON_INTERPRET unset")
    return "cuda"


def pytest_runtest_logfinish():
    """A worker of xdist whose GPU takes no more work ends, for another to go on: its next tests would only fail."""
    if "PYTEST_XDIST_WORKER" in os.environ and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def wrap_allocations(monkeypatch, wrap, names=("new_empty", "new_empty_strided")):
    """Replace each function by which the package allocates by `wrap(function, its name)`."""
    from fusedattn.call import private

    for name in names:
        monkeypatch.setattr(torch.Tensor, name, wrap(getattr(torch.Tensor, name), name))
    for name, make in private.EMPTY.items():
        monkeypatch.setitem(private.EMPTY, name, wrap(make, "scratch"))


@pytest.fixture
def poison(monkeypatch):
    """Fill what the package allocates with NaN: an element that no kernel writes then fails every comparison."""

    def poisoned(make, _):
        def new_nan(*shape, **options):
            made = make(*shape, **options)
            return made.fill_(float("nan")) if made.dtype.is_floating_point else made

        return new_nan

    wrap_allocations(monkeypatch, poisoned)


@pytest.fixture
def passes():
    """passes(2): torch wants the same bits each time, so the universal backward takes two passes; passes(1): one."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield lambda number: torch.use_deterministic_algorithms(number == 2, warn_only=True)
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def two_passes(passes):
    passes(2)


@pytest.fixture
def deterministic(passes):
    """Compare bits: on a GPU dq has the same bits each time only if torch asks for them."""
    if not INTERPRETED:
        passes(2)


@pytest.fixture
def launched(monkeypatch):
    """A list of (name, arguments) of the kernels that are launched, less those of replays."""
    from fusedattn.launch import run

    seen, run_kernel = [], run.run_kernel

    def spy(name, programs, arguments, *rest, **options):
        seen.append((name, arguments))
        return run_kernel(name, programs, arguments, *rest, **options)

    monkeypatch.setattr(run, "run_kernel", spy)
    return seen


@pytest.fixture
def tiles(monkeypatch):
    """The tile table, changed for one test: tiles(name, value) replaces one of its tables or functions.

    tiles.change(*kernels, **fields) changes all tiles of some kernels in the interpreter.
    tiles.choose(function) has calls take `function(their tiles)`.
    tiles.splits(n) has n programs share the keys of a sequence in a cache; n may be a function in place of `splits`.
    tiles.multiprocessors(n) has a GPU of n multiprocessors.
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
    """record_after(n): the n-th equal call is recorded; none is for None."""
    from fusedattn.dispatch import replay

    def set_count(n):
        monkeypatch.setattr(replay, "RECORD_AFTER", sys.maxsize if n is None else n)
        replay.forget()

    return set_count


@pytest.fixture
def unchecked(monkeypatch):
    """Offsets, lengths and pages on a CPU are not checked, as those on a GPU are not."""
    from fusedattn.call import decode, varlen

    monkeypatch.setattr(decode, "is_known", lambda x: False)
    monkeypatch.setattr(varlen, "check_values", lambda packed: None)


@pytest.fixture
def overflow(monkeypatch):
    """An index that does not fit in its type fails, in the interpreter; it takes two fifths of the time."""
    if INTERPRETED:
        monkeypatch.setattr(upstream.interpreter_builder, "options", _careful)


@pytest.fixture
def one_thread():
    """Tiny steps on a busy machine spend their time waiting for the other threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def at_once(monkeypatch):
    """Replace timing by fixed numbers."""
    from fusedattn.bench import measure

    monkeypatch.setattr(measure, "times", lambda steps, *_: dict.fromkeys(steps, (1.0, 2.0, 3.0)))


@pytest.fixture(autouse=True)
def _anew(request, monkeypatch):
    """A test draws what it would draw alone, and repeats no call of another, which may have changed the tiles.

    Its calls are recorded and replayed at once, but for half of the cases: those take the way of a user's first call.
    """
    from fusedattn.dispatch import replay
    from fusedattn.launch import failures

    torch.manual_seed(0)
    replay.forget()
    failures.forget()
    parameters = getattr(request.node, "callspec", None)
    case = parameters and parameters.params.get("case")
    first = hasattr(case, "name") and not cases.replayed(case)
    monkeypatch.setattr(replay, "RECORD_AFTER", 2 if first else 1)
