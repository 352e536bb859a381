"""Replay of an earlier call with the same signature, from its recording, on new tensors.

Two calls have the same signature if only the addresses and the contents of their tensors differ. Calls under autocast,
inside torch.compile or with tensor subclasses are not replayed: they are checked each time, and operators/repeats.py
repeats their launches. On a CPU a repeated call only skips its checks.
"""

import functools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..call import options as of_calls
from ..call.checks import CLASSES, check_flags, in_memory, must_dispatch, plain
from ..call.options import INPUTS, TENSORS, Arguments, Call, Plan, in_full, thread_overrides
from ..call.private import TensorGuards, any_autocast, can_guard, can_replay, dispatch_modes, forward_level
from ..call.rules import checked
from ..launch import tile_table
from ..launch.failures import failed_kernels
from ..operators import attention, backward, dtensors, repeats, schema
from . import backends

RECENT = 8  # limit on the Replays in each list of `_recent`, and on the backwards that a Replay keeps

_NUMBERS = frozenset((int, float, bool, str, type(None)))
_PLACES = {name: place for place, name in enumerate(TENSORS)}
# Getters of the tensors of an Arguments, in the order of TENSORS, and of its other fields.
_WRITTEN = [name for name in TENSORS if name in Arguments._fields]
_take_tensors = itemgetter(*map(Arguments._fields.index, _WRITTEN))
_take_numbers = itemgetter(*(place for place, name in enumerate(Arguments._fields) if name not in TENSORS))
_NOT_WRITTEN = (None,) * (len(TENSORS) - len(_WRITTEN))
_SEED = _PLACES["seed"]
_MARKS = "block_mask", "mask_bits"  # made from the masks of a call, or from a plan

_known = repeats.Learned()  # {signature: its Replay or Checked}
_kinds: set[tuple] = set()  # types of options that `_usual` accepted; not kept if one is a tuple, whose items it checks
_recent = repeats.Learned()  # {a signature without tensor properties: [(TensorGuards, Replay)]}


def forget() -> None:
    """Forget all recordings, and which tiles fit the device."""
    tile_table.fitting.clear()
    _known.clear()
    _recent.clear()
    repeats.forget()


def attend(arguments: Arguments, return_lse: bool, return_weights: bool, backend: str | None) -> Tensor | Any:
    """Compute `attention`: replay an earlier call with the same signature, or check the arguments and run the call."""
    named = thread_overrides.backend if backend is None else backend
    if not is_compiling():
        tensors, shape = _take_tensors(arguments) + _NOT_WRITTEN, None
        if isinstance(arguments.mask, Plan) and arguments.key_mask is arguments.query_mask is None:
            tensors, shape = _of_plan(arguments), arguments.mask.shape
        numbers = *_take_numbers(arguments), shape, return_lse, return_weights, named, torch.is_grad_enabled()
        if (replay := find(tensors, numbers)) is not None:
            return replay(tensors)
    check_flags(return_lse=return_lse, return_weights=return_weights)
    call, rank = checked(arguments, named is not None), arguments.query.dim()
    direct = plain(call)
    if not direct and (own := dtensors.local_call(call, arguments.seed)) is not None:
        out, lse, weights = backends.choose(own.call, return_weights, named).run(own.call, return_lse, return_weights)
        return results(rank, own.whole(out, True), own.whole(lse), own.whole(weights))
    chosen = backends.choose(call, return_weights, named)
    learned = direct and learn(tensors, numbers, call, chosen)
    if isinstance(learned, Checked):
        return learned((*tensors[:_SEED], call.seed, *tensors[_SEED + 1 :]))
    return results(rank, *chosen.run(call, return_lse, return_weights, learned))


def results(rank: int, *results: Tensor | None) -> Tensor | Any:
    """Return the results that are not None, squeezed to the rank of query, as a tuple if there are several."""
    wanted = [x for x in results if x is not None]
    wanted = [x.squeeze(1) if rank == 3 else x.squeeze((0, 1)) for x in wanted] if rank < 4 else wanted
    return tuple(wanted) if len(wanted) > 1 else wanted[0]


def _of_plan(arguments: Arguments) -> tuple:
    """Return the tensors of a call whose mask is a Plan (from `fusedattn.plan`), in the order of TENSORS."""
    written = dict(zip(_WRITTEN, _take_tensors(arguments), strict=True)) | dict(mask=None)
    written |= {name: getattr(arguments.mask, name) for name in (*_MARKS, "key_mask", "query_mask")}
    return tuple([written.get(name) for name in TENSORS])


def _usual(numbers: tuple) -> bool:
    """Return whether all options are plain Python values, not tensors or arrays, whose values may change."""
    for x in numbers:
        if type(x) not in _NUMBERS and not (type(x) is tuple and all(side is None or type(side) is int for side in x)):
            return False
    if not any(type(x) is tuple for x in numbers):
        _kinds.add(tuple(map(type, numbers)))
    return True


