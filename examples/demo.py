"""A small language model learns a text, and its attention is checked against float64.    python examples/demo.py

The model predicts the next byte. The program trains it, on the GPU or otherwise on the CPU; compares outputs and
gradients of fused attention with float64; writes text with a cache; times fused attention beside the formula and
PyTorch's; and plots the attention. The exit status is 1 if a check fails. --help lists the options.
"""

import argparse
import copy
import functools
import importlib.util
import itertools
import math
import os
import pathlib
import re

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import benchmark

import fusedattn as fa
from fusedattn.testing.compare import compare, with_gradients
from fusedattn.testing.tolerance import verdict, verdicts

CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 64, 128, 4, 2, 0.1
BATCH, RATE, SHORTEST = 12, 1.5e-3, 1000  # SHORTEST: bytes of text
DTYPES = torch.float32, torch.float16, torch.bfloat16  # for checks of the kernels


def by(function, **options):
    """Return causal attention by a function, as `Model` calls it."""
    return lambda layer, query, key, value: function(query, key, value, causal=True, **options)


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm and added to its input."""

    def __init__(self):
        super().__init__()
        self.project = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.LayerNorm(WIDTH), fa.layers.FeedForward(WIDTH, 4 * WIDTH, DROPOUT))

    def forward(self, x, attend):  # (B, S, WIDTH)
        query, key, value = self.project(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # each (B, H, S, D)
        x = x + self.out(attend(query, key, value).transpose(1, 2).flatten(2))
        return x + self.feed_forward(x)


class Model(nn.Module):
    """tokens (B, S) at positions from `first` on -> logits (B, S, 256) of the next byte."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens, attend, first=0):
        x = self.tokens(tokens) + self.positions.weight[first : first + tokens.shape[1]]
        for layer, block in enumerate(self.blocks):
            x = block(x, functools.partial(attend, layer))
        return self.head(x)


def loss_of(model, windows):
    """Return the mean cross entropy in bits for windows (B, S + 1)."""
    logits = model(windows[:, :-1], by(fa.attention))
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) / math.log(2)


