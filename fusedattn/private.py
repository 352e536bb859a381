"""Lists every private name of torch that this package uses, and what happens where a version of torch lacks it.

| name of torch | what for | where it is gone |
|---|---|---|
| `_C._are_functorch_transforms_active` | is a transform of torch.func active? | the next is asked |
| `_C._functorch.peek_interpreter_stack` | the same | taken to be: no replay, no whole graph, no operator by name |
| `autograd.forward_ad._current_level` | is forward mode active? | taken to be: no replay, no whole graph |
| `_C._len_torch_dispatch_stack` | is a TorchDispatchMode active? | taken to be: no replay |
| `_C._get_tracing_state` | does torch.jit trace? | taken to: no replay |
| `_C._is_any_autocast_enabled` | is autocast on for any device? | taken to be: no replay |
| `_C._has_storage` | is a tensor a wrapper of another? | its storage is asked for |
| `_C._dynamo.guards.TensorGuards` | compares tensors in C++ | a dictionary is asked instead |
| `_C._dynamo.guards._empty_strided_cpu`, `..._cuda` | make a tensor | `torch.empty_strided` |
| `_C._cuda_getDevice` | the current device | `torch.cuda.current_device` |
| `UntypedStorage._cdata` | is this the same storage? | no replay |
| `_C._any_requires_grad` | does a tensor want a gradient? | each is asked |
| `_C._AutoDispatchBelowAutograd` | operators of which nobody wants a derivative | they look for who does |
| `_C._after_autograd_keyset` | the same, from within one | the operator is called again |
| `_C._ForceDispatchKeyGuard` and what it is told | autograd in an operator | a backward that does not compile raises |
| `overrides._get_current_function_mode_stack`, `_pop_mode`, `_push_mode` | modes of a thread | `enable_sdpa` has none |
| `utils._device.DeviceContext` | the mode of set_default_device, which stays first | it may not |
| `_C.DisableTorchFunction`, `_C._is_torch_function_all_disabled` | is it ours that calls torch's? | taken to be no |
| `_C._disabled_torch_function_impl` | does a class answer for itself? | taken to |
| `OpOverload._schema` | the names of an operator's arguments | it is refused a derivative without their names |
| the attribute `_maybe_max_seqlen` of a nested tensor | its longest sequence | it is looked for |
| the attribute `_ragged_idx` of a nested tensor | which dimension is ragged | taken to be the third |
| the module `nested._internal.nested_tensor` | is a jagged tensor one of torch's? | it answers for itself |
| the attribute `_dynamo_marked_constant` | the compiler does not trace a function | it traces it: maybe a graph break |

"No replay" is the way of a call that is made for the first time, 40 us to 200 us longer; "no whole graph", that
torch.compile with fullgraph=True refuses, and without it breaks the graph there.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

DeviceContext: Any
try:
    from torch.utils._device import DeviceContext
except ImportError:
    DeviceContext = ()


_Function = TypeVar("_Function", bound=Callable[..., Any])
_Empty = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def _find(path: str, otherwise: Any = None) -> Any:
    """The object at a path below torch; `otherwise` where there is none."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return otherwise if found is None else found


