"""Finds the recording of an earlier call with the same signature, and replays it on new tensors.

Two calls have the same signature if only the addresses and the contents of their tensors differ. Calls under autocast,
inside torch.compile or with tensor subclasses have no signature: they are checked each time, and operators/repeats.py
repeats their launches. On a CPU a repeated call only skips its checks.
"""

import sys
from collections.abc import Sequence
from itertools import compress
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..call import options as of_calls
from ..call.options import ATTENDED, INPUTS, TENSORS, Arguments, Call, Plan, in_full, thread_overrides
from ..call.private import TensorGuards, any_autocast, can_guard, can_replay, dispatch_modes, forward_level
from ..call.rules import CLASSES, check_flags, checked, in_memory, must_dispatch, plain
from ..launch import tile_table
from ..launch.failures import KernelUnavailable, Unrecordable, fall_back
from ..operators import attention, backward, dtensors, repeats, schema
from . import backends

MAX_KEPT = 1024  # limit on kept signatures; then all are forgotten
RECENT = 8  # limit on the Replays in each list of `_recent`, and on the backwards that a Replay keeps

RECORDED = attention.run_triton, attention.run_hopper
_NUMBERS = frozenset((int, float, bool, str, type(None)))
_PLACES = {name: place for place, name in enumerate(TENSORS)}
# Getters of the tensors of an Arguments, in the order of TENSORS, and of its other fields.
_WRITTEN = [name for name in TENSORS if name in Arguments._fields]
_take_tensors = itemgetter(*map(Arguments._fields.index, _WRITTEN))
_take_numbers = itemgetter(*(place for place, name in enumerate(Arguments._fields) if name not in TENSORS))
_NOT_WRITTEN = (None,) * (len(TENSORS) - len(_WRITTEN))
_SEED = _PLACES["seed"]
_MARKS = "block_mask", "mask_bits"  # made from the masks of a call, or from a plan
_ARE_LEARNED = [name not in ATTENDED for name in INPUTS]

_known: dict[tuple, "Checked"] = {}  # {signature: its Replay or Checked}
_met: dict[tuple, int] = {}  # {signature that is not recorded yet: number of calls}
_kinds: set[tuple] = set()  # types of options that `_usual` accepts with any values: none is a tuple (a window)
_recent: dict[tuple, list] = {}  # {a signature without tensor properties: [(TensorGuards, Replay)]}


def forget() -> None:
    """Forget all recordings, and which tiles fit the device."""
    tile_table.fitting.clear()
    _known.clear()
    _met.clear()
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
        return results(rank, own.whole(out, True), own.whole(lse) if return_lse else None, own.whole(weights))
    chosen = backends.choose(call, return_weights, named)
    if direct and (replay := learn(tensors, numbers, call, chosen)) is not None:
        return replay((*tensors[:_SEED], call.seed, *tensors[_SEED + 1 :]))
    out, lse, weights = chosen.run(call, return_lse, return_weights, direct)
    return results(rank, out, lse if return_lse else None, weights)


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
    """Return whether all options have Python's own types, because the values of tensors and arrays may change."""
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
        _recent[most] = [(guards, replay), *_recent.get(most, [])[: RECENT - 1]]


def find(tensors: tuple, numbers: tuple) -> Any:
    """Return what `learn` made of a signature, or None. tensors: in the order of TENSORS; the seed may be an int."""
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
    replay = None if signature is None else _known.get(signature)
    if replay is not None:
        _remember(present, most, replay)
    return replay


def learn(tensors: tuple, numbers: tuple, call: Call, chosen: backends.Backend) -> Any:
    """Count a plain call. Return a Replay (on a CPU: Checked) of a signature's RECORD_AFTER-th call; otherwise None."""
    recorded = chosen.run in RECORDED
    split = _split(tensors, numbers) if can_replay and (recorded or call.query.device.type == "cpu") else None
    if split is None or call.query is not tensors[0]:
        return None
    present, most = split
    if (signature := _signature(present, most)) is None:
        return None
    if max(len(_known), len(_met)) >= MAX_KEPT:
        forget()
    _met[signature] = _met.get(signature, 0) + 1
    if _met[signature] < repeats.RECORD_AFTER:
        return None
    _met.pop(signature, None)  # another thread may have removed it
    try:
        replay = (Replay if recorded else Checked)(tensors, call, numbers, chosen.run)
    except Unrecordable:
        _met[signature] = -sys.maxsize
        return None
    except KernelUnavailable:
        return None  # the unrecorded call warns, and takes another backend
    _known[signature] = replay
    _remember(present, most, replay)
    return replay


