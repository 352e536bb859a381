"""Providers of attention, by name: ours, forms of one of our kernels, the eager formula, and the peers."""

import contextlib
import functools
from unittest import mock

import torch
from torch.nn.attention import SDPBackend

import fusedattn as fa
from fusedattn import backends
from fusedattn.call.packed import Packed, checked_packed
from fusedattn.launch import tiles as tile_table

from . import calls, cases, peers
from .calls import Call, Unsupported, offsets_of, packing_of


def _with_bias(function, options):
    """call(query, key, value[, bias]) of a function with the arguments of `fusedattn.attention`."""
    return lambda query, key, value, bias=None: function(query, key, value, bias=bias, **options)


def _explain(case, tensors, backend=None):
    return fa.explain(*tensors[:3], bias=tensors.bias, backend=backend, **_arguments(case, tensors.masks))


def _arguments(case, masks):
    """Arguments of `fusedattn.attention`, all but the bias."""
    return case.arguments(masks) | dict(return_weights="weights" in case.words)


def fusedattn(case, tensors, backend=None):
    explanation = _explain(case, tensors, backend)
    if explanation.backend is None:
        raise Unsupported("; ".join(explanation.reasons[backend]))
    return _with_bias(fa.attention, _arguments(case, tensors.masks) | dict(backend=backend))