def train(model, windows, held_out, steps):
    """Return [(step, bits a byte in training, bits a byte of the held-out text)]."""
    optimizer, points, losses = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1), [], []
    print("step  bits a byte  held out")
    for step in range(steps + 1):
        loss = loss_of(model.train(), windows[torch.randint(len(windows), (BATCH,))])
        losses.append(loss.detach())
        if step % max(1, steps // 30) == 0 or step == steps:
            with torch.no_grad():
                points.append((step, torch.stack(losses).mean().item(), loss_of(model.eval(), held_out).item()))
            losses = []
            if len(points) % 6 == 1:
                print("{:4}  {:11.2f}  {:8.2f}".format(*points[-1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return points


@torch.no_grad()
def write(model, prompt, count, cached):
    """Return (tokens (1, S + count), logits (1, count, 256)): the prompt with new bytes, and their logits.

    With a cache of keys and values, each step computes the new tokens alone.
    """
    caches = torch.empty(LAYERS, 2, 1, HEADS, CONTEXT, WIDTH // HEADS, device=prompt.device)
    tokens, logits, read = prompt, [], 0
    for _ in range(count):
        lengths = torch.full((1,), read, dtype=torch.int32, device=prompt.device)
        decode = functools.partial(fa.attention_decode, cache_seqlens=lengths, causal=True)

        def attend(layer, query, key, value, decode=decode):
            return decode(query, *caches[layer], new_key=key, new_value=value)

        seen = model(tokens[:, read:], attend, read) if cached else model(tokens[:, -CONTEXT:], by(fa.attention))
        logits.append(seen[:, -1])
        read = tokens.shape[1]
        tokens = torch.cat([tokens, (logits[-1] / 0.6).softmax(-1).multinomial(1)], 1)
    return tokens, torch.stack(logits, 1)


def results(model, windows, attend):
    """Return {"logits": logits, MODULE: the gradients of its parameters as one vector}."""
    model.zero_grad()
    logits = model(windows[:, :-1], attend)
    F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum").backward()
    # One vector per module: the bias of the keys has gradient 0, so alone it would be pure rounding.
    gradients = {name: [x.grad.flatten() for x in one.parameters(recurse=False)] for name, one in model.named_modules()}
    return {"logits": logits} | {name: torch.cat(parts) for name, parts in gradients.items() if parts}


def inputs_of(model, tokens):
    inputs = []

    def attend(layer, *heads):
        inputs.append([x.detach() for x in heads])
        return fa.attention(*heads, causal=True)

    model(tokens, attend)
    return inputs


def checks(model, windows, prompt, on_kernels):
    """Yield (name, {result: verdict}) of the model, of the kernels on its activations, and of generation."""
    exact = copy.deepcopy(model).double()
    wanted = results(exact, windows, by(fa.reference.attention))
    eager = results(model, windows, by(fa.reference.eager))
    yield "the model", verdicts(results(model, windows, by(fa.attention)), eager, wanted)
    if on_kernels:
        by_kernels = results(model, windows, by(fa.attention, backend="triton"))
        yield "the model by Triton", verdicts(by_kernels, eager, wanted)
        for (layer, heads), dtype in itertools.product(enumerate(inputs_of(model, windows[:, :-1]), 1), DTYPES):
            tensors = dict(zip(("query", "key", "value"), (x.to(dtype) for x in heads), strict=True))
            tensors |= dict(out=torch.randn_like(tensors["query"]), lse=torch.randn_like(heads[0][..., 0]))  # gradients
            got = with_gradients(fa.attention, tensors, dict(causal=True), backend="triton")
            yield f"layer {layer} by Triton, {str(dtype)[6:]}", compare(got, tensors, dict(causal=True))
    count = CONTEXT + 1 - prompt.shape[1]
    tokens, logits = write(model, prompt, count, cached=True)
    with torch.no_grad():
        eager = model(tokens[:, :-1], by(fa.reference.eager))[:, -count:]
        wanted = exact(tokens[:, :-1], by(fa.reference.attention))[:, -count:]
    yield f"{count} bytes written with a cache", dict(logits=verdict(logits, eager, wanted))


def milliseconds(function):
    timer = benchmark.Timer("function()", globals=dict(function=function), num_threads=torch.get_num_threads())
    return 1e3 * timer.blocked_autorange(min_run_time=0.2).median


def time_attention(device):
    functions = {
        "fused": functools.partial(fa.attention, causal=True),
        "naive": functools.partial(fa.reference.eager, causal=True),
        "torch": functools.partial(F.scaled_dot_product_attention, is_causal=True),
    }
    shapes = {(BATCH, HEADS, CONTEXT, WIDTH // HEADS): torch.float32}
    if device == "cuda":
        shapes[4, 16, 2048, 64] = torch.bfloat16
    for (shape, dtype), (name, function) in itertools.product(shapes.items(), functions.items()):
        inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        step = functools.partial(function, *inputs)
        forward = milliseconds(torch.no_grad()(step))
        both = milliseconds(lambda step=step, inputs=inputs: torch.autograd.grad(step(), inputs, inputs[0]))
        print(f"{name} {shape}, {str(dtype)[6:]}: {forward:.3f} ms forward, {both:.3f} ms with the backward")


def draw(path, points, model, prompt):
    """Save a plot of the losses, and of the attention in the last layer."""
    from matplotlib.figure import Figure

    _, weights = fa.attention(*inputs_of(model, prompt)[-1], causal=True, return_weights=True)  # (1, H, S, S)
    figure = Figure(figsize=(13.2, 7.0), dpi=150, layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.4, 2.2))
    axes, (steps, *losses) = left.subplots(), zip(*points, strict=True)
    for name, heights in zip(("train", "held out"), losses, strict=True):
        axes.plot(steps, heights, linewidth=2, label=f"{name} {heights[-1]:.2f}")
    axes.set(xlabel="step", ylabel="bits a byte", ylim=(0, None), title="A byte-level language model learns")
    axes.legend()
    visible = torch.ones(weights.shape[2:], dtype=torch.bool).tril()
    fa.plot.attention_map(weights, text_of(prompt), mask=visible, top=1.0, figure=right)
    figure.savefig(path, format="png")


def text_of(tokens):
    """Return the text of tokens (1, S), with ? for unprintable bytes."""
    return "".join(chr(byte) if 32 <= byte < 127 or byte == 10 else "?" for byte in tokens[0].tolist())


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Train a small language model on a text, check, time and plot it.")
    readme = pathlib.Path(__file__).parent.parent / "README.md"
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE", default=readme, help="text to learn (the README)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (%(default)s)")
    parser.add_argument("--out", metavar="PNG", default="demo.png", help="file for the plot (%(default)s)")
    options = parser.parse_args(arguments)
    content = options.text.read_bytes() if options.text.is_file() else b""
    if len(content) < SHORTEST:
        parser.error(f"--text: expected a file of at least {SHORTEST} bytes, got {options.text}, {len(content)} bytes")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # Triton, imported later, then runs the kernels on CPU tensors
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # small steps wait for the slowest thread
    torch.manual_seed(0)
    data, model = torch.tensor(list(content), device=device), Model().to(device)
    learnt, kept = data.tensor_split([len(data) * 9 // 10])
    held_out = kept.unfold(0, CONTEXT + 1, CONTEXT + 1)
    print(f"{len(content):,} bytes of {options.text} on the {device}, the last tenth held out")
    points = train(model, learnt.unfold(0, CONTEXT + 1, 1), held_out, options.steps)

    model.eval()
    found = re.search(rb"[A-Z][a-z]+(?: [a-z]+){3,}", content)
    prompt = torch.tensor([list((found.group() if found else content)[:28])], device=device)
    windows = held_out[: 8 if device == "cuda" else 1]  # Triton's interpreter takes a second for one
    small = torch.zeros(3, 1, 1, 16, WIDTH // HEADS, device=device)
    left_out = fa.explain(*small, backend="triton").reasons.get("triton", [])
    print("\nlargest error / that of eager PyTorch, against float64")
    right = []
    for name, judged in checks(model, windows, prompt, on_kernels=not left_out):
        worst = max(judged.values(), key=lambda one: (not one.ok, one.max_error))
        errors = f"{worst.max_error:.1e} / {worst.max_eager:.1e}"
        print(f"{errors}  {name}: {'ok' if worst.ok else 'FAIL, ' + worst.why}")
        right.append(worst.ok)
    print(*(f"The Triton kernels are not checked: {reason}" for reason in left_out), sep="\n")
    time_attention(device)
    count = CONTEXT - prompt.shape[1]
    took = [milliseconds(functools.partial(write, model, prompt, count, cached)) for cached in (True, False)]
    print("{:,.0f} tokens a second with a cache, {:,.0f} without".format(*(1e3 * count / each for each in took)))
    text = text_of(write(model, prompt, 120, cached=False)[0])
    print(f"\nAsked to go on from {text_of(prompt)!r}, it writes:\n{text}\n")
    if importlib.util.find_spec("matplotlib"):
        draw(options.out, points, model, prompt)
        print(f"Plot: {options.out}")
    print(f"{sum(right)} of {len(right)} checks passed")
    return 0 if all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
