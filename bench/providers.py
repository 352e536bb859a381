"""Providers of attention, by name: ours, the eager formula, and the peers."""

import functools

import torch
from torch.nn.attention import SDPBackend

import fusedattn as fa
from fusedattn import backends
from fusedattn.call.packed import Packed, checked_packed

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
    """The provider of a name: one of PROVIDERS or ASIDE, or fusedattn:BACKEND."""
    if (known := PROVIDERS | ASIDE).get(name) is None and not name.startswith("fusedattn:"):
        raise ValueError(f"provider: expected one of {', '.join(known)} or fusedattn:BACKEND, got {name}")
    return known.get(name) or functools.partial(fusedattn, backend=name.removeprefix("fusedattn:"))


def label(name, case, tensors):
    """The provider of a row: of OURS with the backend that takes the case."""
    if name not in OURS:
        return name
    backend = _packed_backend(case, tensors) if name == "fusedattn+packed" else _explain(case, tensors).backend
    return f"{name}:{backend}"
