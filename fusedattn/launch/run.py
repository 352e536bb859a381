"""Launch of a kernel with the first tile that fits the device, or its recording. The grid must not be empty."""

import contextlib
import functools
import math
import sys
import threading

import torch
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

from ..call.options import BY_HEAD, AssumedGPU, Call, thread_overrides
from ..kernels import append, block_mask, combine, dbias, decode, dkdv, dq, forward, preprocess, sequences, tangent
from ..kernels.vocabulary.columns import PART
from ..kernels.vocabulary.memory import width
from ..kernels.weights import weights
from . import failures, hopper, launcher, tile_table, tuned
from .arguments import bounded, hides


def interpreting() -> bool:
    return knobs.runtime.interpret


if interpreting():
    from . import interpreter

    interpreter.repair()


recording = threading.local()  # its `recorder`, if any, gets the launches of this thread instead of the GPU


def current_recorder():
    return getattr(recording, "recorder", None)


def device_of(tensor):
    recorder = current_recorder()
    return (thread_overrides.gpu or tensor.device) if recorder is None else recorder.device


def full(like, shape, value):
    """Return a new tensor that is filled with a value, as `like.new_full` does. A replay makes it, too."""
    recorder = current_recorder()
    if recorder is None or not recorder.replayed:
        return like.new_full(shape, value)
    return recorder.make(like.new_empty(shape), value)


def run_kernel(name, programs, arguments, device, kind=None, last=True, **options):
    """Launch a kernel, or record the launch if this thread has a Recorder. kind: from `kind_of`, or None."""
    # Raise KernelUnavailable if it does not compile or load, OutOfResources if the tile does not fit and is not the
    # last.
    kernel, recorder, compiled = KERNELS[name], current_recorder(), None
    if not interpreting():
        kind = (name, device) if kind is None else kind
        if failures.failed_kernels and (why := failures.known(kind)) is not None:
            raise why
        options["enable_fp_fusion"] = True  # kernels rely on it, and Triton 3.10 does not do it by default
        _, outer, _ = sys.exc_info()
        try:
            compiled = launcher.load(kernel, programs, arguments, options)
        except Exception as error:  # whatever Triton raises here, the kernel is unavailable
            passing = any(words in str(error) for words in ("out of memory", "captur"))  # "captur": in a CUDA graph
            if passing or (isinstance(error, OutOfResources) and not last):
                raise  # another call, or another tile, may succeed
            raise failures.remember(kind, error, outer) from error
    if recorder is not None:
        recorder.add(kernel, compiled, programs, arguments, options)
    elif compiled is None:
        kernel[(programs,)](**arguments, **options)
    else:
        stream = driver.active.get_current_stream(device.index)
        launcher.launched(compiled)(programs, stream, [arguments[name] for name in kernel.arg_names])


@functools.cache
def capability(device):
    """Return the compute capability of a GPU, as 90 for (9, 0); None in the interpreter."""
    if isinstance(device, AssumedGPU):
        return device.capability
    if interpreting():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def has_hopper(tensor):
    """Return whether a tensor's device runs Hopper kernels. A compiled graph may come from another GPU."""
    return hopper.missing is None and capability(device_of(tensor)) == 90


def on_hopper(call, backend, chosen=False):
    """Return whether to run the Hopper forward. chosen: the backend was chosen for this call, not in a graph."""
    if backend != "hopper" or not has_hopper(call.query) or call.key.shape[2] == 0:
        return False
    return chosen or call.named or not hopper.reasons(call)


@functools.cache
def multiprocessors(device):
    if isinstance(device, AssumedGPU):
        return tile_table.MULTIPROCESSORS
    return 1 if interpreting() else torch.cuda.get_device_properties(device).multi_processor_count