class Checked:
    """A checked call on a CPU. Later calls of its signature run with new tensors, without checks."""

    def __init__(self, tensors: tuple, call, numbers: tuple, run):
        self.device, self.drops, self.rank = call.query.device, call.seed is not None, tensors[0].dim()
        pairs: Any = zip(tensors, of_calls.tensors(call), strict=True)
        # A seed may be given without dropout, and then the Call has none.
        short = [isinstance(x, Tensor) and of_call is not None and x.dim() != of_call.dim() for x, of_call in pairs]
        self.short = [(place, name) for place, name in enumerate(TENSORS) if short[place]]
        self.run, self.needs, self.others = run, numbers[-4:-2], call[len(TENSORS) :]

    def in_full(self, tensors: Sequence) -> list:
        """Return the tensors as a first call has them: the seed as a tensor, and all in full rank."""
        given = list(tensors)
        for place, name in self.short:
            given[place] = in_full(name, given[place])
        given[_SEED] = of_calls.seed_tensor(given[_SEED], self.device) if self.drops else None
        return given

    def __call__(self, tensors: tuple):
        return results(self.rank, *self.run(Call(*self.in_full(tensors), *self.others), *self.needs, True))


class Replay(Checked):
    """Recordings of one call signature: its forward, and a backward for each set of gradients that were needed."""

    def __init__(self, tensors: tuple, call, numbers: tuple, run):
        from ..launch import blocks
        from ..launch.recording import Recorder

        super().__init__(tensors, call, numbers, run)
        on_hopper = run is attention.run_hopper
        self.call = bare = of_calls.with_tensors(call, repeats.without_data(of_calls.tensors(call)))
        self.backend = "hopper" if on_hopper else "triton"
        return_lse, return_weights, _, grad = numbers[-4:]
        self.save = grad and any(x is not None and x.requires_grad for x in of_calls.inputs(call))
        with Recorder(self.device, of_calls.tensors(bare)) as recorder:
            bare = blocks.marked(bare) if self.save else bare
            made = attention.record(recorder, bare, (return_lse, return_weights, self.save, self.backend), on_hopper)
        self.out, self.lse, self.weights, self.stats = map(recorder.number, made)
        self.marks = {name: recorder.number(getattr(bare, name)) for name in _MARKS}
        self.results = [x for x in (self.out, self.lse, self.weights) if x is not None]
        self.inputs = [_PLACES[name] for name in INPUTS if getattr(bare, name) is not None]
        present = [_PLACES[name] for name in TENSORS if name not in _MARKS and getattr(bare, name) is not None]
        kept = *present, *self.marks.values(), self.out
        self.kept = [number for number in (*kept, self.weights, self.stats) if number is not None]
        places = self.results, self.inputs, self.kept
        self.take_results, self.take_inputs, self.take_kept = (itemgetter(*some) for some in places)
        self.facts: list = []  # `schema.facts` of the tensors saved for the backward, from the first forward
        self.forward = recorder.recording()
        self.backwards: dict[tuple, Any] = {}
        self.recent: list[tuple] = []  # (settings of a backward, its TensorGuards, Recording, places) for `again`

    def __call__(self, tensors: tuple):
        if self.drops or (self.save and self.short):  # save what a first call saves: checkpoints compare it
            tensors = tuple(self.in_full(tensors))
        if self.save:
            return _differentiable((self, tensors), *self.take_inputs(tensors))
        return self.take_results(self.forward.run(tensors))

    def fields(self, tensors: Sequence) -> Call:
        """Return the recorded Call with the caller's tensors in place of its own, reshaped if their rank is lower."""
        return of_calls.with_tensors(self.call, self.in_full(tensors))

    def differentiate(self, kept: dict, incoming: list, need: tuple) -> Sequence:
        """Return gradients of INPUTS, None where not needed. kept: {index in the recorded forward: saved tensor}."""
        tensors = [kept.get(self.marks.get(name, _PLACES[name])) for name in TENSORS]
        out, weights, stats = kept[self.out], kept.get(self.weights), kept[self.stats]
        if torch.is_grad_enabled() or must_dispatch() or incoming[0] is None or any(compress(need, _ARE_LEARNED)):
            return self._differentiate_slowly(kept, tensors, incoming, out, weights, stats, need)
        grad_out, grad_lse, grad_weights = incoming
        grad_out, stats = backward.readable(grad_out, self.call, self.backend), stats.contiguous()
        grad_lse = None if grad_lse is None else grad_lse.to(stats.dtype).contiguous()
        given = *tensors, grad_out, grad_lse, grad_weights, out, weights, stats
        there = tuple(x for x in given if x is not None)
        if not in_memory(there) or not repeats.aligned(there):
            return self._differentiate_slowly(kept, tensors, incoming, out, weights, stats, need)
        # Saved-tensor hooks may have changed strides or device.
        facts = tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in given)
        settings = repeats.precision(out), torch.are_deterministic_algorithms_enabled()
        recorded: Any = self.backwards.get(wanted := (need, facts, *settings), 0)
        if recorded == 0:
            schema.check_saved(self.facts, schema.facts(kept.values()))
            if len(self.backwards) >= RECENT:
                self.backwards.clear()
            try:
                recorded = self.backwards[wanted] = self._backward(given, need)
            except Unrecordable:
                recorded = self.backwards[wanted] = None
            except KernelUnavailable as why:
                forget()  # let the next forward choose the backend that the backward now takes
                fall_back(why, self.call.named)
                return self._differentiate_slowly(kept, tensors, incoming, out, weights, stats, need)
        if recorded is None:
            return self._differentiate_slowly(kept, tensors, incoming, out, weights, stats, need)
        recording, places = recorded
        usual = grad_lse is grad_weights is None and grad_out is incoming[0]
        if usual and (guards := _guards(there)) is not None:
            present = [_PLACES[name] in self.inputs for name in INPUTS]
            of_inputs, needed = (tuple(compress(each, present)) for each in (places, need))
            self.recent = [((needed, *settings), guards, recording, of_inputs), *self.recent[: RECENT - 1]]
        made = recording.run(there)
        return [None if place is None else made[place] for place in places]

    def again(self, present: tuple, need: tuple) -> list | None:
        """Replay the recorded backward whose TensorGuards match, and return gradients of inputs, or None."""
        # present: the saved tensors and, before the output, its gradient, the only incoming one. need: of all inputs.
        if torch.is_grad_enabled() or must_dispatch():
            return None
        settings = need, repeats.precision(present[0]), torch.are_deterministic_algorithms_enabled()
        for known, guards, recording, places in self.recent:
            if known == settings and guards.check(*present) and repeats.aligned(present):
                made = recording.run(present)
                return [None if place is None else made[place] for place in places]
        return None

    def _backward(self, given, need):
        """Record a backward: return the Recording, and the index of each input's gradient in the result of `run`."""
        from ..launch.recording import Recorder

        bare = repeats.without_data(given)
        *incoming, out, weights, stats = bare[len(TENSORS) :]
        call = of_calls.with_tensors(self.call, bare[: len(TENSORS)])
        with Recorder(self.device, [x for x in bare if x is not None]) as recorder:
            made = backward.record(recorder, incoming, out, weights, stats, call, self.backend, need)
        places = [recorder.number(x) if needed else None for x, needed in zip(made, need, strict=True)]
        return recorder.recording(), places

    def _differentiate_slowly(self, kept, tensors, incoming, out, weights, stats, need):
        schema.check_saved(self.facts, schema.facts(kept.values()))
        weights = out.new_empty(0) if weights is None else weights
        grads = backward.backward(*incoming, out, weights, stats, *self.fields(tensors), self.backend, list(need))
        triples = zip(grads, [tensors[_PLACES[name]] for name in INPUTS], need, strict=True)
        return [grad.reshape(x.shape) if needed else None for grad, x, needed in triples]


