"""fusedattn demo: train a small language model on a text, check it, time it, draw what it attends to."""

import functools
import time

import torch
import torch.nn.functional as F

from ... import reference
from ...api import attention
from ...bench import timing
from .. import machine
from ..screen import Screen, check_output, listed, need, writing
from . import picture, text as texts, verify
from .model import DIM, HEADS, LanguageModel, write
from .training import BATCH, bits, train

BESIDE = "largest error / that of eager PyTorch, against float64"
SHAPES = {(BATCH, HEADS, texts.CONTEXT, DIM): torch.float32, (4, HEADS, 2048, DIM): torch.bfloat16}
PROVIDERS = {
    "fused": functools.partial(attention, causal=True, backend="triton"),
    "naive": functools.partial(reference.eager, causal=True),
    "torch SDPA": functools.partial(F.scaled_dot_product_attention, is_causal=True),
}


def run(arguments) -> int:
    screen, began = Screen(arguments.json), time.monotonic()
    need("matplotlib")
    text = texts.load(arguments.text)
    check_output("out", arguments.out)
    device = machine.device()
    if device == "cpu":
        # Steps this small wait for the slowest thread: on cores shared with others fewer are faster.
        torch.set_num_threads(min(torch.get_num_threads(), max(1, machine.cores() // 2)))
    torch.manual_seed(arguments.seed)
    model = LanguageModel().to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    screen.say(f"A model of {parameters:,} parameters learns {text.name}, {len(text.content):,} bytes, on {where}.\n")
    with screen.progress("training", arguments.steps, keep=True) as advance:
        points = train(model, text, arguments.steps, arguments.seed, advance)
    shown = [points[index] for index in sorted({round(part * (len(points) - 1) / 6) for part in range(7)})]
    rows = [[point.step, point.train, bits(point.train), point.held_out, bits(point.held_out)] for point in shown]
    screen.table("Loss", ["step", "train", "bits a byte", "held out", "bits a byte"], rows)

    reasons = machine.explained(device, backend="triton").reasons.get("triton", [])
    checks = _check(screen, model, text.held_out.to(device), reasons)
    times = _time(screen, device, reasons)
    of_encoder, encoder_ms = verify.conversion(device)
    screen.verdicts(f"model = fa.compat.torch.convert(model): {BESIDE}", of_encoder)
    rows = [[*step.values(), step["before"] / step["after"]] for step in encoder_ms]
    screen.table("Milliseconds of a step of it, median", ["", "before", "after", "ratio"], rows)

    sentence = texts.sentence(text)
    prompt = torch.tensor([list(sentence.encode())], device=device)
    count, ways = texts.CONTEXT + 1 - prompt.shape[1], {"without a cache": False, "with a cache": True}
    without, cached = (write(model, prompt, count, cached) for cached in ways.values())
    checks |= (of_cache := {"generated with a cache": verify.generation(model, without, cached)}) | of_encoder
    screen.verdicts(f"The likeliest {count} bytes after {sentence!r}: {BESIDE}", of_cache)
    steps = {how: functools.partial(write, model, prompt, count, cached) for how, cached in ways.items()}
    speeds = {how: 1e3 * count / timing.measure(step, device, 1000.0).p50 for how, step in steps.items()}
    said = ", ".join(f"{speed:,.0f} tokens a second {how}" for how, speed in speeds.items())
    screen.say(f"{said}. {texts.CONTEXT} bytes are soon read again: what a cache saves grows with the text.\n")
    written = texts.readable(bytes(write(model, prompt, 100, temperature=0.6)[0][0].tolist()))
    screen.say(f"Asked to go on from {sentence!r}, it writes:\n{written}\n")
    with writing("out", arguments.out):
        picture.draw(arguments.out, points, text, sentence, model.maps(prompt))

    wrong, total = screen.failures(checks), sum(map(len, checks.values()))
    seconds = round(time.monotonic() - began, 1)
    screen.say(f"{total - wrong} of {total} checks hold. {arguments.out} is drawn. ({seconds} s)", style="bold")
    answer = dict(ok=not wrong, seconds=seconds, versions=machine.versions(), device=where, text=text.name)
    answer |= dict(bytes=len(text.content), parameters=parameters, losses=[point._asdict() for point in points])
    answer |= dict(checks=listed(checks), times=times, converted=encoder_ms, left_out=reasons, tokens_a_second=speeds)
    screen.finish(answer | dict(continuation=written, picture=arguments.out))
    return 1 if wrong else 0


def _check(screen, model, windows, reasons):
    """{what: {result: verdict}} of the trained model; of the fused kernels too where no reasons speak against it."""
    most, how = (8, "") if windows.is_cuda else (1, " (interpreted)")  # an interpreter takes seconds for a window
    backends = {"as trained": None} if reasons else {"as trained": None, "by triton": "triton"}
    checks = {what: verify.whole_model(model, windows[:most], backend) for what, backend in backends.items()}
    shown: dict[str, dict] = {}
    for what, (logits, *gradients) in ((what, row.values()) for what, row in checks.items()):
        worst = max(gradients, key=lambda one: (not one.ok, one.max_error))
        shown[what] = {"outputs": logits, f"the worst of {len(gradients)} gradients": worst}
    screen.verdicts(f"The trained model: {BESIDE}", shown)
    for reason in reasons:
        screen.say(f"The fused kernels are not checked: {reason}")
    if not reasons:
        checks |= (of_kernels := verify.kernels(model, windows[:most, :-1], "triton"))
        screen.verdicts(f"The fused kernels{how} on its activations: {BESIDE}", of_kernels)
    return checks


def _time(screen, device, reasons):
    """Milliseconds of causal attention, forward and with the backward; None where reasons speak against fused."""
    reasons = reasons if device == "cuda" else ["there is no GPU, and an interpreter is no clock"]
    rows = []
    for shape, dtype in list(SHAPES.items())[: 1 if device == "cpu" else 2]:
        inputs = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]
        for name, function in PROVIDERS.items():
            why = "; ".join(reasons) if name == "fused" else ""
            forward, both = (None, None) if why else _milliseconds(function, inputs)
            about = dict(shape=shape, dtype=str(dtype).removeprefix("torch."), provider=name)
            rows.append(about | dict(forward=forward, both=both, why=why))
    columns = ["(B, H, S, D)", "dtype", "", "forward", "forward + backward"]
    screen.table("Milliseconds of causal attention, median", columns, [list(row.values())[:5] for row in rows])
    if reasons:
        screen.say(f"The fused kernels are not timed: {'; '.join(reasons)}\n")
    return rows


def _milliseconds(function, inputs):
    learned = [x.detach().requires_grad_() for x in inputs]
    steps = functools.partial(function, *inputs), lambda: torch.autograd.grad(function(*learned), learned, inputs[0])
    return [timing.measure(step, inputs[0].device, 400.0).p50 for step in steps]