KERNELS = {x.__name__: x for x in (forward.forward, dq.dq, dkdv.dkdv, dbias.dbias, tangent.tangent, append.append)}
KERNELS |= {x.__name__: x for x in (preprocess.preprocess, preprocess.real_keys, preprocess.postprocess, weights)}
KERNELS |= {x.__name__: x for x in (block_mask.block_mask, block_mask.transpose_words, block_mask.tile_lists)}
KERNELS |= {x.__name__: x for x in (combine.combine, sequences.fill_slots)}
KERNELS |= dict.fromkeys(tile_table.DECODE, decode.decode)
KERNELS["one_pass"] = dkdv.dkdv  # also accumulates dq, with tiles of its own
KERNELS["tangent_weights"] = weights
KERNELS |= hopper.KERNELS


def widest(call):
    return max(width.fn(call.query.shape[3]), width.fn(call.value.shape[3]))


def pressure_of(call):
    """Return the register pressure of a call, as in `tile_table`: "plain", "masked" or "rich"."""
    added = [getattr(call, name) for name in BY_HEAD if name != "sinks"]
    if any(x is not None for x in (call.bias, call.softcap, call.seed, *added)):
        return "rich"
    return "plain" if call.mask is call.mask_bits is None else "masked"


def kind_of(name, call, cached=False):
    """Return a key: calls with equal keys share tiles and failures. cached: whether a Hopper kernel reads caches."""
    if name in tile_table.ON_HOPPER:
        return f"{name} ({hopper.variant(bounded(call), cached)})", device_of(call.query)
    query, rows = call.query, [call.query.shape[2], *[call.max_seqlen_q] * (call.max_seqlen_q is not None)]
    small = min(rows) <= tile_table.FEW_ROWS and name in ("forward", "dq", "tangent")
    # A tile of n rows visits n - 1 keys more than one row does. With 128 rows that is over a tenth of a narrow window.
    small = small or (None not in (call.left, call.right) and call.left + 1 + call.right < 10 * 127)
    # If the number of columns is no multiple of 16, threads load single elements, and addresses take many registers.
    odd = widest(call) > PART.value and any(x.shape[3] % 16 for x in (query, call.value))
    biased = None if call.bias is None else call.bias.element_size()
    return name, device_of(query), query.dtype, widest(call), pressure_of(call), small, odd, biased, call.partial


def candidates(name, call):
    """Return the tiles of a kernel for a call, best first, without tiles known not to fit."""
    kind = kind_of(name, call)
    if (fitting := tile_table.fitting.get(kind)) is None:
        _, device, dtype, most, pressure, small, odd, *_ = kind
        right, wrong, _ = tuned.of(device).get(tuned.place(name, dtype, most, pressure), tuned.Forms())
        table = tile_table.tiles_for(name, capability(device), dtype.itemsize, most, pressure)
        fitting = *right, *(tile for tile in table if tile_table.same(tile) not in (*right, *wrong))
        fitting = tile_table.small_enough(fitting) if small else fitting
        fitting = tile_table.fitting[kind] = fitting[-1:] if odd else fitting
    return fitting


def backward_on_hopper(call, ordered):
    if widest(call) <= tile_table.ONE_PASS:
        return "hopper_bwd_deterministic" if ordered else "hopper_bwd"
    return "hopper_bwd_ds" if hopper.row_width(call) <= 256 else "hopper_bwd_wide"


def form_on_hopper(name, call):
    """Return the tile of a Hopper kernel for a call; None if none fits, or tuning found all that fit wrong."""
    width, place = hopper.row_width(call), tuned.place(name, call.query.dtype, widest(call))
    forms, (least, long) = tile_table.ON_HOPPER[name].get(width, ()), tile_table.HOPPER_LONG.get(width, ({}, None))
    # Packed sequences count as short, because the bits of one must not depend on the lengths of others. So do calls
    # with options that need more registers than three warpgroups leave a thread.
    is_short = hopper.heavy_options(call) or call.cu_seqlens_q is not None
    length = 0 if is_short else min(call.query.shape[2], call.key.shape[2])
    is_long = length >= least.get(hopper.band_of(call), math.inf)
    # Tuning ranks forms by long calls, so short calls try `long` last. Widths 192 and 256 share a place.
    ranked, wrong, _ = tuned.of(device_of(call.query)).get(place, tuned.Forms())
    tried = sorted(dict.fromkeys((*ranked, long, *forms)), key=lambda form: form == long and not is_long)
    right = (form for form in tried if form in forms and form not in wrong)
    return next((form for form in right if hopper.fits(call, form)), None)


