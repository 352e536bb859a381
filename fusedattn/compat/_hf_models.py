"""Which parts of a Hugging Face model call the attention interface, and what becomes of those that do not.

A model that asks for a name of ours is built as an "eager" one. Once it stands, its modules are read: a config beneath
which some attention calls the interface gets the name, as `set_attn_implementation` would give it; any other stays
"eager", and its model is warned about. Masks are bool, or None for plain causality, only where every attention that
could be handed them calls the interface. Everywhere else they are eager's, right for all but as large as the scores.
Which of the two is a mark on the config itself: another of the same class may serve another model.
"""

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from ._hf_code import Kind, kind, named, stranger
from ._hf_names import MASKS, NAMES, Masks, masks_of

if not hasattr(PreTrainedModel, "_check_and_adjust_attn_implementation"):
    raise ImportError("transformers before 4.54 chooses attention in another way")

_models: WeakSet[PreTrainedModel] = WeakSet()  # that are alive, of any implementation
_warned: set[type] = set()


def install(name: str, forward: Callable[..., Any]) -> None:
    """Register `forward` as `name`, with `attention_mask`, and judge every model that asks for it from now on."""
    if not NAMES:
        _follow(PreTrainedModel, "_check_and_adjust_attn_implementation", _checked)
        _follow(PreTrainedModel, "init_weights", _settled)
        _follow(PreTrainedModel, "set_attn_implementation", _settled_as_set)
        # Of transformers 4 there are classes whose `__init__` does not end in `init_weights`.
        _follow(PreTrainedModel, "from_pretrained", _settled_as_made)
        _follow(PreTrainedModel, "_from_config", _settled_as_made)
        for method in ("to_dict", "to_diff_dict"):  # a config with a to_dict of its own may not call ours
            _follow(PretrainedConfig, method, _without_masks)
    NAMES.add(name)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, attention_mask)


def _follow(cls: type, name: str, after: Callable[..., Any]) -> None:
    """Let a method of a class return after(self, what it returns, *its arguments)."""
    found = inspect.getattr_static(cls, name)
    original = found.__func__ if isinstance(found, classmethod) else found

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return after(self, original(self, *arguments, **options), *arguments, **options)

    setattr(cls, name, method if found is original else classmethod(method))


def attention_mask(*sizes: Any, config: Any = None, **options: Any) -> Any:
    """`sdpa_mask` for configs that are marked as safe with it, `eager_mask` for all others."""
    masks = masks_of(config)
    if masks is None:
        return eager_mask(*sizes, config=config, **options)
    if not masks.causal:
        options["allow_is_causal_skip"] = False
    if not masks.unhidden:
        options["allow_is_bidirectional_skip"] = False
    return sdpa_mask(*sizes, config=config, **options)


class Requested(str):
    """Reads "eager", and remembers the `name` that was asked for: what a config holds while its model is built."""

    name: str

    def __new__(cls, name: str) -> "Requested":
        held = super().__new__(cls, "eager")
        held.name = name
        return held


def requested(config: Any) -> str | None:
    """The name of ours that a config holds or asks for."""
    held = config._attn_implementation
    return held.name if isinstance(held, Requested) else held if held in NAMES else None


def _checked(
    model: Any, name: Any, attn_implementation: Any, is_init_check: bool = False, *_: Any, **options: Any
) -> Any:
    """A name of ours as one that is requested, while the model is built."""
    return Requested(name) if is_init_check and name in NAMES else name


def _settled(model: Any, done: Any, *_: Any, **options: Any) -> Any:
    settle(model)
    return done


def _settled_as_made(cls: Any, made: Any, *_: Any, **options: Any) -> Any:
    settle(made[0] if isinstance(made, tuple) else made)
    return made


def _settled_as_set(model: Any, done: Any, attn_implementation: Any, *_: Any, **options: Any) -> Any:
    wanted = dict(wishes(model.config, attn_implementation))
    if NAMES.intersection(wanted.values()):
        settle(model, wanted)
    return done


def _without_masks(config: Any, listed: Any, *_: Any, **options: Any) -> Any:
    """What is saved of a config, without the mark that we put on it."""
    listed.pop(MASKS, None)
    return listed


def wishes(config: Any, implementation: Any) -> Iterator[tuple[int, str]]:
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


def under_construction(model: Any) -> tuple[Any, ...]:
    """The models around one that is being built, the outermost first, of those that will be settled once they stand."""
    around: list[Any] = []
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and {"post_init", "init_weights"}.intersection(code.co_names):
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, PreTrainedModel) and owner is not model:
                around.append(owner)
        frame = frame.f_back
    return tuple(reversed(around))


@dataclass
class Survey:
    """What is beneath a config: in the modules that hold it, and in all within them."""

    config: Any
    model: Any  # the outermost of its class of configs, to which a warning is due
    attends: bool = False  # attention of any kind
    used: bool = False  # some that calls the interface, under a name of ours
    unsafe: bool = False  # some that might mistake a bool mask, or None
    causal: set[bool] = field(default_factory=set)  # what those that call the interface take None for
    silent: set[tuple[type, Kind]] = field(default_factory=set)  # what does not call, and has no nearer config