class _Differentiable(torch.autograd.Function):
    """Autograd node of a replayed call; `inputs` are the tensors that autograd tracks."""

    @staticmethod
    def forward(ctx, call, *inputs):
        replay, tensors = call
        tensors = replay.forward.run(tensors)
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
        replay, need_grads = ctx.replay, ctx.needs_input_grad
        if all(grad is None for grad in grads):
            return (None,) * len(need_grads)
        saved = ctx.saved_tensors
        if grads[0] is not None and all(grad is None for grad in grads[1:]):
            count = replay.kept.index(replay.out)
            present = *saved[:count], grads[0], *saved[count:]
            if (found := replay.again(present, need_grads[1:])) is not None:
                return None, *found
        tensors = dict(zip(replay.kept, saved, strict=True))
        came = dict(zip(replay.results, grads, strict=True))
        incoming = [came.get(number) for number in (replay.out, replay.lse, replay.weights)]
        needed = dict(zip(replay.inputs, need_grads[1:], strict=True))
        need = tuple([needed.get(_PLACES[name], False) for name in INPUTS])
        gradients = dict(zip(INPUTS, replay.differentiate(tensors, incoming, need), strict=True))
        return None, *[grad for name, grad in gradients.items() if _PLACES[name] in needed]


# The C++ `apply`. Python's `apply` also looks for functorch's wrappers, which never reach a replay.
_differentiable = super(torch.autograd.Function, _Differentiable).apply
