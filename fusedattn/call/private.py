"""Private names of torch. All but TorchDispatchMode have a fallback, for a torch that lacks them.

Results are the same with a fallback. In comments, "no replay" means that each call is checked and prepared like a first
one, which takes 40 us to 200 us longer. No other file of fusedattn/ uses private names of torch.
"""

import contextlib
import functools
import platform
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
OLD_COMPILER = _VERSION < (2, 13)  # with compiler faults that our calls avoid
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _find(path: str, otherwise: Any = None) -> Any:
    value: Any = torch
    for name in path.split("."):
        value = getattr(value, name, None)
    return otherwise if value is None else value


def constant(function: _Function) -> _Function:
    """Mark a function: torch.compile runs it once and keeps its result. A torch without this mark traces it instead."""
    marked: Any = function
    # The mark of torch.compiler.assume_constant_result, which would import the compiler.
    marked._dynamo_marked_constant = True
    return function


@constant
def is_exporting() -> bool:
    """Return whether torch.export is tracing. Some versions of torch.compile assume True for torch's function."""
    return torch.compiler.is_exporting()


def eager(function: _Function, reason: str | None = None) -> _Function:
    """Make torch.compile run a function eagerly, by a graph break. reason: the compiler's error with fullgraph=True."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **options)
        return function(*args, **options)

    marked: Any = run
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = reason or f"{function.__name__} runs outside of graphs"
    return cast(_Function, run)


def holds(condition: Any, otherwise: bool) -> bool:
    """Return whether a condition on sizes is true, or `otherwise` if a compiler cannot know."""
    if condition is True or condition is False:  # the quickest test, for eager code
        return condition
    if not (torch.compiler.is_compiling() or isinstance(condition, torch.SymBool)):
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true  # imports sympy

    return bool(guard_or_true(condition) if otherwise else guard_or_false(condition))


def known(condition: Any, otherwise: bool) -> bool:
    """Return whether the condition holds for all sizes of a graph; `otherwise` if it depends on them. Add no guard."""
    if condition is True or condition is False:
        return condition
    if not (torch.compiler.is_compiling() or isinstance(condition, torch.SymBool)):
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_false, statically_known_true

    return bool(not statically_known_false(condition) if otherwise else statically_known_true(condition))


@constant
@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether torch multiplies bfloat16 in hardware. x86 needs AMX or avx512_bf16; other CPUs always do it."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    has_units = any(_find(f"cpu._is_{name}_supported", bool)() for name in ("amx_tile", "avx512_bf16"))
    # The environment variable ATEN_CPU_CAPABILITY may keep torch from using these units.
    return has_units and torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")


# Asserts at run time a condition on sizes that a compiler cannot know. If torch lacks it, nothing is asserted.
assert_at_run_time: Callable[[Any], None] = _find("_check", lambda condition: None)


@constant
def _in_transform() -> bool:
    return _find("_C._functorch.peek_interpreter_stack", lambda: True)() is not None


# Functions that tell if a torch.func transform, forward mode (level 0 or more), a TorchDispatchMode or torch.jit is
# active. If torch lacks one, it counts as active: no replay, and for the first two torch.compile breaks the graph.
transforms_active: Callable[[], bool] = _find("_C._are_functorch_transforms_active", _in_transform)
forward_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level", 0)
dispatch_modes: Callable[[], int] = _find("_C._len_torch_dispatch_stack", lambda: 1)
tracing: Callable[[], Any] = _find("_C._get_tracing_state", lambda: True)
# The TorchDispatchModes of this thread. If missing, an active FlopCounterMode does not count this package's operators.
_dispatch_modes: Callable[[], list[Any]] = _find("utils._python_dispatch._get_current_dispatch_mode_stack", list)
any_autocast: Callable[[], bool] = _find("_C._is_any_autocast_enabled", lambda: True)  # if missing, no replay


def flop_formulas() -> list[dict[Any, Callable[..., Any]]]:
    """Return the tables {operator: formula} of torch.utils.flop_counter; [] if that module is not imported."""
    module: Any = sys.modules.get("torch.utils.flop_counter")
    if module is None:
        return []
    counters: list[Any] = [getattr(mode, "counter", None) for mode in _dispatch_modes()]
    return [owner.flop_registry for owner in (module, *counters) if hasattr(owner, "flop_registry")]


def unmapped(tensor: Tensor) -> Tensor:
    """Return the tensor inside vmap's wrappers, because torch cannot read the tangent of a wrapper."""
    is_mapped, below = _find("_C._functorch.is_batchedtensor"), _find("_C._functorch.get_unwrapped")
    while is_mapped is not None and below is not None and is_mapped(tensor):
        tensor = below(tensor)
    return tensor