def _split(tensors: tuple, numbers: tuple) -> tuple[tuple, tuple] | None:
    """Return (tensors that are not None, signature without their properties); None if a call cannot be replayed."""
    # numbers: the arguments that are no tensors, return_lse, return_weights, the named backend and whether autograd
    # records. Their types count too, because True, 1 and 1.0 are equal.
    present: tuple
    query, key, value, *options = tensors
    kinds = tuple(map(type, numbers))
    if type(query) not in CLASSES or (kinds not in _kinds and not _usual(numbers)):
        return None
    present, there = (query, key, value), None
    for x in options:
        if x is not None:
            seed = tensors[_SEED]
            if not (seed is None or isinstance(seed, Tensor) or (type(seed) is int and -(2**63) <= seed < 2**63)):
                return None
            present, there = tuple([x for x in tensors if isinstance(x, Tensor)]), tuple(map(type, tensors))
            break
    return present, (numbers, kinds, repeats.precision(query), thread_overrides.deterministic, there)


def _signature(present: tuple, most: tuple) -> tuple | None:
    if any_autocast() or not repeats.aligned(present):
        return None
    facts = [(x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_inference()) for x in present]
    return (*most, tuple(facts))


def _guards(present: tuple) -> Any:
    """Return TensorGuards that match these tensors; None if a tensor occurs twice, which guards do not support."""
    # Guards also compare dispatch keys, so autocast, transforms, modes, wrappers and negated views never match.
    if TensorGuards is None or len(set(map(id, present))) < len(present):
        return None
    return TensorGuards(*present, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _remember(present: tuple, most: tuple, replay: Any) -> None:
    if (guards := _guards(present)) is not None:
        _recent.keep(most, [(guards, replay), *_recent.get(most, [])[: RECENT - 1]])


def find(tensors: tuple, numbers: tuple) -> Any:
    """Return the Replay or Checked of a call, or None. tensors: in the order of TENSORS; the seed may be an int."""
    # TensorGuards do not notice tangents and some modes, such as selective checkpointing.
    if not _known or dispatch_modes() != 0 or forward_level() >= 0:
        return None
    if (split := _split(tensors, numbers)) is None or not can_guard(split[0]):  # key or value may be anything
        return None
    present, most = split
    for guards, replay in _recent.get(most, ()):
        if guards.check(*present):
            return replay if repeats.aligned(present) else None
    signature = None if must_dispatch() or not in_memory(present) else _signature(present, most)
    replay = _known.get(signature)
    if not isinstance(replay, Checked):
        return None
    _remember(present, most, replay)
    return replay


def learn(tensors: tuple, numbers: tuple, call: Call, chosen: backends.Backend) -> Any:
    """Return a Replay (on a CPU: Checked) for the RECORD_AFTER-th plain call with a signature.

    Return True for a call before that, or if its launches cannot be recorded, and False for a call without signature.
    """
    kernels = chosen.name in schema.KERNELS
    split = _split(tensors, numbers) if can_replay and (kernels or call.query.device.type == "cpu") else None
    if split is None or (signature := _signature(*split)) is None:
        return False
    of_call = tensors, numbers, call, chosen
    replay = _known.learn(signature, functools.partial(Replay.of if kernels else Checked, *of_call))
    if replay is None:
        return True
    _remember(*split, replay)
    return replay


class Checked:
    """A checked call on a CPU. Later calls of its signature run with new tensors, without checks."""

    def __init__(self, tensors: tuple, numbers: tuple, call: Call, chosen: backends.Backend):
        self.device, self.drops, self.rank = call.query.device, call.seed is not None, tensors[0].dim()
        pairs: Any = zip(tensors, of_calls.tensors(call), strict=True)
        # A seed may be given without dropout, and then the Call has none.
        short = [isinstance(x, Tensor) and of_call is not None and x.dim() != of_call.dim() for x, of_call in pairs]
        self.short = [(place, name) for place, name in enumerate(TENSORS) if short[place]]
        self.chosen, self.needs, self.others = chosen, numbers[-4:-2], call[len(TENSORS) :]

    def in_full(self, tensors: Sequence) -> list:
        """Return tensors as a Call needs them: full rank; seed as a tensor, or None without dropout."""
        given = list(tensors)
        for place, name in self.short:
            given[place] = in_full(name, given[place])
        given[_SEED] = of_calls.seed_tensor(given[_SEED], self.device) if self.drops else None
        return given

    def __call__(self, tensors: tuple):
        return results(self.rank, *self.chosen.run(Call(*self.in_full(tensors), *self.others), *self.needs, True))


class Replay(Checked):
    """The recorded launches of one call signature, and of its latest backwards."""

    @staticmethod
    def of(tensors, numbers, call, chosen):
        """Return the Replay of a call; None if its launches cannot be recorded, 0 if those of a later call may be."""
        return_lse, return_weights, _, grad = numbers[-4:]
        save = grad and any(x is not None and x.requires_grad for x in of_calls.inputs(call))
        options = return_lse, return_weights, save, chosen.name
        found = repeats.record(call, (), functools.partial(attention.record, options, save))
        return found and Replay(tensors, numbers, call, chosen, save, *found)

    def __init__(self, tensors, numbers, call, chosen, save, recording, made):
        super().__init__(tensors, numbers, call, chosen)
        self.save, self.recording = save, recording
        self.out, self.lse, self.weights, self.stats, *marks = made
        given = [name for name in TENSORS if getattr(call, name) is not None]
        self.places = {name: place for place, name in enumerate(given)} | dict(zip(_MARKS, marks, strict=True))
        self.results = [place for place in (self.out, self.lse, self.weights) if place is not None]
        self.inputs = [name for name in INPUTS if name in given]
        of_call = [place for place in self.places.values() if place is not None]
        self.kept = [*of_call, *[place for place in (self.out, self.weights, self.stats) if place is not None]]
        self.count = len(of_call)  # number of saved tensors of the call; saved results follow
        self.take_given = itemgetter(*[_PLACES[name] for name in given])
        of_inputs = [self.places[name] for name in self.inputs]
        places = self.results, of_inputs, self.kept
        self.take_results, self.take_inputs, self.take_kept = (itemgetter(*some) for some in places)
        self.facts: list = []  # `schema.facts` of the tensors saved for the backward, from the first forward
        self.backwards: list[tuple] = []  # (settings, TensorGuards, Recording, places of gradients)

    def __call__(self, tensors: tuple):
        if self.drops or (self.short and (self.save or self.rank < 4)):  # checkpoints compare what is saved
            tensors = tuple(self.in_full(tensors))
        given = self.take_given(tensors)
        if self.save:
            made = _differentiable((self, given), *self.take_inputs(given))
        else:
            made = self.take_results(self.recording.run(given))
        return made if self.rank == 4 else results(self.rank, *(made if isinstance(made, tuple) else (made,)))

    def again(self, saved: tuple, grads: tuple, need: tuple) -> list | None:
        """Replay an earlier backward of the same signature, if any. Return the gradients of the inputs, or None."""
        if torch.is_grad_enabled() or must_dispatch():
            return None
        present, settings = self._of_backward(saved, grads, need)
        for known, guards, recording, places in self.backwards:
            if known == settings and guards.check(*present) and repeats.aligned(present):
                made = recording.run(present)
                return [None if place is None else made[place] for place in places]
        return None

    def _of_backward(self, saved, grads, need):
        """Return (tensors of a backward in the order of recording, settings that also select its launches)."""
        there = [x is not None for x in grads]
        present = *saved[: self.count], *[x for x in grads if x is not None], *saved[self.count :]
        return present, (there, need, repeats.precision(saved[0]), torch.are_deterministic_algorithms_enabled())

    def differentiate(self, saved: tuple, grads: tuple, need: tuple) -> list:
        """Return the gradients of the inputs, and keep the recording of this backward, if there is one, for `again`."""
        schema.check_saved(self.facts, schema.facts(saved))
        kept, came = (dict(zip(*pair, strict=True)) for pair in ((self.kept, saved), (self.results, grads)))
        given: Any = [kept.get(self.places.get(name)) for name in TENSORS]
        call = Call(*given, *self.others)
        incoming = [came.get(place) for place in (self.out, self.lse, self.weights)]
        needed, failed = dict(zip(self.inputs, need, strict=True)), len(failed_kernels)
        results = kept[self.out], kept.get(self.weights), kept[self.stats]
        arguments = incoming, *results, call, self.chosen.name, [needed.get(name, False) for name in INPUTS]
        gradients = dict(zip(INPUTS, backward.gradients(*arguments), strict=True))
        if len(failed_kernels) > failed:
            forget()  # let the next forward choose the backend that this backward took
        elif not torch.is_grad_enabled() and (known := repeats.recorded(*backward.kind_of(*arguments))) is not None:
            (recording, places), (present, settings) = known, self._of_backward(saved, grads, need)
            if (guards := _guards(present)) is not None:
                of_inputs = [place for place, name in zip(places, INPUTS, strict=True) if name in needed]
                self.backwards = [(settings, guards, recording, of_inputs), *self.backwards[: RECENT - 1]]
        return [gradients[name] for name in self.inputs]


class _Differentiable(torch.autograd.Function):
    """Autograd node of a replayed call; `inputs` are the tensors that autograd tracks."""

    @staticmethod
    def forward(ctx, call, *inputs):
        replay, given = call
        tensors = replay.recording.run(given)
        ctx.replay = replay
        kept = replay.take_kept(tensors)
        ctx.save_for_backward(*kept)
        if not replay.facts:
            replay.facts = schema.facts(kept)
        if len(replay.results) > 1:
            ctx.set_materialize_grads(False)
        return replay.take_results(tensors)

    @staticmethod
    def backward(ctx, *grads):
        replay, need = ctx.replay, ctx.needs_input_grad[1:]
        if all(grad is None for grad in grads):
            return None, *[None] * len(need)
        saved = ctx.saved_tensors
        found = replay.again(saved, grads, need)
        return None, *(replay.differentiate(saved, grads, need) if found is None else found)


# The C++ `apply`. Python's `apply` also looks for functorch's wrappers, which never reach a replay.
_differentiable = super(torch.autograd.Function, _Differentiable).apply
