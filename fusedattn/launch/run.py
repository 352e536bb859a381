"""From tensors to kernels: grids and tiles. Sizes of 0 do not get here: `ops` answers for them."""

import contextlib
import functools
import threading

import torch
from triton import cdiv, knobs
from triton.runtime.driver import driver
from triton.runtime.errors import OutOfResources

from ..call.form import Call
from ..kernels import (
    append,
    block_mask,
    combine,
    dbias,
    decode,
    dkdv,
    dq,
    forward as attention,
    preprocess as backward,
    sequences,
    weights as recomputed,
)
from ..kernels.vocabulary.span import Sequences
from ..kernels.vocabulary.tiles import width
from . import arguments as views, failures, hopper, launcher, tiles as configs


def interpreting():
    """Whether kernels run in Triton's interpreter, as TRITON_INTERPRET=1 asks before Triton is imported."""
    return knobs.runtime.interpret


if interpreting():
    from . import interpreter

    interpreter.repair()


_local = threading.local()  # .recorder: what keeps the launches of this thread instead of running them


@contextlib.contextmanager
def recording(recorder):
    """Inside, launches on tensors without data go to recorder.add(kernel, programs, arguments, options)."""
    _local.recorder = recorder
    try:
        yield
    finally:
        del _local.recorder


def _recorder():
    return getattr(_local, "recorder", None)


def _device(tensor):
    """Where kernels on a tensor run."""
    recorder = _recorder()
    return tensor.device if recorder is None else recorder.device


def _run(name, programs, arguments, device, kind=None, last=True, **options):
    """Run one kernel, or have it recorded.

    Args:
        kind: what calls share whose kernel fails where this one does; by default all on the device do.
        last: whether there is no smaller tile to try.
    Raises: Unusable for a kernel that does not compile or load; OutOfResources for a tile that is not the last.
    """
    kernel, recorder, compiled = KERNELS[name], _recorder(), None
    if not interpreting():
        kind = failures.kind(name, device) if kind is None else kind
        if (why := failures.known(kind)) is not None:
            raise why
        options["enable_fp_fusion"] = True  # kernels are written for it, and from 3.10 on it is not the default
        try:
            compiled = launcher.load(kernel, programs, arguments, options)
        except Exception as error:  # whatever Triton raises here is why the kernel is not to be had
            passing = any(words in str(error) for words in ("out of memory", "captur"))  # as a graph is captured
            if passing or (isinstance(error, OutOfResources) and not last):
                raise  # which may be otherwise another time, or for another tile
            raise failures.remember(kind, error) from error
    if recorder is not None:
        recorder.add(kernel, compiled, programs, arguments, options)
    elif compiled is None:
        kernel[(programs,)](**arguments, **options)
    else:
        stream = driver.active.get_current_stream(device.index)
        launcher.launched(compiled)(programs, stream, [arguments[name] for name in kernel.arg_names])


@functools.cache
def capability(device):
    """90 for compute capability (9, 0); None where kernels are interpreted."""
    if interpreting():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def has_hopper(tensor):
    """Whether the kernel for Hopper runs where a tensor is: a graph may come from another machine."""
    return hopper.missing is None and capability(_device(tensor)) in (90, None)


@functools.cache
def multiprocessors(device):
    """How many there are."""
    return 1 if interpreting() else torch.cuda.get_device_properties(device).multi_processor_count


def grain(device):
    """Rows and keys of a block that is marked as seen or not, on a device."""
    return configs.grain(capability(device))


KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        attention.forward,
        recomputed.weights,
        backward.prepare,
        backward.convert,
        dq.dq,
        dkdv.dkdv,
        dbias.dbias,
        block_mask.mark,
        block_mask.list_blocks,
        sequences.take_turns,
        append.append,
        combine.merge,
    )
}
KERNELS |= dict.fromkeys(configs.DECODE, decode.decode)
KERNELS["one_pass"] = dkdv.dkdv  # with dq, which takes room: its tiles are others
if hopper.kernel is not None:
    KERNELS["hopper"] = hopper.kernel
