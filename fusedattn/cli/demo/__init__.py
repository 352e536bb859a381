"""fusedattn demo: train a small language model on a text, check it, time it, draw what it attends to."""

import time
from pathlib import Path

import torch

from ...backends import explain
from ...testing.tolerance import Verdict
from .. import machine
from ..screen import Problem, Screen, compared, error, need
from . import converted, text as texts
from .generation import continuation, greedy, speeds
from .model import HEADS, WIDTH, LanguageModel
from .timing import times
from .training import BATCH, bits, byte_frequencies, train
from .verify import Check, generation, kernels, whole_model


def run(given) -> int:
    screen, began = Screen(given.json), time.monotonic()
    need("matplotlib")
    text = texts.load(given.text)
    if not Path(given.out).resolve().parent.is_dir():
        raise Problem(f"out: there is no folder {Path(given.out).resolve().parent}")
    device = machine.device()
    if device == "cpu":
        # Steps this small wait for the slowest thread: on cores shared with others fewer are faster.
        torch.set_num_threads(min(torch.get_num_threads(), max(1, machine.cores() // 2)))
    torch.manual_seed(given.seed)
    model = LanguageModel().to(device)

    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU, by the naive path"
    count = sum(parameter.numel() for parameter in model.parameters())
    screen.say(f"A model of {count:,} parameters learns {text.name}, {len(text.content):,} bytes, on {where}.\n")
    with screen.progress("training", given.steps, keep=True) as advance:
        points = train(model, text, given.steps, device, given.seed, advance)
    screen.table("Loss", ["step", "train", "bits a byte", "held out", "bits a byte"], _losses(points))

    reasons = _reasons(device)
    fused = [] if reasons else ["triton"]
    windows = text.held_out[: 8 if device == "cuda" else 1].to(device)  # an interpreter takes seconds for each
    model_checks = [one for backend in (None, *fused) for one in whole_model(model, windows, backend)]
    kernel_checks = [one for backend in fused for one in kernels(model, windows[:, :-1], backend)]
    _show_checks(screen, model_checks, kernel_checks, reasons, device)

    timed = _times(device, reasons)
    columns = ["(B, H, S, D)", "dtype", "", "forward", "forward + backward"]
    screen.table("Milliseconds of causal attention, median", columns, [_time(one) for one in timed])

    for why in dict.fromkeys(one.why for one in timed if one.why):
        screen.say(f"The fused kernels are not timed: {why}\n")

    encoder, (x, padding) = converted.encoder().to(device), converted.batch(device)
    converted_checks, steps = list(converted.checks(encoder, x, padding)), converted.steps(encoder, x, padding)
    _show_conversion(screen, converted_checks, steps)

    sentence = texts.sentence(text)
    prompt = torch.tensor([list(sentence.encode())], device=device)
    without, cached = (greedy(model, prompt, cached) for cached in (False, True))
    generation_checks = generation(model, without, cached)
    tokens_a_second = speeds(model, prompt)
    _show_generation(screen, sentence, without, cached, generation_checks, tokens_a_second)
    written = continuation(model, sentence.encode(), 100, torch.Generator().manual_seed(given.seed))
    screen.say(f"Asked to go on from {sentence!r}, it writes:\n{written}\n")
    _draw(given.out, text, points, model, sentence, prompt)

    checks = model_checks + kernel_checks + generation_checks + converted_checks
    wrong = [one for one in checks if not one.verdict.ok]
    for one in wrong:
        screen.say(f"FAIL {one.what}, {one.result}: {one.verdict.why}", style="red")
    seconds = round(time.monotonic() - began, 1)
    screen.say(
        f"{len(checks) - len(wrong)} of {len(checks)} checks hold. {given.out} is drawn. ({seconds} s)", style="bold"
    )
    found = dict(ok=not wrong, seconds=seconds, versions=machine.versions(), device=where, text=text.name)
    found |= dict(bytes=len(text.content), parameters=count, losses=[point._asdict() for point in points])
    found |= dict(checks=[dict(what=one.what, result=one.result) | one.verdict._asdict() for one in checks])
    found |= dict(
        times=[one._asdict() for one in timed],
        converted=[one._asdict() for one in steps],
        left_out=reasons,
        tokens_a_second=tokens_a_second,
        continuation=written,
        picture=given.out,
    )
    screen.finish(found)
    return 1 if wrong else 0


def _reasons(device):
    """Why the fused kernels cannot be checked here; none on a GPU, nor where Triton can interpret them."""
    small = torch.zeros(1, 1, 16, 16, device=device)
    return explain(small, small, small, backend="triton").reasons.get("triton", [])


def _losses(points):
    """Some rows of the losses, the first and the last among them."""
    chosen = sorted({round(part * (len(points) - 1) / 6) for part in range(7)})
    shown = [points[index] for index in chosen]
    return [
        [str(p.step), f"{p.train:.3f}", f"{bits(p.train):.2f}", f"{p.held_out:.3f}", f"{bits(p.held_out):.2f}"]
        for p in shown
    ]


def _show_checks(screen, model_checks: list[Check], kernel_checks: list[Check], reasons, device):
    how = "" if device == "cuda" else " (interpreted)"
    rows = []
    for what, (logits, *gradients) in _by_what(model_checks).items():
        worst = max(gradients, key=lambda one: (not one.ok, one.max_error / one.max_allowed))
        good = f"{sum(one.ok for one in gradients)} of {len(gradients)}"
        ok = logits.ok and all(one.ok for one in gradients)
        name = what + how * what.startswith("by")
        rows.append([name, compared(logits), compared(worst), good, "ok" if ok else "FAIL"])
    title = "The trained model: largest error / that of the same model with PyTorch's attention, against float64"
    screen.table(title, ["attention", "outputs", "gradients, the worst", "gradients right", ""], rows, marks=True)
    rows = [
        [what, *map(compared, results), "ok" if all(one.ok for one in results) else "FAIL"]
        for what, results in _by_what(kernel_checks).items()
    ]
    if rows:
        title = f"The fused kernels{how} on its activations: largest error / that of eager PyTorch, against float64"
        screen.table(title, ["", "out", "lse", "d query", "d key", "d value", ""], rows, marks=True)
    for reason in reasons:
        screen.say(f"The fused kernels are not checked: {reason}")


def _show_conversion(screen, checks: list[Check], steps: list[converted.Step]):
    rows = [[one.what, one.result, compared(one.verdict), "ok" if one.verdict.ok else "FAIL"] for one in checks]
    title = "model = fa.compat.torch.convert(model): largest error / that before, against float64"
    screen.table(title, ["", "", "", ""], rows, marks=True)
    times = [
        [step.what, f"{step.before:.2f}", f"{step.after:.2f}", f"{step.before / step.after:.2f}"] for step in steps
    ]
    screen.table("Milliseconds of a step of it, median", ["", "before", "after", "ratio"], times)


def _show_generation(screen, sentence, without, cached, checks: list[Check], tokens_a_second):
    logits, chosen = (one.verdict for one in checks)
    equal = torch.equal(without.tokens, cached.tokens)
    same = "the same" if equal else f"part at a difference of {error(chosen.max_error)}"
    columns = ["", "tokens a second", "logits: error / of PyTorch's attention", "bytes", ""]
    rows = [[what, f"{each:,.0f}", "", "", ""] for what, each in tokens_a_second.items()]
    rows[-1][2:] = [compared(logits), same, "ok" if logits.ok and chosen.ok else "FAIL"]
    screen.table(f"The likeliest {cached.generated} bytes after {sentence!r}", columns, rows, marks=True)
    screen.say(f"{texts.CONTEXT} bytes are soon read again: what a cache saves grows with the text.\n")


def _by_what(checks: list[Check]) -> dict[str, list[Verdict]]:
    return {what: [one.verdict for one in checks if one.what == what] for what in dict.fromkeys(c.what for c in checks)}


def _times(device, reasons):
    shape = (BATCH, HEADS, texts.CONTEXT, WIDTH // HEADS)
    if device == "cpu":
        return times(shape, torch.float32, device, ["there is no GPU, and an interpreter is no clock"])
    longer = (4, HEADS, 2048, WIDTH // HEADS)
    return times(shape, torch.float32, device, reasons) + times(longer, torch.bfloat16, device, reasons)


def _time(one):
    cells = ["-", "-"] if one.forward is None else [f"{one.forward:.3f}", f"{one.both:.3f}"]
    return [str(one.shape), one.dtype, one.provider, *cells]


def _draw(path, text, points, model, sentence, tokens):
    from .picture import draw

    with torch.no_grad():
        *_, (layer, x) = model.attended(tokens)
        maps = layer(x, need_weights=True)[1][0]
    draw(
        path,
        points,
        byte_frequencies(text),
        sentence,
        maps,
        f"A byte-level language model learns {Path(text.name).name}",
    )