def constant(function: _Function) -> _Function:
    """Tell the compiler not to trace a function: what it returns is a constant.

    `torch.compiler.assume_constant_result` sets the same mark, and imports the compiler for it.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function


def _storage_there(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _wants_gradient(*arguments: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in arguments)


@constant
def _interpreter_there() -> bool:
    peek = _find("_C._functorch.peek_interpreter_stack")
    return peek is None or peek() is not None


def _made_on(device: str) -> _Empty:
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device)


transforms_active: Callable[[], bool] = _find("_C._are_functorch_transforms_active", _interpreter_there)
any_autocast: Callable[[], bool] = _find("_C._is_any_autocast_enabled", lambda: True)
has_storage: Callable[[Tensor], bool] = _find("_C._has_storage", _storage_there)
current_device: Callable[[], int] = _find("_C._cuda_getDevice", torch.cuda.current_device)
any_requires_grad: Callable[..., bool] = _find("_C._any_requires_grad", _wants_gradient)
below_autograd: Callable[[], Any] = _find("_C._AutoDispatchBelowAutograd", contextlib.nullcontext)
TensorGuards: Any = _find("_C._dynamo.guards.TensorGuards")
# Of (shape, strides, dtype), on the device that is current: in half the time that a tensor's own method takes.
EMPTY: dict[str, _Empty] = {
    "cpu": _find("_C._dynamo.guards._empty_strided_cpu", _made_on("cpu")),
    "cuda": _find("_C._dynamo.guards._empty_strided_cuda", _made_on("cuda")),
}
dispatch_modes: Callable[[], int] = _find("_C._len_torch_dispatch_stack", lambda: 1)
tracing: Callable[[], Any] = _find("_C._get_tracing_state", lambda: True)
can_replay = hasattr(torch.UntypedStorage, "_cdata")
_GUARD = (
    "_ForceDispatchKeyGuard",
    "_dispatch_tls_local_include_set",
    "_dispatch_tls_local_exclude_set",
    "DispatchKeySet",
    "DispatchKey",
)


# The level of forward mode, below 0 where no forward-mode derivative is being computed.
forward_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level", 0)


def storage(tensor: Tensor) -> int:
    """What tensors share that share their storage; where `can_replay`."""
    place: int = tensor.untyped_storage()._cdata
    return place


def redispatch(operator: Any, keyset: Any, arguments: tuple[Any, ...]) -> Any:
    """What an operator computes below autograd, from within what autograd has for it."""
    after = _find("_C._after_autograd_keyset")
    with below_autograd():
        return operator(*arguments) if after is None else operator.redispatch(keyset & after, *arguments)


def autograd_inside(device: torch.device) -> Any:
    """A context in which autograd sees what an operator computes with tensors on a CPU or a GPU."""
    guard, included, excluded, keys, key = (_find(f"_C.{name}") for name in _GUARD)
    if None in (guard, included, excluded, keys, key):
        return contextlib.nullcontext()
    below = excluded() - keys(key.AutogradCUDA if device.type == "cuda" else key.AutogradCPU)
    return guard(included(), below - keys(key.ADInplaceOrView))


as_torch_has_it: Callable[[], Any] = _find("_C.DisableTorchFunction", contextlib.nullcontext)
is_as_torch_has_it: Callable[[], bool] = _find("_C._is_torch_function_all_disabled", lambda: False)
# Where torch has classes of tensors with a __torch_function__ that we know: causal biases, and jagged tensors.
TENSORS_OF_TORCH = ("torch.nn.attention.bias", "torch.nested._internal.nested_tensor")
disabled_torch_function = _find("_C._disabled_torch_function_impl")
_MODES = "_get_current_function_mode_stack", "_pop_mode", "_push_mode"
_all_modes, _pop_mode, _push_mode = (_find(f"overrides.{name}") for name in _MODES)


def function_modes() -> list[Any]:
    """The TorchFunctionModes of this thread, the last of which is asked first."""
    return [] if _all_modes is None else _all_modes()


def replace_function_modes(modes: list[Any]) -> None:
    """Make these the TorchFunctionModes of this thread."""
    if _pop_mode is None or _push_mode is None:
        return
    for _ in function_modes():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def longest(nested: Tensor) -> int | None:
    """The length of the longest sequence of a tensor of torch.jagged, if it is known."""
    return getattr(nested, "_maybe_max_seqlen", None)


def ragged_dim(nested: Tensor) -> int:
    """Which dimension of a tensor of torch.jagged differs from batch to batch."""
    return getattr(nested, "_ragged_idx", 2)


def argument_names(operator: Any) -> list[str]:
    """What the arguments of an operator are called, or their numbers."""
    schema = getattr(operator, "_schema", None)
    return [f"argument {number}" for number in range(64)] if schema is None else [x.name for x in schema.arguments]