def cached(page, case, tensors):
    """Ours, of a cache: in one piece, or in shuffled pages of so many keys."""
    if set(case.words) - {"filled"}:
        raise Unsupported("it is timed without options")
    device, kernel = tensors.query.device, "triton" if tensors.query.is_cuda else None
    options = dict(cache_seqlens=case.lengths(device).int(), causal=case.causal, backend=kernel)
    if page is None:
        return lambda query, key, value: fa.attention_decode(query, key, value, **options)
    if case.Sk % page:
        raise Unsupported(f"its keys are no multiple of the page, {page}")
    table = torch.randperm(case.B * case.Sk // page, generator=torch.Generator().manual_seed(cases.SEED))
    table = table.view(case.B, -1).to(device, torch.int32)
    pool = []
    for whole in (tensors.key, tensors.value):
        pages = whole.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
        pool.append(torch.empty_like(pages, memory_format=torch.contiguous_format))
        pool[-1][table.flatten().long()] = pages
    return lambda query, key, value: fa.attention_decode(query, *pool, block_table=table, **options)


def planned(case, tensors):
    """Ours, with a plan of the masks made before."""
    if not tensors.masks:
        raise Unsupported("there is no mask to plan")
    return _with_bias(fa.attention, _arguments(case, {"mask": fa.plan(**tensors.masks)}))


def _by_sequence(case, masks):
    """Arguments of `fusedattn.attention_varlen` that are not offsets: packed sequences need no mask of padding."""
    return case.arguments({name: mask for name, mask in masks.items() if name == "mask"})


def packed(case, tensors):
    """Ours, on packed sequences."""
    if "weights" in case.words:
        raise Unsupported("its weights are packed, and the reference's are not")
    packing = packing_of(case, tensors)
    cu_q, cu_k, longest_q, longest_k = offsets_of(packing)
    options = _by_sequence(case, tensors.masks) | dict(max_seqlen_q=longest_q, max_seqlen_k=longest_k)

    def attend(query, key, value, bias=None):
        return fa.attention_varlen(query, key, value, cu_q, cu_k, bias=bias, **options)

    return Call(attend, by_token=True, packing=packing)


def _packed_backend(case, tensors):
    """The backend that takes packed sequences of a case."""
    packing = packing_of(case, tensors)
    inputs = calls.packed(Call(None, by_token=True, packing=packing), tensors[:3])
    options = _by_sequence(case, tensors.masks) | dict(bias=tensors.bias)
    return backends.choose(checked_packed(Packed(*inputs, *offsets_of(packing)), options, False), False).name


def naive(case, tensors):
    """The formula as eager PyTorch computes it in the dtype of its inputs."""
    return _with_bias(fa.reference.eager, _arguments(case, tensors.masks))


PROVIDERS = {
    "fusedattn": fusedattn,
    "sdpa:cudnn": functools.partial(peers.sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa:flash": functools.partial(peers.sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa:efficient": functools.partial(peers.sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "flash-attn": peers.flash,
    "fa4": peers.fa4,
    "xformers": peers.xformers,
    "flex": peers.flex,
    "naive": naive,
    "sdpa:math": functools.partial(peers.sdpa, SDPBackend.MATH),
    "fusedattn:naive": functools.partial(fusedattn, backend="naive"),
}
ANY = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Only where they are named: "sdpa" runs the backend that torch chooses, which is one of those above.
ASIDE = {
    "fusedattn+plan": planned,
    "sdpa": functools.partial(peers.sdpa, ANY),
    "fusedattn:cache": functools.partial(cached, None),
    "fusedattn:pages=256": functools.partial(cached, 256),
    "fusedattn:pages=16": functools.partial(cached, 16),
    "fusedattn+packed": packed,
    "sdpa+slice": peers.sliced,
    "torch:varlen": peers.torch_varlen,
    "flash-attn+packed": peers.flash_packed,
    "sdpa+packed": peers.jagged,
    "flex+packed": peers.flex_packed,
}
OURS = ("fusedattn", "fusedattn+plan", "fusedattn+packed", "fusedattn.compat")  # a row names the backend as well


def usual(device, *without):
    """The providers that are compared where none is named: on a GPU all that are installed, without some prefixes."""
    on_gpu = torch.device(device).type == "cuda"
    names = filter(peers.is_installed, PROVIDERS) if on_gpu else ("fusedattn", "naive", "sdpa:math")
    return [name for name in names if not name.startswith(without)]


def usual_packed(device):
    """Those that take packed sequences, and ours with padding."""
    if torch.device(device).type != "cuda":
        return ["fusedattn+packed", "fusedattn", "naive", "sdpa+packed"]
    others = ("torch:varlen", "flash-attn+packed", "sdpa+packed", "flex+packed")
    return ["fusedattn+packed", "fusedattn", *filter(peers.is_installed, others)]


def unchecked(case, name):
    """Why the rule does not apply to a provider's answer, or ""."""
    ours = name == "naive" or name.startswith("fusedattn")
    return "" if ours or "dropout" not in case.words else "its dropout has bits of its own"


def find(name):
    """The provider of a name: one of PROVIDERS or ASIDE, fusedattn:BACKEND, or a form of one of our kernels."""
    if (known := PROVIDERS | ASIDE | forms()).get(name) is None and ("/" in name or not name.startswith("fusedattn:")):
        raise ValueError(f"provider: expected one of {', '.join(known)} or fusedattn:BACKEND, got {name}")
    if "/" in name:
        return functools.partial(by_form, name)
    return known.get(name) or functools.partial(fusedattn, backend=name.removeprefix("fusedattn:"))


def label(name, case, tensors):
    """The provider of a row: of OURS with the backend that takes the case."""
    if name not in OURS:
        return name
    backend = _packed_backend(case, tensors) if name == "fusedattn+packed" else _explain(case, tensors).backend
    return f"{name}:{backend}"


# Forms of our kernels: the forward for Hopper by one pipeline, or that of every GPU by one tile; the backward in two
# passes, or in one by one tile, or by a kernel for Hopper.
PIPELINE, FORWARD, BACKWARD = "fusedattn:hopper/", "fusedattn:forward/", "fusedattn:backward/"


def pipeline_name(pipeline):
    """A Pipeline, as 128x64s4+pingpong: rows x keys of a block, stages; +grid is one block of rows a program."""
    words = ("" if pipeline.persistent else "+grid") + ("+pingpong" if pipeline.ping_pong else "")
    return f"{pipeline.rows}x{pipeline.keys}s{pipeline.stages}{words}"


def tile_name(tile):
    """A Tile, as 64x128w8s2+bulk: rows x keys, warps, stages; +bulk is dq, +tma are loads by the copy engine."""
    return f"{tile.rows}x{tile.keys}w{tile.warps}s{tile.stages}" + "+bulk" * tile.bulk + "+tma" * tile.tma


def way_back_name(kernel, form):
    """A backward for Hopper, as hopper-bwd-64x128s2: its kernel, rows x keys of a block, stages."""
    return f"{kernel.replace('_', '-')}-{form.rows}x{form.keys}s{form.stages}"


def forms(case=None, prefix=""):
    """{provider: (backend, the context in which the form is the one taken)} at the width of a case, or at all.

    Tiles are those of Hopper and its candidates, and of one pass those of the table once more with dq added by threads.
    """

    def fitting(widths):
        return [width for width in widths if case is None or max(case.D, case.Dv) <= width][
            : None if case is None else 1
        ]

    every = {}
    for pipeline in (pipeline for width in fitting((64, 128, 256)) for pipeline in tile_table.HOPPER[width]):
        every[PIPELINE + pipeline_name(pipeline)] = "hopper", functools.partial(by_pipeline, pipeline)
    for tile in (tile for width in fitting((64, 128, 256)) for tile in tile_table.candidates("forward", 90, 2, width)):
        every[FORWARD + tile_name(tile)] = "triton", functools.partial(only, "forward", tile_table.same(tile))
    every[BACKWARD + "two-passes"] = "triton", _same_bits
    for width in fitting((64, 128)):
        by_threads = (tile._replace(bulk=False) for tile in tile_table.tiles("one_pass", 90, 2, width))
        for tile in (*tile_table.candidates("one_pass", 90, 2, width), *by_threads):
            every[BACKWARD + tile_name(tile)] = "triton", functools.partial(only, "one_pass", tile_table.same(tile))
    for kernel in tile_table.BACKWARDS:
        rows = tile_table.ON_HOPPER[kernel]
        for form in (form for width in fitting((64, 128, 256)) for form in rows.get(width, ())):
            every[BACKWARD + way_back_name(kernel, form)] = "hopper", functools.partial(by_way_back, kernel, form)
    return {name: form for name, form in every.items() if name.startswith(prefix)}


def concerns(name, case):
    """Whether a provider is measured on a case: a form is not, if it is for another width."""
    return "/" not in name or name in forms(case)


def by_form(name, case, tensors):
    """Ours, by one form of one of its kernels."""
    from fusedattn.launch.hopper import stored_limits  # imports Triton

    if not concerns(name, case):
        raise Unsupported("it is for another width")
    if name.startswith(f"{BACKWARD}hopper-stored") and (lacks := stored_limits(tensors)):
        raise Unsupported(*lacks)
    backend, inside = forms()[name]
    return Call(fusedattn(case, tensors, backend=backend), inside=inside)


@contextlib.contextmanager
def _patched(module, name, value):
    """Inside, a name of a module has another value, and no call replays launches of before."""
    from fusedattn.replay import cache  # imports Triton

    cache.forget()
    try:
        with mock.patch.object(module, name, value):
            yield
    finally:
        cache.forget()


def _same_bits():
    """The context in which ours gives the same bits each time; the rest of torch need not."""
    return _patched(torch, "are_deterministic_algorithms_enabled", lambda: True)


def by_pipeline(pipeline, kernel="hopper"):
    """The context in which a kernel for Hopper works in this way."""
    from fusedattn.launch import run

    form = run.form_on_hopper
    return _patched(run, "form_on_hopper", lambda name, call: pipeline if name == kernel else form(name, call))


@contextlib.contextmanager
def by_way_back(kernel, form):
    """The context in which this is the backward for Hopper, and works in this way."""
    from fusedattn.launch import run

    with by_pipeline(form, kernel), _patched(run, "backward_on_hopper", lambda call, ordered: kernel):
        yield


def only(kernel, tile):
    """The context in which a kernel has this tile alone, and the others have theirs."""
    from fusedattn.launch import run

    every = run.candidates
    return _patched(run, "candidates", lambda name, call: (tile,) if name == kernel else every(name, call))
