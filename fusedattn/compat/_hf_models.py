"""Which parts of a Hugging Face model call the attention interface, and what becomes of those that do not.

A model that asks for a name of ours is built as an "eager" one. Once it stands, its modules are read: a config beneath
which some attention calls the interface gets the name, as `set_attn_implementation` would give it; any other stays
"eager", and its model is warned about. Masks are bool, or None for plain causality, only where every attention that
could be handed them calls the interface. Everywhere else they are eager's, right for all but as large as the scores.
"""

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from torch.autograd import Function
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

# Parts of the names that code uses which computes attention by itself.
ATTENDING = (
    "softmax",
    "logsumexp",
    "scaled_dot_product",
    "sdpa_attention",
    "multiheadattention",
    "multi_head_attention",
    "flash_attn",
    "flash_attention_forward",
    "flex_attention",
)

_names: set[str] = set()
_whole: set[type] = set()  # classes of configs beneath which all attention calls the interface,
_partly: set[type] = set()  # and beneath which some does not, in whichever model
_warned: set[type] = set()


def install(name: str, forward: Callable) -> None:
    """Register `forward` as `name`, with `attention_mask`, and judge every model that asks for it from now on."""
    if not _names:
        for method, wrapper in (
            ("_check_and_adjust_attn_implementation", _checking),
            ("init_weights", _settling_when_built),
            ("set_attn_implementation", _settling_when_set),
        ):
            setattr(PreTrainedModel, method, wrapper(getattr(PreTrainedModel, method)))
    _names.add(name)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(*sizes, config=None, **options):
    """`sdpa_mask` for the configs that were found to be safe with it, `eager_mask` for all others."""
    make = sdpa_mask if type(config) in _whole and type(config) not in _partly else eager_mask
    return make(*sizes, config=config, **options)


class Requested(str):
    """Reads "eager", and remembers the `name` that was asked for: what a config holds while its model is built."""

    name: str

    def __new__(cls, name: str) -> "Requested":
        held = super().__new__(cls, "eager")
        held.name = name
        return held


def requested(config) -> str | None:
    """The name of ours that a config holds or asks for."""
    held = config._attn_implementation
    return held.name if isinstance(held, Requested) else held if held in _names else None


def _checking(original: Callable) -> Callable:
    @functools.wraps(original)
    def check(self, attn_implementation, is_init_check=False, **options):
        found = original(self, attn_implementation, is_init_check, **options)
        return Requested(found) if is_init_check and found in _names else found

    return check


def _settling_when_built(original: Callable) -> Callable:
    @functools.wraps(original)
    def init_weights(self, *arguments, **options):
        done = original(self, *arguments, **options)
        settle(self, under_construction(self))
        return done

    return init_weights


