"""Sets the attention implementation of Hugging Face models by whether their code calls the attention interface.

A model that asks for a name of ours is built as an "eager" one, and then its modules are read: a config beneath which
some attention calls the interface gets the name; any other stays "eager", with a warning. Masks are bool, or None for
plain causality, only where every attention that could get them calls the interface, as an attribute of the config says.
Elsewhere they are eager's, right for all but as large as the scores.
"""

import functools
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from ._hf_code import Kind, kind, named
from ._hf_names import MASKS, NAMES, Masks, masks_of

if not hasattr(PreTrainedModel, "_check_and_adjust_attn_implementation"):
    raise ImportError("transformers before 4.54 chooses attention in another way")

_models: WeakSet[PreTrainedModel] = WeakSet()  # that are alive, of any implementation
_warned: set[type] = set()


def install(name: str, forward: Callable[..., Any]) -> None:
    """Register `forward` as `name`, with `attention_mask`, and read every model that asks for it from now on."""
    if not NAMES:
        _follow(PreTrainedModel, "_check_and_adjust_attn_implementation", _checked)
        _follow(PreTrainedModel, "init_weights", _settled)
        _follow(PreTrainedModel, "set_attn_implementation", _settled_as_set)
        for method in ("from_pretrained", "_from_config"):  # not every `__init__` of transformers 4 calls init_weights
            _follow(PreTrainedModel, method, _settled)
        for method in ("to_dict", "to_diff_dict"):  # the to_dict of a config may not call that of PretrainedConfig
            _follow(PretrainedConfig, method, _without_masks)
    NAMES.add(name)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, attention_mask)


def _follow(cls: type, name: str, after: Callable[..., Any]) -> None:
    """Let a method of a class return after(self, what it returns, *its arguments)."""
    static = inspect.getattr_static(cls, name)
    original = static.__func__ if isinstance(static, classmethod) else static

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return after(self, original(self, *arguments, **options), *arguments, **options)

    setattr(cls, name, method if static is original else classmethod(method))


def attention_mask(*sizes: Any, config: Any = None, **options: Any) -> Any:
    """`sdpa_mask` for configs that have Masks, `eager_mask` for all others."""
    masks = masks_of(config)
    if masks is None:
        return eager_mask(*sizes, config=config, **options)
    # Of layers that share keys a model may compute the last rows alone, of which no mask would not say that they are.
    causal = masks.causal and not getattr(config, "num_kv_shared_layers", 0)
    options |= {} if causal else dict(allow_is_causal_skip=False)
    options |= {} if masks.unhidden else dict(allow_is_bidirectional_skip=False)
    return sdpa_mask(*sizes, config=config, **options)


class Requested(str):
    """The string "eager" for a config while its model is built, with the `name` that was asked for."""

    name: str


def requested(config: Any) -> str | None:
    """The name of ours that a config has or asks for."""
    name = config._attn_implementation
    return name.name if isinstance(name, Requested) else name if name in NAMES else None


def _checked(model: Any, name: Any, attn_implementation: Any, is_init_check: bool = False, *_: Any, **__: Any) -> Any:
    """A name of ours as a Requested one, while the model is built."""
    if not is_init_check or name not in NAMES:
        return name
    eager = Requested("eager")
    eager.name = name
    return eager


def _settled(model: Any, result: Any, *_: Any, **options: Any) -> Any:
    """Settle a model, or that which a method of its class returns, maybe in a tuple."""
    built = result[0] if isinstance(result, tuple) else result
    settle(built if isinstance(model, type) else model)
    return result


def _settled_as_set(model: Any, result: Any, attn_implementation: Any, *_: Any, **options: Any) -> Any:
    asked = dict(asked_for(model.config, attn_implementation))
    if NAMES.intersection(asked.values()):
        settle(model, asked)
    return result


def _without_masks(config: Any, saved: Any, *_: Any, **options: Any) -> Any:
    saved.pop(MASKS, None)
    return saved


def asked_for(config: Any, implementation: Any) -> Iterator[tuple[int, str]]:
    """(id of config, name asked for) for a config and those within it; a dict asks for each by its key."""
    names = (
        implementation if isinstance(implementation, dict) else dict.fromkeys(["", *config.sub_configs], implementation)
    )
    if "" in names:
        yield id(config), names[""]
    for key in config.sub_configs:
        part, name = getattr(config, key, None), names.get(key)
        if part is not None and name is not None:
            yield from asked_for(part, name)


