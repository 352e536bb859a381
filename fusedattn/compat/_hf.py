"""Choice of the Hugging Face models that use fusedattn, and of the masks that they get.

The flag `_supports_attention_backend` is unreliable: BART, T5 and Whisper call transformers' attention interface
without it, and Gemma 3n has it but also computes attention itself. So the code of attention modules is searched for a
few names. A model that asks for a registered name, such as "fusedattn", is built as "eager". Then each of its configs
gets the name if at least one of its attention modules calls the interface; otherwise it stays "eager", with a warning.
The config gets bool masks if all its attention modules call the interface and its models accept sdpa's masks, otherwise
eager's. With masks="blocks", models that accept FlexAttention's BlockMask get plans, because they do not read masks.
"""

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, eager_mask, sdpa_mask

from ..call import bits
from ..call.options import Plan
from ..dispatch import backends
from ._hf_names import MASKS, NAMES, REFUSED, masks_of

if not hasattr(PreTrainedModel, "_check_and_adjust_attn_implementation"):
    raise ImportError("transformers before 4.54 chooses attention in another way")

# Names in code that computes attention itself. Any softmax matches. A wrong match costs a warning or slower masks.
_ATTENDS = re.compile(
    r"(?i:softmax)(?!_(in|scale|dtype))|logsumexp|scaled_dot_product|sdpa_attention|flash_attention_forward"
    r"|flash_attn_(varlen_)?func|multi_?head_attention_forward|^MultiheadAttention$|flex_attention$"
)
_FLAGS = "_supports_sdpa", "_supports_flex_attn", "_supports_flash_attn"
_SPARSE = frozenset(REFUSED) - {"head_mask"}  # refused keywords for which models always pass a tensor, never None
_TRUSTED_WRAPPERS = "torch.", "transformers.utils.", "transformers.integrations.", "accelerate."
_models: WeakSet[PreTrainedModel] = WeakSet()  # all models that `_settle` has seen
_warned: set[type] = set()


class _Attention(NamedTuple):
    root: Any  # the outermost model
    configs: tuple[Any, ...]  # the configs of the models around the attention module, the nearest last
    stray: str  # the module's class name if it does not call the attention interface, or ""
    sparse: bool  # the module passes a keyword that fusedattn refuses
    causal: bool  # the module's is_causal
    used: bool  # the module calls the interface, and its nearest config asks for a registered name
    safe: bool  # used, and the model takes bool masks
    opaque: bool  # the model takes masks that are no tensors


class MaskPlan(Plan):
    """A Plan that generate() accepts as a mask for static caches, because it has ndim and contiguous()."""

    ndim = 4

    def contiguous(self) -> "MaskPlan":
        return self


def install(name: str, forward: Callable[..., Any], masks: str) -> None:
    """Register `forward` under `name`, and patch transformers so that each model that asks for the name is checked."""
    if not NAMES:
        _follow(PreTrainedModel, "_check_and_adjust_attn_implementation", _postpone)
        for method in ("init_weights", "from_pretrained", "_from_config"):  # some models never call init_weights
            _follow(PreTrainedModel, method, _settle_built)
        _follow(PreTrainedModel, "set_attn_implementation", _settle_again)
        for method in ("to_dict", "to_diff_dict"):
            _follow(PretrainedConfig, method, lambda _, saved, *__, **___: {x: saved[x] for x in saved if x != MASKS})
    NAMES[name] = masks
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, attention_mask)


def _follow(cls: type, name: str, after: Callable[..., Any]) -> None:
    """Patch the method `name` of a class, so that it returns after(self, original result, *arguments)."""
    static = inspect.getattr_static(cls, name)
    original = getattr(static, "__func__", static)

    @functools.wraps(original)
    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        return after(self, original(self, *arguments, **options), *arguments, **options)

    setattr(cls, name, method if static is original else classmethod(method))


def attention_mask(*sizes: Any, config: Any = None, **options: Any) -> Any:
    """Return sdpa's bool mask, None or a plan if the config's attention accepts them, else eager's floating mask."""
    if isinstance(options.get("attention_mask"), MaskPlan):  # generate() made it before the forward
        return options["attention_mask"]
    if (masks := masks_of(config)) is None:
        return eager_mask(*sizes, config=config, **options)
    # Layers that share keys may compute only the last rows. Only their slice of the mask tells which rows these are.
    sliced = getattr(config, "num_kv_shared_layers", False)
    if not masks[0] or sliced:
        options["allow_is_causal_skip"] = False
    if not masks[1]:
        options["allow_is_bidirectional_skip"] = False
    if masks[2] and not sizes and not sliced and NAMES.get(config._attn_implementation) == "blocks":
        return _plan(options)
    return sdpa_mask(*sizes, config=config, **options)