def form_of(name: str, call: Call):
    """Return the tile or pipeline that a kernel tries first for a call; None if it has none."""
    return form_on_hopper(name, call) if name in tile_table.ON_HOPPER else next(iter(candidates(name, call)), None)


def none_is_right(name, device):
    return failures.KernelUnavailable(f"`fusedattn tune` found no {name!r} that gives right numbers on {device}")


def prefers_two_passes(call):
    """Return whether a tuning file found dq and dkdv faster than one_pass, or every tile of one_pass wrong."""
    faster = tuned.is_faster("two_passes", "one_pass", call, device_of(call.query), pressure_of(call))
    return faster or not candidates("one_pass", call)


def surroundings(device):
    """Return a context manager for a launch: it selects the device, or holds the interpreter's lock."""
    if interpreting():
        return interpreter.turn()
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def run_tiled(name, call, programs, arguments, more=None):
    """Run a kernel with the first of its tiles that fits. programs(tile): the grid size. more(tile): more arguments."""
    kind, device, recorder = kind_of(name, call), device_of(call.query), current_recorder()
    if not (tiles := candidates(name, call)):
        raise none_is_right(name, device)
    with surroundings(device):
        for tile in tiles:
            before = None if recorder is None else recorder.position()
            blocks = {"BLOCK_M": tile.rows} if tile.keys is None else {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
            if more is not None:
                blocks |= more(tile)
            options, last = dict(num_warps=tile.warps, num_stages=tile.stages), tile is tiles[-1]
            try:
                run_kernel(name, programs(tile), arguments | blocks, device, kind, last=last, **options)
                return
            except OutOfResources:
                if last:
                    raise
                if recorder is not None:
                    recorder.back(before)  # forget what `more` recorded for this tile
                # Another thread may already have found a smaller tile.
                smaller = tiles[tiles.index(tile) + 1 :]
                tile_table.fitting[kind] = min(smaller, tile_table.fitting.get(kind, smaller), key=len)


def failed(call: Call, names, cached: bool = False, maybe: bool = False) -> "failures.KernelUnavailable | None":
    """Return the error of the first kernel that is known to fail for a call, or None. maybe: as in `failures.known`."""
    device = device_of(call.query)
    for name in names:
        if form_of(name, call) is None:
            return none_is_right(name, device)
    kinds = [kind_of(name, call, cached) for name in names]
    if names[0] not in tile_table.ON_CACHES and (call.block_mask is not None or hides(call)):
        kinds += [(name, device) for name in ("block_mask", "tile_lists")]
    if call.cu_seqlens_q is not None:
        kinds.append(("fill_slots", device))
    return next((why for kind in kinds if (why := failures.known(kind, maybe)) is not None), None)


def without_stats(call: Call, stats, need_weights: bool, backend: str) -> "failures.KernelUnavailable | None":
    """Return the reason why a forward ran on the naive path, which leaves no stats; None if kernels computed it."""
    wrong = any(x.wrong for x in tuned.of(call.query.device).values())
    if not (failures.failed_kernels or failures.passed or wrong):  # the usual case
        return None
    ways = [["forward"], *[["hopper", "combine"]] * on_hopper(call, backend)]
    for maybe in (False, True):
        why, *others = [failed(call, [*names, *["weights"] * need_weights], maybe=maybe) for names in ways]
        # A kernel that failed in the forward may run now. The naive path fills stats with NaN.
        if None not in (why, *others) and not (maybe and (call.named or not stats.flatten()[0].isnan())):
            return why
    return None