def settle(model: Any, wanted: dict[int, str] | None = None) -> None:
    """Give each config of a model that asks for a name the name or "eager", and warn of what does not use it.

    What shares its kind of config with a model around it waits for that one. `wanted` has the names that were asked
    for by id of config, where transformers may have refused to set them.
    """
    _models.add(model)
    if not wanted and not any(map(requested, configs_of(model).values())):
        return
    wanted, around = wanted or {}, under_construction(model)
    surveys = surveyed(model)
    safe = safe_masks(model, surveys)
    told: dict[type, list[Survey]] = {}
    for one in surveys.values():
        name = requested(one.config)
        if name is None and wanted.get(id(one.config)) not in NAMES:
            continue
        if any(type(outer.config) is type(one.config) for outer in around):
            continue
        if name is not None:
            give(one.config, name if one.used else "eager", safe.get(type(one.config)))
        if one.silent or one.config is model.config and not one.attends and not around:
            told.setdefault(type(one.model), []).append(one)
    for cls, parts in told.items():
        silent = {part for one in parts for part in one.silent}
        if any(one.used for one in parts):
            strays = sorted({part.__name__ for part, does in silent if does.attends and (does.masked or named(part))})
            if strays:
                warn(cls, f"{', '.join(strays)} of {cls.__name__}, which do")
        else:
            warn(cls, f"{cls.__name__}, whose code does")


def give(config: Any, name: str, masks: Masks | None) -> None:
    """Write the name, and mark the config with the masks that are safe under it."""
    name = name[:1] + name[1:]  # as an object of its own
    config._attn_implementation_internal = name
    if masks is not None:
        setattr(config, MASKS, masks._replace(name=name))


def safe_masks(model: Any, surveys: dict[int, Survey]) -> dict[type, Masks]:
    """The masks that all attention takes beneath the configs of a class, in the model and those that share its configs.

    Classes with attention that would mistake all but eager's masks have none.
    """
    used = {key for key, one in surveys.items() if one.used}
    by_class: dict[type, list[Survey]] = {}
    for one in (surveys, *(surveyed(other) for other in sharing(model, used))):
        for key in used & one.keys():
            by_class.setdefault(type(one[key].config), []).append(one[key])
    return {
        cls: Masks("", all(True in one.causal for one in alike), all(False in one.causal for one in alike))
        for cls, alike in by_class.items()
        if not any(one.unsafe for one in alike)
    }


def sharing(model: Any, configs: set[int]) -> list[PreTrainedModel]:
    """The models outside of a model that hold one of these configs, by their ids."""
    within = set(model.modules())
    return [other for other in list(_models) if other not in within and configs & configs_of(other).keys()]


def configs_of(model: Any) -> dict[int, PretrainedConfig]:
    """The configs that the modules of a model hold, by id."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return {id(config): config for config in configs if isinstance(config, PretrainedConfig)}


def surveyed(model: Any) -> dict[int, Survey]:
    """{id of config: what is beneath it} for the configs that a model holds."""
    surveys: dict[int, Survey] = {}
    survey(model, (), (), surveys)
    return surveys


def survey(module: Any, models: tuple[Any, ...], configs: tuple[Any, ...], surveys: dict[int, Survey]) -> bool:
    """Fill in what is beneath each config, and say whether it is attention.

    `models` and `configs` are those around the module, the nearest last.
    """
    if isinstance(module, PreTrainedModel):
        models = (*models, module)
    config = getattr(module, "config", None)
    if isinstance(config, PretrainedConfig) and models:
        configs = (*(known for known in configs if known is not config), config)
        if id(config) not in surveys:
            alike = (outer for outer in models if type(outer.config) is type(config))
            surveys[id(config)] = Survey(config, next(alike, models[-1]))
    beneath = False
    for child in module.children():
        beneath |= survey(child, models, configs, surveys)
    cls, does = type(module), kind(module)
    if stranger(cls) and does.masked and not (does.calls or beneath):
        does = does._replace(attends=True)  # in words that are not known for it
    if does.calls or does.attends or named(cls):
        used = does.calls and requested(configs[-1]) is not None
        for known in configs:
            outer = surveys[id(known)]
            outer.attends = True
            outer.used |= used
            if used:
                outer.causal.add(bool(getattr(module, "is_causal", True)))
            outer.unsafe |= does.masked and does.attends or does.calls and not (used and takes_bool(module, models))
        if not does.calls:
            surveys[id(configs[-1])].silent.add((cls, does))
    return beneath or does.calls or does.attends


def takes_bool(module: Any, models: tuple[Any, ...]) -> bool:
    """Whether attention says what None means, and the models of its config that masks may be others than eager's."""
    kinds = ("_supports_sdpa", "_supports_flex_attn", "_supports_flash_attn")
    alike = [model for model in models if type(model.config) is type(models[-1].config)]
    return hasattr(module, "is_causal") and all(any(getattr(model, name, 0) for name in kinds) for model in alike)


def warn(cls: type, where: str) -> None:
    """Warn, once for a class of models, that its attention, or some of it, is not ours."""
    if cls not in _warned:
        _warned.add(cls)
        warnings.warn(
            f"fusedattn is not used in {where} not call transformers' AttentionInterface: it computes what it does "
            'with attn_implementation="eager"',
            stacklevel=2,
        )
