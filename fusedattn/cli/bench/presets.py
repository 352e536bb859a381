"""What is measured: the cases, providers and modes of a preset, and what options make of them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...backends import BACKENDS
from ...bench import cases, cpu, engine, module, providers
from ...bench.cases import Case
from ..screen import Problem


class Preset(NamedTuple):
    """Cases x providers x modes; and cases of whole modules, if there are any, which bring their own providers.

    On a CPU instead of these the parts of the question what its user gets, if there are any.
    """

    cases: list[Case]
    providers: list[str]
    modes: list[str]
    modules: list[Case] = []
    parts: Sequence[cpu.Part] = ()


ONE_WAY = ["forward", "backward"]
MODULES = "torch.nn"  # torch's module, which only another module can be set beside
# "sdpa" is what a user who names no backend has now.
FEW = ["fusedattn", "sdpa", "naive", "sdpa:math"]
FEW_ON_GPU = ["fusedattn", "sdpa", "sdpa:cudnn", "sdpa:flash", "sdpa:efficient", "naive"]
FRUGAL = ["fusedattn", "sdpa"]  # none that holds all pairs at once: on a CPU those of a long case may take all memory
_SQUARES = [
    Case(2, 4, 4, length, length, 64, 64, causal, "float32")
    for causal, lengths in ((True, (128, 256, 512, 1024)), (False, (256, 1024)))
    for length in lengths
]
QUICK = [*_SQUARES, _SQUARES[2]._replace(dtype="bfloat16")]
QUICK_ON_GPU = sorted(
    (case for case in cases.LONG if case.dtype == "bfloat16" and case.Sq in (512, 2048, 8192)),
    key=lambda case: (case.D, not case.causal, case.Sq),
)


def _preset(name, on_gpu):
    if name == "quick" and on_gpu:
        return Preset(QUICK_ON_GPU, FEW_ON_GPU, ONE_WAY, cases.MODULE[:1])
    if name == "quick":
        return Preset(QUICK, FEW, ONE_WAY, [QUICK[1]._replace(causal=False, options="module")], cpu.SIZES[name])
    chosen = cases.LONG if name == "paper" else cases.TABLES["all"] + cases.OPTIONS
    names = providers.usual("cuda") if on_gpu else FRUGAL
    modules, parts = (cases.MODULE, ()) if on_gpu else ([], cpu.SIZES.get(name, ()))
    return Preset(chosen, names, list(engine.MODES), modules if name == "full" else [], parts)


def choose(arguments, on_gpu: bool) -> Preset:
    """What the options of the command ask for."""
    preset, shapes = _preset(arguments.preset or "quick", on_gpu), arguments.shape
    if preset.parts and not (shapes or arguments.dtype or arguments.causal or arguments.mode or arguments.providers):
        return preset
    if shapes:
        dtypes = arguments.dtype or ["bfloat16" if on_gpu else "float32"]
        chosen = [shape(text, arguments.causal, dtype) for text in shapes for dtype in dtypes]
        preset = Preset(chosen, FEW_ON_GPU if on_gpu else FEW, ONE_WAY)
    else:
        chosen = [case for case in preset.cases if case.causal or not arguments.causal]
        if arguments.dtype:
            chosen = [case._replace(dtype=dtype) for dtype in arguments.dtype for case in chosen]
    backends = (f"fusedattn:{name}" for name in BACKENDS)
    known = dict.fromkeys((*providers.PROVIDERS, *providers.ASIDE, *backends, MODULES))
    asked = _list("providers", arguments.providers, [*known])
    modules = [] if asked else preset.modules
    if MODULES in asked:
        squares = [case._replace(options="module") for case in chosen if case.Hq == case.Hkv and case.Sq == case.Sk]
        modules = squares if shapes else preset.modules
        if not modules:
            raise Problem(f"providers: {MODULES} needs as many kv heads as heads, and as many keys as queries")
    names = [name for name in asked if name != MODULES] if asked else preset.providers
    modes = _list("mode", arguments.mode, engine.MODES) or preset.modes
    return Preset(list(dict.fromkeys(chosen)), names, modes, modules)


def units(preset: Preset, threads: Sequence[int] = (1,)) -> list[tuple[Case, str, str]]:
    """(case, provider, mode) of each row. A module is timed forward, and as it is trained: forward and backward.

    threads: how many there are, one after another, of the parts.
    """
    if preset.parts:
        return cpu.units(preset.parts, threads)
    forward, training = module.MODES
    modes = [forward] * (forward in preset.modes) + [training] * (preset.modes != [forward])
    of_modules = engine.units(preset.modules, module.PROVIDERS, modes)
    return engine.units(preset.cases, preset.providers, preset.modes) + of_modules


def device() -> str:
    """Where they are measured: never in an interpreter, whose times say nothing."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _list(option, texts, known):
    """The names in comma lists, each once; a Problem that names those there are not."""
    named = list(dict.fromkeys(name.strip() for text in texts or () for name in text.split(",")))
    unknown = [name for name in named if name not in known]
    if unknown:
        raise Problem(f"{option}: there is no {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
    return named


def shape(text: str, causal: bool, dtype: str) -> Case:
    try:
        sizes = batch, heads, kv_heads, rows, keys, dim = [int(number) for number in text.split(",")]
    except ValueError:
        raise Problem(f"shape: expected six whole numbers B,Hq,Hkv,Sq,Sk,D, got {text}") from None
    if min(sizes) < 1:
        raise Problem(f"shape: expected 1 or more of each, got {text}")
    if heads % kv_heads:
        raise Problem(f"shape: expected Hq to be a multiple of Hkv, got {text}")
    if batch * max(heads, kv_heads) * max(rows, keys) * max(rows, keys, dim) >= 2**60:
        raise Problem(f"shape: expected sizes that some machine has memory for, got {text}")
    return Case(batch, heads, kv_heads, rows, keys, dim, dim, causal, dtype)