_too_large: dict[tuple, int] = {}  # `_kind`: how many of its tiles the device cannot hold


def widest(call):
    """Columns of the wider tiles of a call, of its queries and keys or of its values."""
    return max(width.fn(call.query.shape[3]), width.fn(call.value.shape[3]))


def _kind(name, call):
    query = call.query
    few = views.sizes(call)[2] <= configs.FEW_ROWS and name in ("forward", "dq")
    narrow = configs.narrow(call.left, call.right) or few
    return failures.kind(name, _device(query), query.dtype, widest(call), _load(call), narrow)


def _load(call):
    """What a call asks of each pair beyond its score and its weight, as `configs` has it."""
    if any(x is not None for x in (call.bias, call.alibi_slopes, call.softcap, call.seed)):
        return "rich"
    return "plain" if call.mask is None else "masked"


def _tiles(kind):
    name, device, dtype, width, *rest = kind
    return configs.tiles(name, capability(device), dtype.itemsize, width, *rest)


def candidates(name, call):
    """Tiles that a kernel may take for a call, best first, less those that the device is known not to hold."""
    kind = _kind(name, call)
    tiles = _tiles(kind)
    return tiles[min(_too_large.get(kind, 0), len(tiles) - 1) :]


def surroundings(device):
    """What a launch needs around it: the device of its tensors, or an interpreter that does not warn."""
    if interpreting():
        return interpreter.quiet()
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def run_tiled(name, call, programs, arguments, more=None):
    """Run a kernel with the first of its tiles that fits the device.

    Args:
        programs: of a tile, how many there are to run. more: of a tile, what arguments there are besides.
    """
    tiles, recorder, device, kind = candidates(name, call), _recorder(), _device(call.query), _kind(name, call)
    with surroundings(device):
        for left, tile in zip(reversed(range(len(tiles))), tiles, strict=True):
            before = None if recorder is None else recorder.position()
            sizes = {"BLOCK_M": tile.rows} if tile.keys is None else {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
            if more is not None:
                sizes |= more(tile)
            try:
                options = dict(num_warps=tile.warps, num_stages=tile.stages)
                _run(name, programs(tile), arguments | sizes, device, kind, last=not left, **options)
                return
            except OutOfResources:
                if not left:
                    raise
                if recorder is not None:
                    recorder.back(before)  # the lists of this tile
                # Counted from the end: another thread may have come as far meanwhile.
                _too_large[kind] = len(_tiles(kind)) - left


def _narrow(tensor):
    """A tensor before it was expanded: one element along each dimension in which it repeats itself."""
    if tensor is None or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]


def _narrowed(mask, key_mask, query_mask, bias, lengths):
    """Masks and a bias, narrow where they lie in a grid of pairs: of packed rows each has its own place."""
    tokens = (key_mask, query_mask) if lengths is not None else map(_narrow, (key_mask, query_mask))
    return _narrow(mask), *tokens, _narrow(bias)


