"""Tables of the pages, from bench/results and `fusedattn.explain`; <!-- table: NAME --> becomes TABLES[NAME]()."""

import collections
import csv
import itertools
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from fusedattn.bench import report, rows

import fusedattn

RESULTS = pathlib.Path(__file__).parent.parent / "bench" / "results"
SAID = {  # {options of a row: their text in a table}; other options appear as in the CSV
    "keys=0.5": "half of the keys are padding (`key_mask`)",
    "window=64,0": "`window=(64, 0)`",
    "window=1024,0": "`window=(1024, 0)`",
    "bias": "`bias`",
    "documents=4": "four documents in a sequence, by `mask`",
    "documents=8": "eight documents in a sequence, by `mask`",
    "lengths=zipf": "sequences of many lengths",
    "lengths=uniform": "packed sequences, beside a padded batch",
    "module": "`MultiHeadAttention`, projections too",
    "filled=1": "one token after a full cache",
    "filled=0.5": "one token after a cache that is half full",
}
GPUS = {"H100, H200": (9, 0), "A100": (8, 0)}
CALLS = {"D 64": dict(D=64), "D 128": {}, "D 128, causal": dict(causal=True)}
CALLS |= {"D 128, `window=(512, 0)`": dict(window=(512, 0)), "D 256, causal": dict(D=256, causal=True)}
CALLS |= {"D 512": dict(D=512)}
OFFSETS = torch.tensor([0, 2048, 4096], dtype=torch.int32)
OPTIONS = {  # {name in a table: arguments of a call on an H100 or H200}
    "`softcap`": dict(softcap=20.0),
    "`scale` of 0 or less": dict(scale=-0.1),
    "`sinks`": dict(sinks=torch.empty(8, device="meta")),
    "`alibi_slopes`": dict(alibi_slopes=torch.empty(8, device="meta")),
    "`query_mask`": dict(query_mask=torch.empty(1, 4096, dtype=torch.bool, device="meta")),
    "`key_mask`": dict(key_mask=torch.empty(1, 4096, dtype=torch.bool, device="meta")),
    "`mask`": dict(mask=torch.empty(4096, 4096, dtype=torch.bool, device="meta")),
    "`bias`": dict(bias=torch.empty(8, 4096, 4096, dtype=torch.bfloat16, device="meta")[None]),
    "`dropout_p`": dict(dropout_p=0.1, seed=0),
    "`return_weights`": dict(return_weights=True),
    "packed sequences": dict(cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS),
}


