"""Which parts of a Hugging Face model call the attention interface, and what becomes of those that do not.

A model that asks for a name of ours is built as an "eager" one. Once it stands, its modules are read: a config beneath
which some attention calls the interface gets the name, as `set_attn_implementation` would give it; any other stays
"eager", and its model is warned about. Masks are bool, or None for plain causality, only where every attention that
could be handed them calls the interface. Everywhere else they are eager's, right for all but as large as the scores.
Which of the two is a mark on the config itself: another of the same class may serve another model.
"""

import functools
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
        for method, wrapper in (
            ("_check_and_adjust_attn_implementation", _checking),
            ("init_weights", _settling_when_built),
            ("set_attn_implementation", _settling_when_set),
        ):
            setattr(PreTrainedModel, method, wrapper(getattr(PreTrainedModel, method)))
        for method in ("from_pretrained", "_from_config"):
            setattr(
                PreTrainedModel, method, classmethod(_settling_when_made(getattr(PreTrainedModel, method).__func__))
            )
        for method in ("to_dict", "to_diff_dict"):  # a config with a to_dict of its own may not call ours
            setattr(PretrainedConfig, method, _without_masks(getattr(PretrainedConfig, method)))
    NAMES.add(name)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, attention_mask)


def attention_mask(*sizes: Any, config: Any = None, **options: Any) -> Any:
    """`sdpa_mask` for the configs that were found to be safe with it, `eager_mask` for all others."""
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


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def check(self: Any, attn_implementation: Any, is_init_check: bool = False, **options: Any) -> Any:
        found = original(self, attn_implementation, is_init_check, **options)
        return Requested(found) if is_init_check and found in NAMES else found

    return check


def _settling_when_built(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_weights(self: Any, *arguments: Any, **options: Any) -> Any:
        done = original(self, *arguments, **options)
        settle(self)
        return done

    return init_weights


def _settling_when_made(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the classes, of transformers 4, whose `__init__` does not end in `init_weights`."""

    @functools.wraps(original)
    def make(cls: Any, *arguments: Any, **options: Any) -> Any:
        made = original(cls, *arguments, **options)
        settle(made[0] if isinstance(made, tuple) else made)
        return made

    return make


def _settling_when_set(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_attn_implementation(self: Any, attn_implementation: Any, *arguments: Any, **options: Any) -> Any:
        done = original(self, attn_implementation, *arguments, **options)
        wanted = dict(wishes(self.config, attn_implementation))
        if NAMES.intersection(wanted.values()):
            settle(self, wanted)
        return done

    return set_attn_implementation


def _without_masks(original: Callable[..., Any]) -> Callable[..., Any]:
    """What is saved says nothing of what was found here."""

    @functools.wraps(original)
    def listed(self: Any, *arguments: Any, **options: Any) -> Any:
        done = original(self, *arguments, **options)
        done.pop(MASKS, None)
        return done

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
    """What was found beneath a config: in the modules that hold it, and all within them."""

    config: Any
    model: Any  # the outermost of its class of configs, to which a warning is due
    found: bool = False  # attention of any kind
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
    for each in surveys.values():
        name = requested(each.config)
        if name is None and wanted.get(id(each.config)) not in NAMES:
            continue
        if any(type(outer.config) is type(each.config) for outer in around):
            continue
        if name is not None:
            give(each.config, name if each.used else "eager", safe.get(type(each.config)))
        if each.silent or each.config is model.config and not each.found and not around:
            told.setdefault(type(each.model), []).append(each)
    for cls, parts in told.items():
        silent = {part for each in parts for part in each.silent}
        if any(each.used for each in parts):
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
    used = {key for key, each in surveys.items() if each.used}
    found: dict[type, list[Survey]] = {}
    for each in (surveys, *(surveyed(other) for other in sharing(model, used))):
        for key in used & each.keys():
            found.setdefault(type(each[key].config), []).append(each[key])
    return {
        cls: Masks("", all(True in each.causal for each in alike), all(False in each.causal for each in alike))
        for cls, alike in found.items()
        if not any(each.unsafe for each in alike)
    }


def sharing(model: Any, configs: set[int]) -> list[PreTrainedModel]:
    """The models outside of one that hold one of these configs, given by id."""
    within = set(model.modules())
    return [other for other in list(_models) if other not in within and configs & configs_of(other).keys()]


def configs_of(model: Any) -> dict[int, PretrainedConfig]:
    """The configs that the modules of a model hold, by id."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return {id(config): config for config in configs if isinstance(config, PretrainedConfig)}


def surveyed(model: Any) -> dict[int, Survey]:
    """What is beneath each config that a model holds, by id."""
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
            found = surveys[id(known)]
            found.found = True
            found.used |= used
            if used:
                found.causal.add(bool(getattr(module, "is_causal", True)))
            found.unsafe |= does.masked and does.attends or does.calls and not (used and takes_bool(module, models))
        if not does.calls:
            surveys[id(configs[-1])].silent.add((cls, does))
    return beneath or does.calls or does.attends


def takes_bool(module: Any, models: tuple[Any, ...]) -> bool:
    """Whether attention says what None means, and the models of its config that masks may be others than eager's."""
    kinds = ("_supports_sdpa", "_supports_flex_attn", "_supports_flash_attn")
    alike = [model for model in models if type(model.config) is type(models[-1].config)]
    return hasattr(module, "is_causal") and all(any(getattr(model, name, 0) for name in kinds) for model in alike)


def warn(cls: type, where: str) -> None:
    """Say once for each class of models that it, or some of it, is not ours."""
    if cls not in _warned:
        _warned.add(cls)
        warnings.warn(
            f"fusedattn is not used in {where} not call transformers' AttentionInterface: it computes what it does "
            'with attn_implementation="eager"',
            stacklevel=2,
        )