# Returns the FakeTensorMode that is active or made one of the values, or None. If missing, torch raises its own error.
fake_mode: Callable[[Any], Any] = _find("_guards.detect_fake_mode", lambda values: None)
# Returns whether a tensor has a storage: functorch's wrappers have none.
_is_wrapped: Callable[[Tensor], bool] = _find("_C._functorch.is_functorch_wrapped_tensor", lambda tensor: False)
has_storage: Callable[[Tensor], bool] = _find("_C._has_storage", lambda tensor: not _is_wrapped(tensor))
can_replay = hasattr(torch.UntypedStorage, "_cdata")


def storage(tensor: Tensor) -> int:
    """Return an int that identifies a tensor's storage. If torch lacks it, calls are not replayed (`can_replay`)."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


# The innermost saved-tensor hooks, such as a checkpoint's, or None. If missing, hooks count as active.
saved_tensors_hooks: Callable[[bool], Any] = _find("_C._autograd._top_saved_tensors_default_hooks", lambda _: True)
TensorGuards: Any = _find("_C._dynamo.guards.TensorGuards")  # compares tensors in C++; without it a dictionary does


def can_guard(tensors: Iterable[Any]) -> bool:
    """Return whether TensorGuards can compare all objects. They may crash on nested tensors."""
    for x in tensors:  # not any(), which takes longer
        if getattr(x, "is_nested", True):
            return False
    return True


# Two fast functions: whether any tensor requires grad, the index of the current GPU. The fallbacks are public ones.
any_requires_grad: Callable[..., bool] = _find(
    "_C._any_requires_grad", lambda *x: any(isinstance(one, Tensor) and one.requires_grad for one in x)
)
current_device: Callable[[], int] = _find("_C._cuda_getDevice", torch.cuda.current_device)


def _empty_on(device: str) -> Callable[..., Tensor]:
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


# {device type: function that allocates (shape, strides, dtype)}. The fallback, torch.empty_strided, is half as fast.
EMPTY: dict[str, Callable[..., Tensor]] = {
    "cpu": _find("_C._dynamo.guards._empty_strided_cpu", _empty_on("cpu")),
    "cuda": _find("_C._dynamo.guards._empty_strided_cuda", _empty_on("cuda")),
}

# A context without autograd, for operators without derivatives. If missing, autograd inspects their arguments.
below_autograd: Callable[[], Any] = _find("_C._AutoDispatchBelowAutograd", contextlib.nullcontext)


def redispatch(operator: Any, keyset: Any, arguments: tuple[Any, ...]) -> Any:
    """Call an operator's kernel below autograd, from inside its autograd kernel."""
    after = _find("_C._after_autograd_keyset")  # if missing, the call starts at the top of the dispatcher
    with below_autograd():
        return operator(*arguments) if after is None else operator.redispatch(keyset & after, *arguments)


def autograd_inside(device: torch.device) -> Any:
    """Return a context in which autograd also records inside an operator."""
    # Without these names a backward raises if its kernel does not compile.
    names = "_ForceDispatchKeyGuard", "_dispatch_tls_local_include_set", "_dispatch_tls_local_exclude_set"
    guard, included, excluded, keys, key = (_find(f"_C.{name}") for name in (*names, "DispatchKeySet", "DispatchKey"))
    if None in (guard, included, excluded, keys, key):
        return contextlib.nullcontext()
    below = excluded() - keys(key.AutogradCUDA if device.type == "cuda" else key.AutogradCPU)
    return guard(included(), below - keys(key.ADInplaceOrView))


# For `compat.torch.sdpa`: a context that disables modes, and whether it is active (False if torch lacks the name).
as_torch_has_it: Callable[[], Any] = _find("_C.DisableTorchFunction", contextlib.nullcontext)
is_as_torch_has_it: Callable[[], bool] = _find("_C._is_torch_function_all_disabled", lambda: False)
# The __torch_function__ of a class that overrides no function. If missing, such a class counts as overriding all.
disabled_torch_function = _find("_C._disabled_torch_function_impl")
# Returns whether __torch_function__ is on. Without this name torch.compile accepts no tensors of classes that have it.
torch_function_enabled: Callable[[], bool] = _find("_C._is_torch_function_enabled", lambda: True)
# Modules of torch's own classes whose __torch_function__ is ignored: causal biases and jagged tensors are accepted, and
# lazy parameters, which have no sizes yet, get a clearer error from this package.
TENSORS_OF_TORCH = ("torch.nn.attention.bias", "torch.nested._internal.nested_tensor", "torch.nn.parameter")


