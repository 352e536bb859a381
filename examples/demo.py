"""A small language model learns a text, and its attention is checked against float64.    python examples/demo.py

The model predicts the next byte. The program trains it, on the GPU or otherwise on the CPU; compares outputs and
gradients of fused attention with float64; times it beside the formula and PyTorch's attention; writes text; and plots
the attention. The exit status is 1 if a check fails. --help lists the options.
"""

import argparse
import copy
import importlib.util
import itertools
import math
import os
import pathlib
import re

import torch
import torch.nn.functional as F
from fusedattn.bench import measure, report, rows
from fusedattn.bench.cases import Case
from torch import nn

import fusedattn as fa
from fusedattn.testing.compare import compare, with_gradients
from fusedattn.testing.tolerance import verdicts

CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 64, 128, 4, 2, 0.1
BATCH, RATE, SHORTEST = 12, 1.5e-3, 1000  # SHORTEST: minimum number of bytes of text
DTYPES = torch.float32, torch.float16, torch.bfloat16  # for checks of the kernels


class Model(nn.Module):
    """tokens (B, S) -> logits (B, S, 256) of the next byte."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.encoder = fa.layers.TransformerEncoder(LAYERS, WIDTH, HEADS, 4 * WIDTH, DROPOUT, causal=True)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def inputs(self, tokens):
        """Return the input of each layer, and of the head."""
        xs = [self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]]
        for layer in self.encoder.layers:
            xs.append(layer(xs[-1]))
        return xs

    def forward(self, tokens):
        return self.head(self.inputs(tokens)[-1])


def heads_of(layer, x):
    """Return the query, key and value (B, H, S, D) of a layer's attention to its input x."""
    x, attention = layer.layer_norm_1(x), layer.attention
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    return [project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in projections]


def loss_of(logits, windows, **options):
    """Return the cross entropy of logits for windows (B, S + 1) of bytes."""
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), **options)


def train(model, windows, held_out, steps):
    """Return [(step, loss in training, loss on the held-out text)], with losses in bits a byte."""
    optimizer, points, losses = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1), [], []
    print("step  bits a byte  held out")
    for step in range(steps + 1):
        chosen = windows[torch.randint(len(windows), (BATCH,))]
        loss = loss_of(model.train()(chosen[:, :-1]), chosen) / math.log(2)
        losses.append(loss.detach())
        if step % max(1, steps // 30) == 0 or step == steps:
            with torch.no_grad():
                bits = loss_of(model.eval()(held_out[:, :-1]), held_out).item() / math.log(2)
            points.append((step, torch.stack(losses).mean().item(), bits))
            losses = []
            if len(points) % 6 == 1:
                print("{:4}  {:11.2f}  {:8.2f}".format(*points[-1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return points


@torch.no_grad()
def write(model, tokens, count):
    """Return tokens (1, S) with `count` new bytes."""
    for _ in range(count):
        logits = model(tokens[:, -CONTEXT:])[:, -1]
        tokens = torch.cat([tokens, (logits / 0.6).softmax(-1).multinomial(1)], 1)
    return tokens


def results(model, windows, backend=None):
    """Return {"logits": logits, name of a module: gradients of its parameters as one vector}."""
    model.zero_grad()
    with fa.use_backend(backend):
        logits = model(windows[:, :-1])
        loss_of(logits, windows, reduction="sum").backward()
    # One vector per module: the bias of the keys has gradient 0, so alone it would be pure rounding.
    gradients = {name: [x.grad.flatten() for x in one.parameters(recurse=False)] for name, one in model.named_modules()}
    return {"logits": logits} | {name: torch.cat(parts) for name, parts in gradients.items() if parts}


def checks(model, windows, on_kernels):
    """Yield (name, {result: verdict}) of the model, and of the kernels on its activations."""
    wanted = results(copy.deepcopy(model).double(), windows, "naive")
    formula = results(model, windows, "naive")
    yield "the model", verdicts(results(model, windows), formula, wanted)
    if on_kernels:
        yield "the model by Triton", verdicts(results(model, windows, "triton"), formula, wanted)
        layers = zip(model.encoder.layers, model.inputs(windows[:, :-1]), strict=False)
        for (number, (layer, x)), dtype in itertools.product(enumerate(layers, 1), DTYPES):
            query, key, value = (x.detach().to(dtype) for x in heads_of(layer, x))
            tensors = dict(query=query, key=key, value=value)
            tensors |= dict(out=torch.randn_like(query), lse=torch.randn(query.shape[:3], device=query.device))
            got = with_gradients(fa.attention, tensors, dict(causal=True), backend="triton")
            yield f"layer {number} by Triton, {str(dtype)[6:]}", compare(got, tensors, dict(causal=True))


def time_attention(device):
    some = [Case(BATCH, HEADS, HEADS, CONTEXT, CONTEXT, WIDTH // HEADS, WIDTH // HEADS, True, "float32")]
    if device == "cuda":
        some.append(Case(4, 16, 16, 2048, 2048, 64, 64, True, "bfloat16"))
    names, modes = ("fusedattn", "naive", "sdpa"), ("forward", "forward_backward")
    timed = measure.measure(rows.machine(device), some, names, modes, device)
    print(*report.lines([row for row, _ in timed]), sep="\n")


def draw(path, points, model, prompt):
    """Save a plot of the losses, and of the attention in the last layer."""
    from matplotlib.figure import Figure

    heads = heads_of(model.encoder.layers[-1], model.inputs(prompt)[-2])
    _, weights = fa.attention(*heads, causal=True, return_weights=True)  # (1, H, S, S)
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
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # more threads made small steps slower
    torch.manual_seed(0)
    data, model = torch.tensor(list(content), device=device), Model().to(device)
    learnt, kept = data.tensor_split([len(data) * 9 // 10])
    held_out = kept.unfold(0, CONTEXT + 1, CONTEXT + 1)
    print(f"{len(content):,} bytes of {options.text} on the {device}, the last tenth held out")
    points = train(model, learnt.unfold(0, CONTEXT + 1, 1), held_out, options.steps)

    model.eval()
    windows = held_out[: 8 if device == "cuda" else 1]  # Triton's interpreter takes a second for each window
    heads = heads_of(model.encoder.layers[0], model.inputs(windows[:, :-1])[0])
    left_out = fa.explain(*heads, backend="triton").reasons.get("triton", [])
    print("\nlargest error / that of eager PyTorch, against float64")
    right = []
    for name, judged in checks(model, windows, on_kernels=not left_out):
        worst = max(judged.values(), key=lambda one: (not one.ok, one.max_error))
        errors = f"{worst.max_error:.1e} / {worst.max_eager:.1e}"
        print(f"{errors}  {name}: {'ok' if worst.ok else 'FAIL, ' + worst.why}")
        right.append(worst.ok)
    print(*(f"The Triton kernels are not checked: {reason}" for reason in left_out), sep="\n")
    time_attention(device)
    found = re.search(rb"[A-Z][a-z]+(?: [a-z]+){3,}", content)
    prompt = torch.tensor([list((found.group() if found else content)[:28])], device=device)
    print(f"\nAsked to go on from {text_of(prompt)!r}, it writes:\n{text_of(write(model, prompt, 120))}\n")
    if importlib.util.find_spec("matplotlib"):
        draw(options.out, points, model, prompt)
        print(f"Plot: {options.out}")
    print(f"{sum(right)} of {len(right)} checks passed")
    return 0 if all(right) else 1


if __name__ == "__main__":
    raise SystemExit(main())