def _plan(options: dict[str, Any]) -> Any:
    """Return a plan of sdpa's mask, made in parts; the mask itself for one row or key; None if sdpa makes no mask."""
    positions = options.get("cache_position")  # transformers 4 passes it, later versions q_offset and q_length
    batch, keys = options["batch_size"], options["kv_length"]
    rows = options["q_length"] if positions is None else positions.shape[0]
    everything = dict(mask_function=lambda b, h, i, j: b >= 0, use_vmap=False)
    if rows == 1 or keys == 1:
        return sdpa_mask(**options)
    if sdpa_mask(**options | everything) is None:  # sdpa would leave out the mask; this test takes no memory
        return None

    def pairs(batches: slice, _: slice, rows: slice, keys: slice) -> Any:
        function, padding = options.get("mask_function", causal_mask_function), options.get("attention_mask")
        part = dict(batch_size=batches.stop - batches.start, kv_length=keys.stop - keys.start)
        part |= dict(kv_offset=options.get("kv_offset", 0) + keys.start)
        part |= dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        start = batches.start  # in a closure, torch.compile would guard on the whole slice
        part |= dict(mask_function=lambda b, *at: function(b + start, *at))
        part |= dict(attention_mask=None if padding is None else padding[batches])
        if positions is None:
            part |= dict(q_length=rows.stop - rows.start, q_offset=options.get("q_offset", 0) + rows.start)
        else:
            part |= dict(cache_position=positions[rows])
        return sdpa_mask(**options | part)

    device = torch.device(options.get("device", "cpu")) if positions is None else positions.device
    shape = batch, 1, rows, keys
    block_mask, mask_bits = bits.pack(pairs, shape, backends.block_size(device) or bits.BLOCK, device)
    return MaskPlan(block_mask, mask_bits, None, None, shape)


def _postpone(model: Any, name: Any, asked: Any = None, is_init_check: bool = False, *_: Any, **__: Any) -> Any:
    """Return "eager" in place of a registered name while a model is built. Its config keeps the name for `_settle`."""
    if is_init_check and name in NAMES:
        setattr(model.config, MASKS, name)
        model._asks_for_fusedattn, name = True, "eager"
    return name


def _settle_built(model: Any, result: Any, *_: Any, **__: Any) -> Any:
    built = result[0] if isinstance(result, tuple) else result  # init_weights returns None
    _settle(model if built is None else built)
    return result


def _settle_again(model: Any, result: Any, attn_implementation: Any, *_: Any, **__: Any) -> Any:
    for config in _configs(model).values():
        vars(config).pop(MASKS, None)
    _settle(model, isinstance(attn_implementation, str) and attn_implementation in NAMES)
    return result


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _function(method: Any, module: Any = None) -> Any:
    """Return a method's function without trusted wrappers; None for other objects and methods of another nn.Module."""
    while getattr(method, "__self__", module) is module:
        within = getattr(method, "__func__", None) or getattr(method, "__wrapped__", None)
        wrapper = getattr(method, "func", method)  # accelerate's wrappers are partials
        name = getattr(wrapper, "__globals__", {}).get("__name__", "")
        if within is None or not (name.startswith(_TRUSTED_WRAPPERS) or hasattr(method, "__func__")):
            return method if isinstance(method, FunctionType) else None
        method = within


@functools.cache
def _read(kind: Any, runs: Any, forwards: tuple[FunctionType, ...], beneath: bool) -> tuple[bool, bool, bool]:
    """Read a module's code. Return (calls transformers' attention interface, computes attention itself, is sparse)."""
    # runs: the function that runs as forward. forwards: the forwards of class `kind` and its bases. If `runs` is one of
    # them, the methods of these classes are read, too. beneath: the module contains other attention modules.
    functions, stranger = [runs] if runs else [], True
    if runs in forwards:
        rest = forwards[forwards.index(runs) :]
        last = next((x for x in rest if "super" not in x.__code__.co_names), forwards[-1])
        stranger = not last.__globals__["__name__"].startswith("transformers.")
        for cls in kind.__mro__:
            functions += [x for member in vars(cls).values() if (x := _function(member))]
            if _function(vars(cls).get("forward")) is last:
                break
    used = set[str]().union(*(_names(x.__code__) for x in functions))  # every name that the functions refer to
    asks = any(isinstance(x.__globals__.get(name), AttentionInterface) for x in functions for name in used)
    # Tuples among the constants hold the keywords of calls. A wrong match only costs speed, and a warning.
    keywords = (each for x in functions for each in x.__code__.co_consts if isinstance(each, tuple))
    sparse = asks and any(_SPARSE.intersection(each) for each in keywords)
    calls = asks and "_attn_implementation" in used and not sparse
    named = any("Attention" in cls.__name__ and not cls.__module__.startswith("torch.") for cls in kind.__mro__)
    masked = any("mask" in name for x in functions for name in x.__code__.co_varnames[: x.__code__.co_argcount])
    computes = (named or masked) and any(map(_ATTENDS.search, used))
    return calls, computes or named and stranger and not calls and not beneath, sparse


