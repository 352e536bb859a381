"""From tensors to kernels: grids and tiles. Sizes of 0 do not get here: `ops` answers for them."""

import contextlib
import functools
import threading

import torch
from triton import cdiv, knobs
from triton.runtime.errors import OutOfResources

from . import configs, hopper, views
from .call import Call
from .kernels import backward as gradients
from .kernels import blocks, dbias
from .kernels import forward as attention
from .kernels import weights as recomputed
from .kernels.tiles import width


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


def _run(name, programs, arguments, **options):
    """Run one kernel, or have it recorded."""
    kernel, recorder = KERNELS[name], _recorder()
    if recorder is None:
        kernel[(programs,)](**arguments, **options)
    else:
        recorder.add(kernel, programs, arguments, options)


@functools.cache
def capability(device):
    """90 for compute capability (9, 0); None where kernels are interpreted."""
    if interpreting():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


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
        gradients.prepare,
        gradients.dq,
        gradients.dkdv,
        dbias.dbias,
        blocks.mark,
        blocks.list_blocks,
    )
}
if hopper.kernel is not None:
    KERNELS["hopper"] = hopper.kernel
_too_large: dict[tuple, int] = {}  # `_kind`: how many of its tiles the device cannot hold


def _kind(name, call):
    query, value = call.query, call.value
    few = query.shape[2] <= configs.FEW_ROWS and name in ("forward", "dq")
    widest, narrow = max(width.fn(query.shape[3]), width.fn(value.shape[3])), configs.narrow(call.left, call.right)
    return name, _device(query), query.dtype, widest, _load(call), narrow or few


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


def _launch(name, call, programs, arguments, lists=None):
    """Run a kernel with the first of its tiles that fits the device.

    Args:
        programs: of a tile, how many there are to run. lists: of a tile, its `lists` argument, if the kernel has one.
    """
    tiles, recorder = candidates(name, call), _recorder()
    with surroundings(_device(call.query)):
        for left, tile in zip(reversed(range(len(tiles))), tiles, strict=True):
            before = None if recorder is None else recorder.position()
            sizes = {"BLOCK_M": tile.rows} if tile.keys is None else {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
            if lists is not None:
                sizes["lists"] = lists(tile)
            try:
                _run(name, programs(tile), arguments | sizes, num_warps=tile.warps, num_stages=tile.stages)
                return
            except OutOfResources:
                if not left:
                    raise
                if recorder is not None:
                    recorder.back(before)  # the lists of this tile
                kind = _kind(name, call)
                # Counted from the end: another thread may have come as far meanwhile.
                _too_large[kind] = len(_tiles(kind)) - left


def _narrow(tensor):
    """A tensor before it was expanded: one element along each dimension in which it repeats itself."""
    if tensor is None or 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]


