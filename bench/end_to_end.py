"""How many tokens a second does a whole model take?    python -m fusedattn.bench.end_to_end

The language model of `fusedattn demo`, 2 layers of 4 heads of 32 on 64 tokens, with our attention, torch's and the
eager formula: forward, the logits in evaluation mode; train, a step as the demo takes it, from the loss to AdamW.
So small a model is mostly the rest of it, and the host: in the demo's batch of 12 that is what is timed.
"""

import copy
import functools
import sys

import torch
import torch.nn.functional as F
from torch import nn

import fusedattn as fa
from fusedattn.cli.demo import model as demo
from fusedattn.cli.demo.text import CONTEXT
from fusedattn.cli.demo.training import BATCH, RATE
from fusedattn.testing.tolerance import verdicts

from . import accuracy, attention, cases, command, rows, table, timing

MODES = ("forward", "train")
HEADS, DIM = demo.HEADS, demo.WIDTH // demo.HEADS


def _case(batch, dtype):
    return cases.Case(batch, HEADS, HEADS, CONTEXT, CONTEXT, DIM, DIM, True, dtype, "model=demo")


CASES = {
    "cpu": [_case(BATCH, "float32")],
    "cuda": [_case(BATCH, "float32"), _case(1024, "bfloat16"), _case(1024, "float32")],
}


class Attention(nn.Module):
    """An attention layer of the demo's, by another function."""

    def __init__(self, layer, function):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj
        self.function = function

    def forward(self, x):
        return self.out_proj(self.function(*demo.heads(self, x)).transpose(1, 2).flatten(2)), None


def draw(case, device):
    """(the model, windows (B, S + 1) of random bytes)."""
    torch.manual_seed(cases.SEED)
    model = demo.LanguageModel().to(device, getattr(torch, case.dtype))
    return model, torch.randint(256, (case.B, case.Sq + 1)).to(device)


def by(model, function):
    """A copy of a model whose attention is a function of query, key and value."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attention = Attention(block.attention, function)
    return model


def models(case, model):
    """{provider: the model with it}"""
    heads = model.positions.weight.new_empty(()).expand(case.B, HEADS, CONTEXT, DIM)
    ours = f"fusedattn:{fa.explain(heads, heads, heads, causal=True).backend}"
    return {
        ours: copy.deepcopy(model),
        "sdpa": by(model, functools.partial(F.scaled_dot_product_attention, is_causal=True)),
        "naive": by(model, functools.partial(fa.reference.eager, causal=True)),
    }


def step(mode, model, windows):
    """What is timed: a closure."""
    model.train(mode == "train")
    if mode == "forward":

        def forward():
            with torch.no_grad():
                return model(windows[:, :-1])

        return forward
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)

    def train():
        loss = model.loss(windows)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return train


def results(model, windows):
    """{"logits" in evaluation mode, "gradient" of the loss by all parameters}"""
    model.eval()
    found = torch.autograd.grad(model.loss(windows), list(model.parameters()))
    with torch.no_grad():
        return {"logits": model(windows[:, :-1]), "gradient": torch.cat([each.flatten() for each in found])}


def time_all(device, writer, machine, budget_ms=100.0):
    """Measure, a row each."""
    for case in CASES[torch.device(device).type]:
        model, windows = draw(case, device)
        judged = windows[:BATCH]
        exact = results(by(model.double(), functools.partial(fa.reference.attention, causal=True)), judged)
        model.to(getattr(torch, case.dtype))
        made = models(case, model)
        eager = results(made["naive"], judged)
        for provider, one in made.items():
            right = verdicts(results(one, judged), eager, exact)
            for mode, name in zip(MODES, right, strict=True):
                answer = accuracy.worst({name: right[name]})
                try:
                    found, said = attention.columns(
                        step(mode, one, windows),
                        lambda _, answer=answer: answer,
                        case.dtype,
                        device,
                        budget_ms,
                        timing.measure,
                    )
                except Exception as error:  # a row like any other
                    found, said = dict(status=attention.status(error)), ""
                writer.write(rows.row(machine, mode, provider, case, **found))
                if said:
                    print(f"{case.name} {provider} {mode}: {said}", file=sys.stderr)


def told(written):
    """A line a case and mode: tokens a second with each attention, and how many times as many are ours."""
    found = {}
    for row in written:
        if row.ms_p50 != "":
            found.setdefault((row.B, row.dtype, row.mode), {})[row.provider] = row
    for (batch, dtype, mode), timed in found.items():
        mine = table.ours(timed.values())
        speeds = {name: f"{1e3 * batch * CONTEXT / row.ms_p50:,.0f}" for name, row in timed.items()}
        over = {name: f" ({row.ms_p50 / mine.ms_p50:.2f})" if mine else "" for name, row in timed.items()}
        said = ", ".join(f"{name} {speeds[name]}{over[name]} {row.status}" for name, row in timed.items())
        yield f"{batch} x {CONTEXT} tokens, {dtype}, {mode}, tokens a second: {said}"


def main(arguments=None):
    options = command.parser(__doc__).parse_args(arguments)
    writer, machine = rows.Writer(options.csv), rows.machine(options.device, options.commit)
    time_all(options.device, writer, machine, options.repeat_ms)
    print("\n".join(told(table.last_run(writer.rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