def _attentions(module: Any, models: Any = (), configs: Any = ()) -> Iterator[_Attention]:
    models = (*models, module) if isinstance(module, PreTrainedModel) else models
    config = getattr(module, "config", None)
    configs = (*configs, config) if isinstance(config, PretrainedConfig) else configs
    beneath = [x for child in module.children() for x in _attentions(child, models, configs)]
    yield from beneath
    if isinstance(module, PreTrainedModel):  # a softmax in its own code may be that of its loss
        return
    kind: Any = type(module)
    forwards = tuple(x for cls in kind.__mro__ if (x := _function(vars(cls).get("forward"))))
    calls, computes, sparse = _read(kind, _function(module.forward, module), forwards, bool(beneath))
    if calls or computes or sparse:
        # A model's flags say that it takes bool masks; a module's is_causal says whether no mask means causal.
        flagged = [x for x in models if type(x.config) is type(models[-1].config)]
        able = hasattr(module, "is_causal") and all(any(getattr(x, flag, 0) for flag in _FLAGS) for x in flagged)
        opaque = all(getattr(x, "_supports_flex_attn", False) for x in flagged)
        causal, used = bool(getattr(module, "is_causal", True)), calls and _wanted(configs[-1]) is not None
        stray = "" if calls else kind.__name__
        yield _Attention(models[0], configs, stray, sparse, causal, used, used and able and not computes, opaque)


def _configs(model: Any) -> dict[int, Any]:
    configs = (getattr(module, "config", None) for module in model.modules())
    return {id(config): config for config in configs if isinstance(config, PretrainedConfig)}


def _wanted(config: Any) -> str | None:
    """Return the registered name that a config asks for, or asked for before its model was built; otherwise None."""
    pending = getattr(config, MASKS, None)
    name = pending if isinstance(pending, str) else config._attn_implementation
    return name if name in NAMES else None


def _settle(model: Any, everywhere: bool = False) -> None:
    """Set the attention of each config that asks for one of NAMES: to that name, or to "eager" with a warning."""
    # everywhere: also warn about configs that did not ask.
    _models.add(model)
    configs = _configs(model)
    asks = vars(model).pop("_asks_for_fusedattn", everywhere)  # submodels of a model that is being built lack it
    if not asks and not any(config._attn_implementation in NAMES for config in configs.values()):
        return
    within = set(model.modules())
    sharing = [other for other in list(_models) if other not in within and configs.keys() & _configs(other).keys()]
    attentions = [x for root in (model, *sharing) for x in _attentions(root)]
    for config in configs.values():
        beneath = [x for x in attentions if any(each is config for each in x.configs)]
        nearest = [x for x in beneath if x.configs[-1] is config]
        # All attention modules of a config get the same name, and fusedattn refuses sparse attention.
        used = any(x.used for x in beneath) and not any(x.sparse for x in nearest)
        if name := _wanted(config):
            config._attn_implementation_internal = name if used else "eager"
            vars(config).pop(MASKS, None)
            if used and all(x.safe for x in beneath):
                kinds = [{x.causal for x in beneath if x.root is root} for root in {x.root for x in beneath}]
                one_kind = [all(causal in each for each in kinds) for causal in (True, False)]
                setattr(config, MASKS, (*one_kind, all(x.opaque for x in beneath)))
        strays = {x.stray for x in nearest if x.stray}
        if not (name or everywhere) or (used and not strays):
            continue
        alike = (x for x in model.modules() if isinstance(x, PreTrainedModel) and type(x.config) is type(config))
        cls = type(next(alike, model))
        if cls not in _warned:
            _warned.add(cls)
            where = f"{', '.join(sorted(strays))} of {cls.__name__}, which" if used else f"{cls.__name__}, whose code"
            why = f"fusedattn is not used in {where} does not call transformers' AttentionInterface"
            warnings.warn(f'{why}: it computes as with attn_implementation="eager"', stacklevel=2)