def new_marks(mask, key_mask, query_mask, bias, grain):
    """(uninitialised marks of grain x grain pairs, (rows, keys) that they are of).

    The masks and the bias are those of a Call; any may be None, but not all. Sizes along which none differs are 1.
    """
    mask, key_mask, query_mask, bias = map(_narrow, (mask, key_mask, query_mask, bias))
    given = [x for x in (mask, bias) if x is not None]
    given += [] if key_mask is None else [key_mask[:, None, None, :]]
    given += [] if query_mask is None else [query_mask[:, None, :, None]]
    batch, heads, rows, keys = torch.broadcast_shapes(*(x.shape for x in given))
    marks = given[0].new_empty((batch, heads, -(-rows // grain), -(-keys // grain)), dtype=torch.uint8)
    return marks, (rows, keys)


def mark(mask, key_mask, query_mask, bias, grain):
    """The marks of blocks of grain x grain pairs: bytes, as `kernels.blocks.mark` has them."""
    marks, (rows, keys) = new_marks(mask, key_mask, query_mask, bias, grain)
    mask, key_mask, query_mask, bias = map(_narrow, (mask, key_mask, query_mask, bias))
    batch, heads = marks.shape[:2]
    if marks.numel():
        arguments = dict(
            Marks=marks,
            masks=views.masks(mask, key_mask, query_mask, batch, heads, rows, keys),
            bias=None if bias is None else views.of(bias.expand(batch, heads, rows, keys)),
            rows=rows,
            keys=keys,
            HEADS=heads,
            GRAIN=grain,
        )
        with surroundings(_device(marks)):
            _run("mark", marks.numel(), arguments, num_warps=4)
    return marks


def list_blocks(call, marks, grain, tile, by_keys=False):
    """The `lists` of a kernel that walks the tiles of a call in one direction or the other."""
    batch, heads, rows, keys = views.sizes(call)
    group = heads // call.key.shape[1]
    planes, length, turns = marks.shape[1], cdiv(rows, tile.rows), cdiv(keys, tile.keys)
    if by_keys:
        planes, length, turns = max(1, planes // group), turns, length * group
    lists = marks.new_empty((marks.shape[0], planes, length, 2, turns + 2), dtype=torch.int64)
    if lists.numel():
        arguments = dict(
            Lists=lists,
            marks=views.of(marks.expand(-1, -1, cdiv(rows, grain), cdiv(keys, grain))),
            HEADS=planes,
            GROUP=group if by_keys else 1,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.keys,
            GRAIN=grain,
            BY_KEYS=by_keys,
            CHUNK=256,
        )
        _run("list_blocks", lists.shape[0] * planes * length, arguments | views.band(call), num_warps=4)
    return views.of(lists.flatten(2, 3).expand(batch, heads // group if by_keys else heads, -1, -1))


def _marked(call):
    """(marks, their grain) of a call: those that it has, or else new ones; None where nothing but a band hides."""
    size = grain(_device(call.query))
    if call.marks is not None:
        return call.marks, size
    if all(x is None for x in (call.mask, call.key_mask, call.query_mask, call.bias)):
        return None, size
    return mark(call.mask, call.key_mask, call.query_mask, call.bias, size), size


def _lists(call, marks, grain, by_keys=False):
    """tile -> the `lists` of a kernel that takes it."""
    return lambda tile: None if marks is None else list_blocks(call, marks, grain, tile, by_keys)


def _bias_sum(call):
    """What the gradient of the bias is a sum by: where it is broadcast decides whose loops it is taken in."""
    batch, heads, rows, keys = views.sizes(call)
    if call.bias.shape[3] == 1:
        return "rows"
    if call.bias.shape[2] == 1:
        return "keys"
    return "pairs" if call.bias.shape[:2] == (batch, heads) else "planes"


def tiles(call: Call, need_weights: bool, on_hopper: bool) -> dict:
    """{kernel: Tile or Pipeline} of what a call, with the backward of all its inputs, would launch."""
    names = [*([] if on_hopper else ["forward"]), *(["weights"] if need_weights else []), "prepare", "dq", "dkdv"]
    names += ["dbias"] if call.bias is not None and _bias_sum(call) == "planes" else []
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
        _run("hopper", programs, arguments, num_warps=4, maxnreg=registers)
    if target is not out:
        out.copy_(target)


def _forward(out, lse, stats, call):
    """`forward` without weights, by the kernel for every GPU."""
    if views.packs(call, out) and call.query.shape[0] * call.key.shape[1] >= multiprocessors(_device(call.query)):
        call, out = views.packed(call, out)
    batch, heads, rows, _ = views.sizes(call)
    _launch(
        "forward",
        call,
        lambda tile: cdiv(rows, tile.rows) * batch * heads,
        views.common(call) | dict(Out=views.of(out), Lse=lse, Stats=stats),
        lists=_lists(call, *_marked(call)),
    )


def forward(out, lse, weights, stats, call: Call, on_hopper: bool):
    """Fill out and, unless None, lse, weights and stats; weights need stats.

    on_hopper: out, lse and stats by the kernel for Hopper, which must have no reason not to take the call.
    """
    (_forward_on_hopper if on_hopper else _forward)(out, lse, stats, call)
    if weights is not None:
        (batch, heads, rows, keys), common = views.sizes(call), views.common(call)
        arguments = {name: common[name] for name in common if name not in ("V", "DV")}
        _launch(
            "weights",
            call,
            lambda tile: cdiv(rows, tile.rows) * cdiv(keys, tile.keys) * batch * heads,
            arguments | dict(Weights=views.of(weights), Stats=stats),
        )


def backward(grads, grad_out, grad_lse, grad_weights, out, weights, stats, call: Call):
    """Fill grads, of the first fields of a Call; None for what is not needed (key and value go together).

    grad_lse and grad_weights may be None; weights are those of the forward, if there are gradients of them.
    """
    batch, heads, rows, keys = views.sizes(call)
    kv_heads, planes = call.key.shape[1], batch * heads
    grad_query, grad_key, grad_value, grad_bias, grad_slopes, grad_sinks = grads
    common, (marks, grain) = views.common(call), _marked(call)
    weights, grad_weights = (None if grad_weights is None else views.of(x) for x in (weights, grad_weights))

    def table(columns, length=rows, new=stats.new_empty):
        return new((batch, heads, length, columns))

    rows_table = table(4)
    prepare = dict(Out=views.of(out), GradOut=views.of(grad_out), GradLse=grad_lse, Weights=weights)
    prepare |= dict(GradWeights=grad_weights, Stats=stats, Rows=rows_table)
    prepare |= {name: common[name] for name in ("q_len", "k_len", "score", "HEADS", "DV", "PRECISION")}
    _launch("prepare", call, lambda tile: cdiv(rows, tile.rows) * planes, prepare)
    common |= dict(GradOut=views.of(grad_out), GradWeights=grad_weights, Rows=rows_table)

    where = None if grad_bias is None else _bias_sum(call)
    by_rows = table(1) if where == "rows" else None
    by_keys = table(3, keys, stats.new_zeros) if where == "keys" else None
    over_planes = views.of(grad_bias) if where == "planes" else None
    whole = views.of(grad_bias.zero_()) if where == "pairs" else None
    slope_sums, sink_sums = (None if x is None else table(1) for x in (grad_slopes, grad_sinks))

    if any(x is not None for x in (grad_query, whole, by_rows, slope_sums, sink_sums)):
        own = dict(GradQ=None if grad_query is None else views.of(grad_query), GradBias=whole)
        own |= dict(BiasSums=by_rows, SlopeSums=slope_sums, SinkSums=sink_sums, GradLse=grad_lse)
        _launch("dq", call, lambda tile: cdiv(rows, tile.rows) * planes, common | own, lists=_lists(call, marks, grain))
    if grad_key is not None or by_keys is not None:
        own = dict(
            zip(("GradK", "GradV"), (None if x is None else views.of(x) for x in (grad_key, grad_value)), strict=True)
        )
        _launch(
            "dkdv",
            call,
            lambda tile: cdiv(keys, tile.keys) * batch * kv_heads,
            common | own | dict(BiasSums=by_keys),
            lists=_lists(call, marks, grain, by_keys=True),
        )
    if over_planes is not None:
        own_batch, own_heads = grad_bias.shape[:2]
        met = marks & 1
        met = met if own_batch == batch else met.amax(0, keepdim=True)
        met = met if own_heads == heads else met.amax(1, keepdim=True)
        met = met.expand(own_batch, own_heads, cdiv(rows, grain), cdiv(keys, grain))
        shared = dict(GradBias=over_planes, marks=views.of(met), GRAIN=grain)
        shared |= dict(batches=batch // own_batch, BIAS_HEADS=own_heads)
        _launch(
            "dbias",
            call,
            lambda tile: cdiv(rows, tile.rows) * cdiv(keys, tile.keys) * own_batch * own_heads,
            common | shared,
        )

    # In float64: it costs nothing here, and a sum over all rows of a head would else be as rough as their number.
    if by_rows is not None:
        grad_bias.copy_(by_rows.double().sum_to_size(grad_bias.shape))
    if by_keys is not None:
        grad_bias.copy_(by_keys.double().sum(3)[:, :, None, :].sum_to_size(grad_bias.shape))
    for sums, grad in ((sink_sums, grad_sinks), (slope_sums, grad_slopes)):
        if sums is not None:
            grad.copy_(sums.double().sum((2, 3)).sum_to_size(grad.shape))