def table(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def cpu() -> str:
    """Return a table of CPU times from cpu.csv, fusedattn beside PyTorch in the same calls."""
    lines = []
    for some, ours, theirs in report.compared(_right("cpu.csv"), without="naive"):
        formula = next((_ms(row) for row in some if row.provider == "naive"), "-")
        what = SAID.get(ours.options, ours.options) or ours.dtype
        lines.append((what, *_call(ours), *_both(ours, theirs), formula))
    return table(("what", *_CALL, "fusedattn ms", "PyTorch ms", "ratio", "formula ms"), lines)


def gpu_speeds() -> str:
    """Return a table of full and causal calls on an H200 beside cuDNN, from the last run that timed both."""
    found = {}
    for ours, theirs in report.last_runs(rows.read(RESULTS / "h200.csv"), ("fusedattn:hopper", "sdpa:cudnn")):
        speeds = f"{ours.tflops:.0f}", f"{theirs.tflops:.0f}", f"{ours.tflops / theirs.tflops:.2f}"
        found[ours.mode != "forward", ours.D, ours.causal, ours.Sq] = *_call(ours), *speeds
    head = *_CALL, "fusedattn TFLOP/s", "cuDNN TFLOP/s", "fusedattn over cuDNN"
    return table(head, [found[place] for place in sorted(found)])


def gpu_others() -> str:
    """Return a table of caches, packed calls and options on an H200, beside PyTorch's fastest call in the same run."""
    # A slash marks rows of an earlier benchmark, which timed single tiles.
    written, lines = [row for row in _right("h200.csv") if "/" not in row.provider], []
    for _, ours, theirs in report.compared(written):
        what = SAID.get(ours.options)
        if ours.provider.startswith("fusedattn:cache"):
            what = "one token after a cache, in a CUDA graph"
        elif ours.provider.startswith("fusedattn+packed"):
            what = f"packed {what or 'equal lengths'}"
        if what:
            lines.append((what, *_call(ours), *_both(ours, theirs), theirs.provider))
    return table(("what", *_CALL, "fusedattn ms", "PyTorch ms", "ratio", "PyTorch's way"), sorted(lines))


def _explained(capability: tuple[int, int], D: int = 128, **options: Any) -> fusedattn.Explanation:
    shape, device = ((4096, 8, D), "cpu") if "cu_seqlens_q" in options else ((1, 8, 4096, D), "meta")
    query = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return fusedattn.explain(query, query, query, capability=capability, **options)


def choices() -> str:
    """Return a table of the backend and kernels that `fusedattn.explain` names for some calls on each kind of GPU."""
    lines = []
    for (what, options), (gpu, capability) in itertools.product(CALLS.items(), GPUS.items()):
        found = _explained(capability, **options)
        forward, *backward = (f"`{name}`" for name in found.tiles)
        lines.append((what, gpu, f'`"{found.backend}"`', forward, ", ".join(backward)))
    return table(("call, bfloat16, 4096 tokens", "GPU", "backend", "forward", "backward"), lines)


def options() -> str:
    """Return a table of the options that Hopper's kernels support, and of combinations that they do not support."""
    lines, refused = [], set()
    for count in range(1, 5):
        for names in itertools.combinations(OPTIONS, count):
            packed, cells, why = any("packed" in name for name in names), [], []
            for D in (64, 128, 256, 512) if count == 1 or not packed else ():
                found = _explained((9, 0), D, **{key: x for name in names for key, x in OPTIONS[name].items()})
                reasons = [*found.reasons.get("hopper", []), *found.backward]
                cells.append("no" if found.backend != "hopper" else "forward" if reasons else "yes")
                if reasons:
                    refused.add((D, names))
                    new = not any((D, part) in refused for part in itertools.combinations(names, count - 1))
                    why += reasons * new
            if why or count == 1:
                lines.append((", ".join(names), *cells, "; ".join(dict.fromkeys(why))))
    return table(("call with", "D 64", "D 128", "D 256", "D 512", "why not"), lines)


def plans() -> str:
    """Return a table of the CPU time and memory that plans take, beside create_block_mask, from plans.csv."""
    found = collections.defaultdict(list)
    for row in csv.DictReader((RESULTS / "plans.csv").read_text().splitlines()):  # fusedattn comes first
        seconds, peak, kept = (float(row[name]) for name in ("seconds", "peak_mib", "kept_bytes"))
        found[row["pattern"].replace("_", " ")] += f"{seconds:.1f} s", f"{peak:,.0f} MiB", f"{kept / 1e6:.2f} MB"
    head = "pattern", "plan", "peak", "kept", "`create_block_mask`", "peak", "kept"
    return table(head, ((name, *cells) for name, cells in found.items()))


def _machine(name: str) -> str:
    every = rows.read(RESULTS / name)
    last, commits = every[-1], ", ".join(f"`{commit}`" for commit in dict.fromkeys(row.commit for row in every))
    where = "" if last.gpu == "cpu" else f" on an {last.gpu} (driver {last.driver})"
    return (
        f"Measured on {last.date[:10]}{where} with torch {last.torch}, Triton {last.triton} and Python {last.python}, "
        f"at {'commit' if ',' not in commits else 'commits'} {commits}."
    )


def _right(name: str) -> list[rows.Row]:
    return [row for row in rows.read(RESULTS / name) if row.status == "ok"]


_MODES = dict(forward="output", backward="gradients", forward_backward="output and gradients", graph="output")
_CALL = "computed", "B, Hq, Hkv, Sq, Sk, D", "causal"


def _call(row: rows.Row) -> tuple[str, str, str]:
    return _MODES[row.mode], ", ".join(map(str, row.case[:6])), "yes" if row.causal else "no"


def _both(ours: rows.Row, theirs: rows.Row) -> tuple[str, str, str]:
    return _ms(ours), _ms(theirs), f"{ours.ms_p50 / theirs.ms_p50:.2f}"


def _ms(row: rows.Row) -> str:
    return f"{row.ms_p50:,.0f}" if row.ms_p50 >= 100 else f"{row.ms_p50:.3g}"


TABLES: dict[str, Callable[[], str]] = {
    one.__name__: one for one in (cpu, gpu_speeds, gpu_others, choices, options, plans)
}
TABLES |= {"cpu_machine": partial(_machine, "cpu.csv"), "gpu_machine": partial(_machine, "h200.csv")}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with its tables; mkdocs calls this for each page."""
    return re.sub(r"^<!-- table: (\w+) -->$", lambda match: TABLES[match[1]](), markdown, flags=re.M)