def new_marks(mask, key_mask, query_mask, bias, lengths, grain):
    """(uninitialised marks of grain x grain pairs, (rows, keys) that they are of).

    The masks, the bias and the lengths are those of a Call; any may be None, but not all of the first four. Sizes along
    which none differs are 1.
    """
    mask, key_mask, query_mask, bias = masks = _narrowed(mask, key_mask, query_mask, bias, lengths)
    shapes = [x.shape for x in (mask, bias) if x is not None]
    if lengths is None:
        shapes += [] if key_mask is None else [key_mask[:, None, None, :].shape]
        shapes += [] if query_mask is None else [query_mask[:, None, :, None].shape]
    else:
        count = lengths.offsets_q.shape[0] - 1
        shapes += [] if key_mask is None else [(count, 1, 1, lengths.most_k)]
        shapes += [] if query_mask is None else [(count, 1, lengths.most_q, 1)]
    batch, heads, rows, keys = torch.broadcast_shapes(*shapes)
    given = next(x for x in masks if x is not None)
    marks = given.new_empty((batch, heads, -(-rows // grain), -(-keys // grain)), dtype=torch.uint8)
    return marks, (rows, keys)


def mark(mask, key_mask, query_mask, bias, lengths, grain):
    """The marks of blocks of grain x grain pairs: bytes, as `kernels.block_mask.mark` has them."""
    marks, (rows, keys) = new_marks(mask, key_mask, query_mask, bias, lengths, grain)
    mask, key_mask, query_mask, bias = _narrowed(mask, key_mask, query_mask, bias, lengths)
    batch, heads = marks.shape[:2]
    if marks.numel():
        # What hides pairs alone, of one batch maybe, need not know that there are sequences.
        packed = lengths is not None and not (key_mask is query_mask is None)
        arguments = dict(
            Marks=marks,
            masks=views.masks(mask, key_mask, query_mask, batch, heads, rows, keys, packed),
            bias=None if bias is None else views.of(bias.expand(batch, heads, rows, keys)),
            rows=rows,
            keys=keys,
            HEADS=heads,
            GRAIN=grain,
        )
        with surroundings(_device(marks)):
            arguments |= dict(extents=extents(lengths) if packed else None)
            _run("mark", marks.numel(), arguments, _device(marks), num_warps=4)
    return marks


def turns(call, block, by_keys=False):
    """How many turns blocks of so many rows, or keys, may take: of packed sequences, what there can be at most."""
    batch, _, rows, keys = views.sizes(call)
    lengths = call.lengths
    if lengths is None:
        return cdiv(keys if by_keys else rows, block) * batch
    return (lengths.keys if by_keys else lengths.rows) // block + batch


def _sequences(lengths, block, by_keys=False, count=0):
    """The Sequences of Lengths, with `count` turns of blocks of so many rows, or keys; None of None."""
    if lengths is None:
        return None
    batch, new = lengths.offsets_q.shape[0] - 1, lengths.offsets_q.new_full
    found = Sequences(new((count, 2), -1) if count else None, new((batch, 4), 0))
    arguments = dict(
        Turns=found.turns,
        Extents=found.extents,
        OffsetsQ=lengths.offsets_q.contiguous(),
        OffsetsK=lengths.offsets_k.contiguous(),
        n=batch,
        q_len=lengths.rows,
        k_len=lengths.keys,
        most_q=lengths.rows if lengths.most_q is None else lengths.most_q,
        most_k=lengths.keys if lengths.most_k is None else lengths.most_k,
        size=count,
        BLOCK=block,
        BY_KEYS=by_keys,
        CHUNK=64 if interpreting() else 1024,
    )
    if batch:
        _run("take_turns", batch, arguments, _device(found.extents), num_warps=4)
    return found


def extents(lengths):
    """The Extents of the sequences of Lengths; None of None."""
    return None if lengths is None else _sequences(lengths, 1).extents


def list_blocks(call, marks, grain, tile, by_keys=False, sequences=None):
    """The `lists` of a kernel that walks the tiles of a call in one direction or the other."""
    batch, heads, rows, keys = views.sizes(call)
    group = heads // call.key.shape[1]
    planes, length, across = marks.shape[1], cdiv(rows, tile.rows), cdiv(keys, tile.keys)
    if by_keys:
        planes, length, across = max(1, planes // group), across, length
    batches = marks.shape[0]
    if sequences is not None:
        batches, length = 1, sequences.turns.shape[0]
    most = across * group if by_keys else across
    lists = marks.new_empty((batches, planes, length, 2, most + 2), dtype=torch.int64)
    if lists.numel():
        arguments = views.band(call) | dict(
            Lists=lists,
            sequences=sequences,
            turns=across,
            marks=views.of(marks.expand(-1, -1, cdiv(rows, grain), cdiv(keys, grain))),
            HEADS=planes,
            GROUP=group if by_keys else 1,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            GRAIN=grain,
            BY_KEYS=by_keys,
            CHUNK=256,
        )
        _run("list_blocks", batches * planes * length, arguments, _device(lists), num_warps=4)
    return views.of(lists.flatten(2, 3).expand(batch, heads // group if by_keys else heads, -1, -1))


def marked(call):
    """(marks, their grain) of a call: those that it has, or else new ones; None where nothing but a band hides."""
    size = grain(_device(call.query))
    if call.marks is not None:
        return call.marks, size
    if all(x is None for x in call.hiding):
        return None, size
    return mark(*call.hiding, call.lengths, size), size


def walks(call, marks, grain, tile, by_keys=False):
    """The arguments `sequences` and `lists` of a kernel with a program for each block of rows, or of keys."""
    block = tile.keys if by_keys else tile.rows
    found = _sequences(call.lengths, block, by_keys, turns(call, block, by_keys))
    return dict(
        sequences=found,
        lists=None if marks is None else list_blocks(call, marks, grain, tile, by_keys, found),
    )


def failed(call: Call, names) -> "failures.Unusable | None":
    """Why one of these kernels, or of those that go before them, is known not to run for a call; None if none is."""
    device = _device(call.query)
    kinds = [failures.kind(name, device) if name == "hopper" else _kind(name, call) for name in names]
    reads_caches = names[0] in configs.ON_CACHES
    if not reads_caches and (call.marks is not None or any(x is not None for x in call.hiding)):
        kinds += [failures.kind(name, device) for name in ("mark", "list_blocks")]
    if call.lengths is not None:
        kinds.append(failures.kind("take_turns", device))
    return next((why for why in map(failures.known, kinds) if why is not None), None)


def tiles(call: Call, need_weights: bool, on_hopper: bool, backward) -> dict:
    """{kernel: Tile or Pipeline} of what a call would launch, with the kernels of its backward."""
    names = [*([] if on_hopper else ["forward"]), *(["weights"] if need_weights else []), *backward]
    found = {"hopper": hopper.pipeline(call)} if on_hopper else {}
    return found | {name: candidates(name, call)[0] for name in names}


def _forward_on_hopper(out, lse, stats, call):
    """`forward` without weights, by the kernel for Hopper; it copies what the compiler passed on without asking."""
    call = call._replace(**{name: hopper.readable(getattr(call, name)) for name in ("query", "key", "value")})
    taken, device, target = hopper.pipeline(call), _device(call.query), hopper.readable(out)
    assert target is out or _recorder() is None, "what is recorded are launches: a copy would be lost"
    arguments = hopper.arguments(call, target, taken) | dict(Lse=lse, Stats=stats)
    registers, *_ = configs.REGISTERS[taken.warpgroups]
    with surroundings(device):
        programs = hopper.programs(call, taken, multiprocessors(device))
        _run("hopper", programs, arguments, device, num_warps=4, maxnreg=registers)
    if target is not out:
        out.copy_(target)


def _forward(out, lse, stats, call):
    """`forward` without weights, by the kernel for every GPU."""
    if views.packs(call, out) and call.query.shape[0] * call.key.shape[1] >= multiprocessors(_device(call.query)):
        call, out = views.packed(call, out)
    marks = marked(call)
    run_tiled(
        "forward",
        call,
        lambda tile: turns(call, tile.rows) * call.query.shape[1],
        views.common(call) | dict(Out=views.of(out), Lse=lse, Stats=stats),
        lambda tile: walks(call, *marks, tile),
    )


def forward(out, lse, weights, stats, call: Call, on_hopper: bool):
    """Fill out and, unless None, lse, weights and stats; weights need stats.

    on_hopper: out, lse and stats by the kernel for Hopper, which must have no reason not to take the call.
    """
    (_forward_on_hopper if on_hopper else _forward)(out, lse, stats, call)
    if weights is not None:
        common, columns = views.common(call), weights.shape[3]
        arguments = {name: common[name] for name in common if name != "V"}
        run_tiled(
            "weights",
            call,
            lambda tile: turns(call, tile.rows) * cdiv(columns, tile.keys) * call.query.shape[1],
            arguments | dict(Weights=views.of(weights), Stats=stats, columns=columns),
            lambda tile: dict(sequences=_sequences(call.lengths, tile.rows, count=turns(call, tile.rows))),
        )
