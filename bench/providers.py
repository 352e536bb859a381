"""Who computes attention, by name: ours, the eager formula, and others.

A provider is setup(case, tensors) -> call, where call(query, key, value), or call(query, key, value, bias) of a case
that has one, is the output, or output and weights; it raises Unsupported(why) if it cannot.
"""

import functools

import torch
from torch.nn.attention import SDPBackend

import fusedattn as fa
from fusedattn import backends
from fusedattn.call.packed import Packed, checked_packed

from . import cases, peers, variants
from .calls import Call, Unsupported, offsets_of, packing_of, taken


def _with_bias(function, options):
    """call(query, key, value[, bias]) of one that takes the arguments of `fusedattn.attention`."""

    def call(query, key, value, bias=None):
        return function(query, key, value, bias=bias, **options)

    return call


def _explain(case, tensors, backend=None):
    return fa.explain(*tensors[:3], bias=tensors.bias, backend=backend, **_arguments(case, tensors.masks))


def _arguments(case, masks):
    """Those of `fusedattn.attention`, all but the bias."""
    return case.arguments(masks) | dict(return_weights="weights" in case.words)


def fusedattn(case, tensors, backend=None):
    explanation = _explain(case, tensors, backend)
    if explanation.backend is None:
        raise Unsupported("; ".join(explanation.reasons[backend]))
    return _with_bias(fa.attention, _arguments(case, tensors.masks) | dict(backend=backend))


def by_variant(name, case, tensors):
    """Ours, by one form of one of its kernels."""
    if not variants.concerns(name, case):
        raise Unsupported("it is for another width")
    call = fusedattn(case, tensors, backend=variants.backend(name))
    return Call(call, inside=variants.inside(name))


def cached(page, case, tensors):
    """Ours, of a cache that is full: in one piece, or in shuffled pages of so many keys."""
    if case.words:
        raise Unsupported("it is timed without options")
    device, kernel = tensors.query.device, "triton" if tensors.query.is_cuda else None
    lengths = torch.full((case.B,), case.Sk, dtype=torch.int32, device=device)
    options = dict(cache_seqlens=lengths, causal=case.causal, backend=kernel)
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
    """Ours, with a plan of the masks that was made before."""
    if not tensors.masks:
        raise Unsupported("there is no mask to plan")
    return _with_bias(fa.attention, _arguments(case, {"mask": fa.plan(**tensors.masks)}))


def _by_sequence(case, masks):
    """Arguments of `fusedattn.attention_varlen` that are not offsets: what pads a sequence is not there."""
    return case.arguments({name: mask for name, mask in masks.items() if name == "mask"})


def packed(case, tensors):
    """Ours, on packed sequences."""
    if "weights" in case.words:
        raise Unsupported("its weights are packed, those that they are held to are not")
    found = packing_of(case, tensors)
    cu_q, cu_k, most_q, most_k = offsets_of(found)
    options = _by_sequence(case, tensors.masks) | dict(max_seqlen_q=most_q, max_seqlen_k=most_k)

    def call(query, key, value, bias=None):
        return fa.attention_varlen(query, key, value, cu_q, cu_k, bias=bias, **options)

    return Call(call, by_token=True, packing=found)


def _packed_backend(case, tensors):
    """The backend that takes packed sequences of a case."""
    found = packing_of(case, tensors)
    inputs = taken(Call(None, by_token=True, packing=found), tensors[:3])
    options = _by_sequence(case, tensors.masks) | dict(bias=tensors.bias)
    return backends.choose(checked_packed(Packed(*inputs, *offsets_of(found)), options, False), False).name


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
# Only where they are named: "sdpa" takes the backend that torch chooses, which is one of those above.
ASIDE = {
    "fusedattn+plan": planned,
    "sdpa": functools.partial(peers.sdpa, ANY),
    "fusedattn:cache": functools.partial(cached, None),
    "fusedattn+packed": packed,
    "torch:varlen": peers.torch_varlen,
    "flash-attn+packed": peers.flash_packed,
    "sdpa+packed": peers.jagged,
    "flex+packed": peers.flex_packed,
}
ASIDE |= {f"fusedattn:pages={page}": functools.partial(cached, page) for page in (256, 16)}
OURS = ("fusedattn", "fusedattn+plan", "fusedattn+packed")  # whose rows say which of our backends took the case


def usual(device):
    """The names of those that are compared where none is named: on a GPU all that are installed."""
    if torch.device(device).type != "cuda":
        return ["fusedattn", "naive", "sdpa:math"]
    return list(filter(peers.is_installed, PROVIDERS))


def usual_packed(device):
    """The same of packed sequences, ours with padding beside them."""
    if torch.device(device).type != "cuda":
        return ["fusedattn+packed", "fusedattn", "naive", "sdpa+packed"]
    others = ("torch:varlen", "flash-attn+packed", "sdpa+packed", "flex+packed")
    return ["fusedattn+packed", "fusedattn", *filter(peers.is_installed, others)]


def unchecked(case, name):
    """Why a provider's answer cannot be held to the rule, or ""."""
    ours = name == "naive" or name.startswith("fusedattn")
    return "" if ours or "dropout" not in case.words else "its dropout has bits of its own"


def find(name):
    """The provider of a name: one of PROVIDERS or ASIDE, ours by fusedattn:BACKEND, or a variant."""
    if name in PROVIDERS | ASIDE:
        return (PROVIDERS | ASIDE)[name]
    if variants.known(name):
        return functools.partial(by_variant, name)
    if name.startswith("fusedattn:"):
        return functools.partial(fusedattn, backend=name.removeprefix("fusedattn:"))
    raise ValueError(f"provider: expected one of {', '.join(PROVIDERS | ASIDE)} or fusedattn:BACKEND, got {name}")


def label(name, case, tensors):
    """A name as it stands in the CSV: our own says which of our backends took the case."""
    if name not in OURS:
        return name
    taken_by = _packed_backend(case, tensors) if name == "fusedattn+packed" else _explain(case, tensors).backend
    return f"{name}:{taken_by}"
