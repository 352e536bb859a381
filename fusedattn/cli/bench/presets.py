"""What is measured: the cases, providers and modes of a preset, and what options make of them."""

from typing import NamedTuple

import torch

from ...backends import BACKENDS
from ...bench import attention, cases, providers
from ...bench.cases import Case
from ..screen import Problem


class Preset(NamedTuple):
    """Cases x providers x modes; and cases of whole modules, if there are any, which bring their own providers."""

    cases: list[Case]
    providers: list[str]
    modes: list[str]
    modules: list[Case] = []


ONE_WAY = ["forward", "backward"]
MODULES = "torch.nn"  # torch's module, which only another module can be set beside
# "sdpa" is what a user who names no backend has now.
FEW = ["fusedattn", "sdpa", "naive", "sdpa:math"]
FEW_ON_GPU = ["fusedattn", "sdpa", "sdpa:cudnn", "sdpa:flash", "sdpa:efficient", "naive"]
FRUGAL = ["fusedattn", "sdpa"]  # none that holds all pairs at once: on a CPU those of a long case may take all memory


def _square(length, causal, dtype="float32"):
    return Case(2, 4, 4, length, length, 64, 64, causal, dtype)


QUICK = [
    *(_square(length, True) for length in (128, 256, 512, 1024)),
    *(_square(length, False) for length in (256, 1024)),
    _square(512, True, "bfloat16"),
]
QUICK_ON_GPU = sorted(
    (case for case in cases.LONG if case.dtype == "bfloat16" and case.Sq in (512, 2048, 8192)),
    key=lambda case: (case.D, not case.causal, case.Sq),
)


def _preset(name, on_gpu):
    if name == "quick":
        if on_gpu:
            return Preset(QUICK_ON_GPU, FEW_ON_GPU, ONE_WAY, cases.TABLES["module"][:1])
        return Preset(QUICK, FEW, ONE_WAY, [_square(256, False)])
    chosen = cases.LONG if name == "paper" else cases.TABLES["all"] + cases.OPTIONS
    names = providers.usual("cuda") if on_gpu else FRUGAL
    return Preset(chosen, names, list(attention.MODES), cases.TABLES["module"] if on_gpu and name == "full" else [])


def choose(given, on_gpu: bool) -> Preset:
    """What the options of the command ask for."""
    found = _preset(given.preset or "quick", on_gpu)
    if given.shape:
        dtypes = given.dtype or ["bfloat16" if on_gpu else "float32"]
        chosen = [_shape(text, given.causal, dtype) for text in given.shape for dtype in dtypes]
        names = FEW_ON_GPU if on_gpu else FEW
    else:
        chosen = [case for case in found.cases if case.causal or not given.causal]
        if given.dtype:
            chosen = [case._replace(dtype=dtype) for dtype in given.dtype for case in chosen]
        names = found.providers
    asked = _list("providers", given.providers, [*providers.PROVIDERS, *providers.ASIDE, *_backends(), MODULES])
    names = [name for name in asked if name != MODULES] if asked else names
    modules = [] if given.shape or asked else found.modules
    if MODULES in asked:
        modules = (
            [case for case in chosen if case.Hq == case.Hkv and case.Sq == case.Sk] if given.shape else found.modules
        )
        if not modules:
            raise Problem(f"providers: {MODULES} needs as many kv heads as heads, and as many keys as queries")
    modes = _list("mode", given.mode, attention.MODES) or (ONE_WAY if given.shape else found.modes)
    return Preset(list(dict.fromkeys(chosen)), names, modes, modules)


def device() -> str:
    """Where they are measured: never in an interpreter, whose times say nothing."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _backends():
    return [f"fusedattn:{name}" for name in BACKENDS]


def _list(option, texts, known):
    """The names in comma lists, each once; a Problem that names those there are not."""
    named = list(dict.fromkeys(name.strip() for text in texts or () for name in text.split(",")))
    unknown = [name for name in named if name not in known]
    if unknown:
        raise Problem(f"{option}: there is no {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    return named


def _shape(text, causal, dtype):
    try:
        batch, heads, kv_heads, rows, keys, dim = map(int, text.split(","))
    except ValueError:
        raise Problem(f"shape: expected six whole numbers B,Hq,Hkv,Sq,Sk,D, got {text}") from None
    if min(batch, heads, kv_heads, rows, keys, dim) < 1:
        raise Problem(f"shape: expected 1 or more of each, got {text}")
    if heads % kv_heads:
        raise Problem(f"shape: expected Hq to be a multiple of Hkv, got {text}")
    return Case(batch, heads, kv_heads, rows, keys, dim, dim, causal, dtype)