def under_construction() -> Iterator[PreTrainedModel]:
    """The models whose `__init__` is running, of those that will be settled at its end."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        code = frame.f_code
        if code.co_name == "__init__" and {"post_init", "init_weights"}.intersection(code.co_names):
            if isinstance(model := frame.f_locals.get(code.co_varnames[0]), PreTrainedModel):
                yield model


@dataclass
class Survey:
    """The attention beneath a config: in the modules that have it, and in all within them."""

    config: Any
    model: Any  # the outermost of its class of configs, which a warning names
    attends: bool = False  # there is attention of any kind
    used: bool = False  # there is some that calls the interface, under a name of ours
    unsafe: bool = False  # there is some that might be wrong for a bool mask, or for None
    causal: set[bool] = field(default_factory=set)  # whether None is causal, for those that call the interface
    silent: set[tuple[type, Kind]] = field(default_factory=set)  # what does not call, and has no nearer config
    refused: set[str] = field(default_factory=set)  # what some hand the interface, of which we refuse each


def settle(model: Any, asked: dict[int, str] | None = None) -> None:
    """Give each config of a model that asks for a name the name or "eager", and warn of code that does not use it.

    A config of the class of that of a model around this one waits for that model. `asked` is {id of config: name}.
    """
    _models.add(model)
    if not asked and not any(map(requested, configs_of(model).values())):
        return
    asked, around = asked or {}, [outer for outer in under_construction() if outer is not model]
    surveys = surveyed(model)
    safe = safe_masks(model, surveys)
    to_warn: dict[type, list[Survey]] = {}
    for one in surveys.values():
        name = requested(one.config)
        asks = name is not None or asked.get(id(one.config)) in NAMES
        if not asks or any(type(outer.config) is type(one.config) for outer in around):
            continue
        if name is not None:
            written = "".join([*(name if one.used and not one.refused else "eager")])  # a new object
            one.config._attn_implementation_internal = written
            if type(one.config) in safe:
                setattr(one.config, MASKS, safe[type(one.config)]._replace(name=written))
        if one.silent or one.refused or one.config is model.config and not one.attends and not around:
            to_warn.setdefault(type(one.model), []).append(one)
    for cls, surveyed_parts in to_warn.items():
        silent = {part for one in surveyed_parts for part in one.silent}
        strays = sorted({part.__name__ for part, does in silent if does.attends and (does.masked or named(part))})
        where = f"{', '.join(strays)} of {cls.__name__}, which do" if strays else None
        if not any(one.used for one in surveyed_parts):
            where = f"{cls.__name__}, whose code does"
        why = f"{where} not call transformers' AttentionInterface" if where else None
        if refused := sorted(set().union(*(one.refused for one in surveyed_parts))):
            why = f"{cls.__name__}, whose code hands transformers' AttentionInterface {', '.join(refused)}"
        if why and cls not in _warned:
            _warned.add(cls)
            text = f"fusedattn is not used in {why}: it computes what it does with attn_implementation="
            warnings.warn(text + '"eager"', stacklevel=2)


def safe_masks(model: Any, surveys: dict[int, Survey]) -> dict[type, Masks]:
    """{class of configs: masks that all attention beneath them takes, if any} of a model and those that share them."""
    used, within = {key for key, one in surveys.items() if one.used}, set(model.modules())
    sharing = [other for other in list(_models) if other not in within and used & configs_of(other).keys()]
    by_class: dict[type, list[Survey]] = {}
    for one in (surveys, *map(surveyed, sharing)):
        for key in used & one.keys():
            by_class.setdefault(type(one[key].config), []).append(one[key])
    return {
        cls: Masks("", all(True in one.causal for one in alike), all(False in one.causal for one in alike))
        for cls, alike in by_class.items()
        if not any(one.unsafe for one in alike)
    }


def configs_of(model: Any) -> dict[int, PretrainedConfig]:
    """{id: config} of the modules of a model."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return {id(config): config for config in configs if isinstance(config, PretrainedConfig)}


def surveyed(model: Any) -> dict[int, Survey]:
    """{id of config: its Survey} for the configs of a model."""
    surveys: dict[int, Survey] = {}
    survey(model, (), (), surveys)
    return surveys


def survey(module: Any, models: tuple[Any, ...], configs: tuple[Any, ...], surveys: dict[int, Survey]) -> bool:
    """Whether a module is or holds attention: it goes into the Surveys of the configs around it, the nearest last."""
    if isinstance(module, PreTrainedModel):
        models = (*models, module)
    config = getattr(module, "config", None)
    if isinstance(config, PretrainedConfig) and models:
        configs = (*(known for known in configs if known is not config), config)
        if id(config) not in surveys:
            outermost = (outer for outer in models if type(outer.config) is type(config))
            surveys[id(config)] = Survey(config, next(outermost, models[-1]))
    beneath = False
    for child in module.children():
        beneath |= survey(child, models, configs, surveys)
    cls, does = type(module), kind(module)
    stranger = named(cls) and cls.__module__.partition(".")[0] != "transformers"
    if stranger and does.masked and not (does.calls or beneath):
        does = does._replace(attends=True)  # in code without a name that tells
    if does.calls or does.attends or named(cls):
        used = does.calls and not does.refused and requested(configs[-1]) is not None
        # Whether the module says what None means, and the models of its config that they take other masks than eager's.
        flags = ("_supports_sdpa", "_supports_flex_attn", "_supports_flash_attn")
        alike = [model for model in models if type(model.config) is type(models[-1].config)]
        able = hasattr(module, "is_causal") and all(any(getattr(model, name, 0) for name in flags) for model in alike)
        for known in configs:
            outer = surveys[id(known)]
            outer.attends = True
            outer.used |= used
            if used:
                outer.causal.add(bool(getattr(module, "is_causal", True)))
            outer.unsafe |= does.masked and does.attends or does.calls and not (used and able)
        nearest = surveys[id(configs[-1])]
        nearest.refused |= does.refused
        if not does.calls:
            nearest.silent.add((cls, does))
    return beneath or does.calls or does.attends