def _settling_when_set(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_attn_implementation(self, attn_implementation, *arguments, **options):
        done = original(self, attn_implementation, *arguments, **options)
        wanted = dict(wishes(self.config, attn_implementation))
        if _names.intersection(wanted.values()):
            settle(self, wanted=wanted)
        return done

    return set_attn_implementation


def wishes(config, implementation) -> Iterator[tuple[int, str]]:
    """(id of config, what was asked for) for a config and those within it; a dict asks for each by its key."""
    if not isinstance(implementation, dict):
        yield id(config), implementation
    elif "" in implementation:
        yield id(config), implementation[""]
    for key in config.sub_configs:
        part = getattr(config, key, None)
        asked = implementation.get(key) if isinstance(implementation, dict) else implementation
        if part is not None and asked is not None:
            yield from wishes(part, asked)


def under_construction(model) -> tuple:
    """The models around a model whose `__init__` has not ended, the outermost first."""
    around: list[Any] = []
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "__init__" and code.co_varnames else None
        if isinstance(owner, PreTrainedModel) and hasattr(owner, "config") and owner is not model:
            around.append(owner)
        frame = frame.f_back
    return tuple(reversed(around))


class Kind(NamedTuple):
    """A class of modules, by its code. calls: the interface, by the config's name. attends: by itself. masked: takes one."""

    calls: bool = False
    attends: bool = False
    masked: bool = False


@functools.cache
def kind(cls: type) -> Kind:
    """What `cls.forward` does, with the methods and functions that it reaches; not its submodules."""
    if cls.__module__.partition(".")[0] == "torch" or issubclass(cls, PreTrainedModel):
        return Kind()  # those who use torch's modules name them; models hold attention, and use softmax for a loss
    calls = masked = False
    attending = set()
    for function, method in reached(cls):
        codes = list(within(function.__code__))
        used = {name for code in codes for name in code.co_names}
        interfaces = any(isinstance(function.__globals__.get(name), AttentionInterface) for name in used)
        calls |= interfaces and "_attn_implementation" in used
        if any(part in name.lower() for name in used for part in ATTENDING):
            # What is handed to the interface for "eager", and what the constructor names, is not code of its own.
            attending.add("fallback" if "eager" in function.__name__ and not method else "own")
        if method and function.__name__ != "__init__":
            code = function.__code__
            takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            masked |= any("mask" in name for name in takes) or "attention_mask" in code.co_consts
    return Kind(calls, "own" in attending or bool(attending) and not calls, masked)


def reached(cls: type) -> Iterator[tuple[types.FunctionType, bool]]:
    """(function, whether it is a method) for what `__init__` and `forward` of a class reach in its own code."""
    todo = [(function, True) for name in ("__init__", "forward") for function in methods(cls, name)]
    seen = set()
    while todo:
        function, method = todo.pop()
        if function in seen or foreign(function.__module__):
            continue
        seen.add(function)
        yield function, method
        for name in {name for code in within(function.__code__) for name in code.co_names}:
            todo += [(found, True) for found in methods(cls, name)]
            found = function.__globals__.get(name)
            if isinstance(found, type) and issubclass(found, Function):
                found = found.forward
            if isinstance(found, types.FunctionType):
                todo.append((inspect.unwrap(found), False))


def methods(cls: type, name: str) -> Iterator[types.FunctionType]:
    """The method of a class that has this name, and where it calls `super`, those above it."""
    for above in cls.__mro__:
        found = vars(above).get(name)
        if found is None or foreign(above.__module__):
            continue
        found = getattr(found, "fget", None) or getattr(found, "__func__", found)
        found = inspect.unwrap(found) if callable(found) else found
        if isinstance(found, types.FunctionType):
            yield found
            if "super" in found.__code__.co_names:
                continue
        return


def foreign(module: str) -> bool:
    """Whether a module of Python is torch's, or transformers' and not a model's."""
    return module.startswith(("torch.", "transformers.")) and not module.startswith("transformers.models.")


def within(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from within(constant)


@dataclass
class Survey:
    """What was found beneath a config, and, of the modules that read no other config, which model they belong to."""

    config: Any
    model: Any
    used: bool = False  # attention beneath calls the interface, under a name of ours
    unsafe: bool = False  # other attention beneath may be handed a mask
    found: bool = False  # attention of any kind beneath
    own_used: bool = False
    silent: dict = field(default_factory=dict)  # classes of its own that attend and do not call -> whether with a mask


def settle(model, around: tuple = (), wanted: dict | None = None) -> None:
    """Give each config of a model that asks for a name the name or "eager", and warn of what does not use it."""
    wanted = wanted or {}
    surveys: dict[int, Survey] = {}
    survey(model, around, (), surveys)
    asking = [s for s in surveys.values() if requested(s.config) or wanted.get(id(s.config)) in _names]
    for each in asking:
        name = requested(each.config)
        if not each.found and around:
            continue  # it is for the model around to say that there is none
        if name is not None:
            each.config._attn_implementation_internal = name if each.used else "eager"
        if each.used:
            (_partly if each.unsafe else _whole).add(type(each.config))
        strays = sorted(cls.__name__ for cls, masked in each.silent.items() if masked and kind(cls).attends)
        if each.silent and not each.own_used or not each.found and each.model is model:
            warn(type(each.model))
        elif strays:
            warn(type(each.model), strays)


def survey(module, models: tuple, configs: tuple, surveys: dict) -> None:
    """Fill in what is beneath each config. `models` and `configs` are those around the module, the nearest last."""
    if isinstance(module, PreTrainedModel):
        models = (*models, module)
    config = getattr(module, "config", None)
    if isinstance(config, PretrainedConfig) and models:
        configs = (*(known for known in configs if known is not config), config)
        if id(config) not in surveys:
            alike = (each for each in models if type(each.config) is type(config))
            surveys[id(config)] = Survey(config, next(alike, models[-1]))
    cls = type(module)
    does = kind(cls)
    attends = does.calls or does.attends or "Attention" in cls.__name__ and not foreign(cls.__module__)
    if attends and configs and not isinstance(module, PreTrainedModel):
        used = does.calls and requested(configs[-1]) is not None
        for known in configs:
            beneath = surveys[id(known)]
            beneath.found = True
            beneath.used |= used
            beneath.unsafe |= does.masked and (does.attends or does.calls and not used)
        surveys[id(configs[-1])].own_used |= used
        if not does.calls:
            surveys[id(configs[-1])].silent[cls] = does.masked
    for child in module.children():
        survey(child, models, configs, surveys)


def warn(cls: type, parts: list | None = None) -> None:
    """Say once for each class of models that it, or these modules of it, are not ours."""
    if cls in _warned:
        return
    _warned.add(cls)
    where = f"{', '.join(parts)} of {cls.__name__}, which do" if parts else f"{cls.__name__}, whose code does"
    warnings.warn(
        f"fusedattn is not used in {where} not call transformers' AttentionInterface: it computes what it does with "
        'attn_implementation="eager"',
        stacklevel=2,
    )