class _Lookups(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if all(isinstance(x, Tensor) for x in index):
                return torch.ops.aten.index(args[0], index)
        return func(*args, **(kwargs or {}))


def lookups() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which torch.vmap maps over the index of table[index]; torch 2.10 calls its .item()."""
    return _Lookups() if _VERSION < (2, 11) and not torch.compiler.is_compiling() else contextlib.nullcontext()


# The TorchFunctionModes of this thread. Without the name, `enable_sdpa` replaces only the aten operator.
function_modes: Callable[[], list[Any]] = _find("overrides._get_current_function_mode_stack", list)
_pop_mode: Callable[[], Any] = _find("overrides._pop_mode", lambda: None)
_push_mode: Callable[[Any], None] = _find("overrides._push_mode", lambda mode: None)


def replace_function_modes(modes: list[Any]) -> None:
    for _ in function_modes():
        _pop_mode()
    # torch asserts that the mode that set_default_device pushes is at the bottom of the stack.
    for mode in sorted(modes, key=lambda mode: not isinstance(mode, _find("utils._device.DeviceContext", ()))):
        _push_mode(mode)


# The maximum length and the ragged dimension of a jagged tensor. If torch lacks these attributes: None and 2.
def longest(nested: Tensor) -> int | None:
    return getattr(nested, "_maybe_max_seqlen", None)


def ragged_dim(nested: Tensor) -> int:
    return getattr(nested, "_ragged_idx", 2)


def argument_names(operator: Any) -> list[str]:
    schema = getattr(operator, "_schema", None)
    return [f"argument {number}" for number in range(64)] if schema is None else [x.name for x in schema.arguments]


def in_onnx_export() -> bool:
    """Return whether torch.onnx.export is running, without importing torch.onnx."""
    return "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export()


# PyTorch's fused attention for CPUs and its backward. If torch lacks them, CPU calls take the naive path.
flash_attention_for_cpu: Any = _find("_scaled_dot_product_flash_attention_for_cpu")  # 2 us faster than by torch.ops
flash_attention_for_cpu_backward: Any = _find("ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")

# Returns the gradient of scores, from (the gradient of their softmax, the softmax, -1, its dtype, grad_input=memory).
softmax_backward: Callable[..., Tensor] = _find(
    "_softmax_backward_data",
    lambda grad, weights, *_, grad_input: (grad - (grad * weights).sum(-1, keepdim=True)).mul_(weights),
)


_register_namedtuple: Callable[..., None] = _find("utils._pytree._register_namedtuple", lambda *_, **__: None)


def exported_as(name: str) -> Callable[[type], type]:
    """Return a decorator for NamedTuple classes. torch.export can then save and load programs with such arguments."""

    def register(kind: type) -> type:
        _register_namedtuple(kind, serialized_type_name=name)
        torch.serialization.add_safe_globals([kind])  # so torch.load(weights_only=True) reads it, too
        return kind

    return register


def group_timeout(group: Any) -> timedelta:
    """Return the timeout of a process group's operations; torch's default if it is unknown."""
    backend_of = getattr(group, "_get_backend", lambda kind: None)
    for kind in getattr(group, "_device_types", ()):
        limit = getattr(getattr(backend_of(kind), "options", None), "_timeout", None)
        if isinstance(limit, timedelta):
            return limit
    return timedelta(minutes=30)


# The store of the default process group, where rank 0 writes the number of a rank that did not answer. Without it the
# errors of other ranks name rank 0.
_store: Callable[[], Any] = _find("distributed.distributed_c10d._get_default_store", lambda: None)


def write_store(key: str, value: str) -> None:
    if (store := _store()) is not None:
        store.set(key, value)


def read_store(key: str, limit: timedelta) -> str | None:
    """Return the value that another process writes to the store under `key`, or None after the time limit."""
    if (store := _store()) is None:
        return None
    try:
        store.wait([key], limit)
    except RuntimeError:  # the base of torch.distributed's errors: a timeout, or the store is closed
        return None
    return str(store.get(key).decode())
