"""Makes the tables of the pages from the CSV files of bench/results, so that a page cannot say what no row does."""

import csv
import itertools
import pathlib
from collections.abc import Callable, Iterable, Sequence

import torch
from fusedattn.bench import cases, rows

import fusedattn

RESULTS = pathlib.Path(__file__).parent.parent / "bench" / "results"
# What the options of a row in cpu.csv mean; of those that are not here a table says what the CSV has.
SAID = {
    "keys=0.5": "half of the keys are padding (`key_mask`)",
    "window=64,0": "`window=(64, 0)`",
    "window=1024,0": "`window=(1024, 0)`",
    "bias": "`bias`",
    "documents=4": "four documents in a sequence, by `mask`",
    "documents=8": "eight documents in a sequence, by `mask`",
    "lengths=zipf": "sequences of many lengths",
    "lengths=uniform": "packed sequences, beside a padded batch",
    "module": "`MultiHeadAttention`, projections too",
    "model=encoder": "`nn.TransformerEncoder`, converted",
    "model=llama": "a small Llama of Transformers",
    "filled=1": "one token after a full cache",
    "filled=0.5": "one token after a cache that is half full",
}

# What the table of choices asks about.
GPUS = {"H100, H200": (9, 0), "A100": (8, 0)}
CALLS = {
    "D 64": dict(D=64),
    "D 128": {},
    "D 128, causal": dict(causal=True),
    "D 128, `window=(512, 0)`": dict(window=(512, 0)),
    "D 256, causal": dict(D=256, causal=True),
    "D 128, `softcap=20.0`": dict(softcap=20.0),
}


def table(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """A table in Markdown; what is a bar in a cell stays one."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def cpu_lengths() -> str:
    """Speed over length on a CPU, without options, from the last run in cpu.csv."""
    lines = []
    for (mode, case), times in _cpu("float32").items():
        if case.options == "threads=1" and case.Hq == case.Hkv and case.Sq > 1:
            ours, theirs = _ours(times), times["sdpa"]
            size = f"{case.B}, {case.Hq}, {case.Sq}, {case.D}"
            formula = _ms(times["naive"]) if "naive" in times else "-"
            place = mode, case.causal, case.Sq
            lines.append((place, (_mode(mode), size, _yes(case.causal), *_both(ours, theirs), formula)))
    head = "computed", "B, H, S, D", "causal", "fusedattn ms", "PyTorch ms", "ratio", "formula ms"
    return table(head, [line for _, line in sorted(lines)])


def cpu_options() -> str:
    """The same with an option, in modules and in models; masks were measured later."""
    lines = []
    for (mode, case), times in (_cpu("float32") | _cpu("float32", "cpu_masks.csv")).items():
        option = case.options.removesuffix(" threads=1").strip('"')
        if not case.options.endswith("threads=1") or option in ("threads=1", "memory"):
            continue
        theirs = next((times[name] for name in ("sdpa", "sdpa+slice", "torch.nn") if name in times), None)
        if theirs is not None:
            size = f"{case.B}, {case.Hq}, {case.Sq}, {case.Sk}, {case.D}"
            said = SAID.get(option, option) + (", causal" if case.causal else "")
            lines.append((said, _mode(mode), size, *_both(_ours(times), theirs)))
    return table(("what", "computed", "B, H, Sq, Sk, D", "fusedattn ms", "PyTorch ms", "ratio"), sorted(lines))


def cpu_tangents() -> str:
    """Forward mode on a CPU: output and tangent together, from the last run in tangent.csv."""
    lines = []
    for (mode, case), times in _cpu("float32", "tangent.csv").items():
        if mode == "tangent" and {"fusedattn:cpu", "sdpa:math"} <= set(times):
            size = f"{case.B}, {case.Hq}, {case.Sq}, {case.D}"
            both = _both(times["fusedattn:cpu"], times["sdpa:math"])
            lines.append(((case.causal, case.Sq), (size, _yes(case.causal), *both)))
    head = "B, H, S, D", "causal", "fusedattn ms", "PyTorch ms", "ratio"
    return table(head, [line for _, line in sorted(lines)])


def cpu_machine() -> str:
    """Where and when the rows of cpu.csv were measured."""
    first = rows.last_run(rows.read(RESULTS / "cpu.csv"))[0]
    return (
        f"Measured on {first.date[:10]} with torch {first.torch} and Python {first.python}, at commit `{first.commit}`."
    )


def gpu_speeds() -> str:
    """Return full and causal calls on an H200 beside cuDNN: of each case the last run that has both."""
    found = {}
    for times in _runs("h200.csv"):
        for (mode, case), by_name in times.items():
            ours, theirs = by_name.get("fusedattn:hopper"), by_name.get("sdpa:cudnn")
            if ours is not None and theirs is not None and case in cases.HOPPER:
                size = f"{case.B}, {case.Hq}, {case.Sq}, {case.D}"
                speeds = f"{ours.tflops:.0f}", f"{theirs.tflops:.0f}", f"{ours.tflops / theirs.tflops:.2f}"
                place = mode != "forward", mode, case.D, case.causal, case.Sq
                found[place] = _mode(mode), size, _yes(case.causal), *speeds
    head = "computed", "B, H, S, D", "causal", "fusedattn TFLOP/s", "cuDNN TFLOP/s", "fusedattn over cuDNN"
    return table(head, [found[place] for place in sorted(found)])


def gpu_others() -> str:
    """Caches, packed sequences and options on an H200, beside the fastest of PyTorch's ways in the same run."""
    ours = "fusedattn:cache", "fusedattn+packed:triton", "fusedattn:hopper", "fusedattn:triton"
    lines = []
    for times in _runs("h200.csv"):
        for (mode, case), by_name in times.items():
            mine = next((by_name[name] for name in ours if name in by_name), None)
            others = [row for name, row in by_name.items() if not name.startswith("fusedattn")]
            packed = any("packed" in name for name in by_name)
            if mine is not None and others and (case.options in SAID or mine.provider == ours[0] or packed):
                theirs = min(others, key=lambda row: row.ms_p50)
                option = SAID.get(case.options, "")
                what = (
                    "one token after a cache, in a CUDA graph"
                    if mine.provider == ours[0]
                    else f"packed {option}".strip()
                    if packed
                    else option
                )
                what += ", causal" if case.causal else ""
                size = f"{case.B}, {case.Hq}, {case.Hkv}, {case.Sq}, {case.Sk}, {case.D}"
                lines.append((what, _mode(mode), size, *_both(mine, theirs), theirs.provider))
    head = "what", "computed", "B, Hq, Hkv, Sq, Sk, D", "fusedattn ms", "PyTorch ms", "ratio", "PyTorch's way"
    return table(head, sorted(lines))


def gpu_machine() -> str:
    """Where and when the rows of h200.csv were measured."""
    every = rows.read(RESULTS / "h200.csv")
    last = every[-1]
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row.commit for row in every))
    return (
        f"Measured on {last.date[:10]} on an {last.gpu} (driver {last.driver}) with torch {last.torch}, Triton "
        f"{last.triton} and Python {last.python}, at commits {commits}."
    )


def choices() -> str:
    """Return the kernels that a call takes on each kind of GPU, forward and backward, as `fusedattn.explain` says."""
    lines = []
    for (what, options), (gpu, capability) in itertools.product(CALLS.items(), GPUS.items()):
        inputs = [torch.empty(1, 8, 4096, options.get("D", 128), dtype=torch.bfloat16, device="meta")] * 3
        given = {name: x for name, x in options.items() if name != "D"}
        found = fusedattn.explain(*inputs, capability=capability, **given)
        forward, *backward = (f"`{name}`" for name in found.tiles)
        lines.append((what, gpu, f'`"{found.backend}"`', forward, ", ".join(backward)))
    return table(("call, bfloat16, 4096 tokens", "GPU", "backend", "forward", "backward"), lines)


def versions() -> str:
    """The last run with each pair of versions, from versions.csv."""
    last = {(row["torch"], row["triton"], row["what"]): row for row in _read("versions.csv")}
    head = "torch", "triton", "what", "passed", "failed", "skipped", "date"
    return table(
        [name.replace("triton", "Triton") for name in head], ([row[name] for name in head] for row in last.values())
    )


def _read(name: str) -> list[dict[str, str]]:
    with open(RESULTS / name, newline="") as file:
        return list(csv.DictReader(file))


def _cpu(dtype: str, name: str = "cpu.csv") -> dict:
    """{(mode, case): {provider: row}} of one thread, of the last run in a file, where all was right."""
    grouped: dict = {}
    for row in rows.last_run(rows.read(RESULTS / name)):
        if row.dtype == dtype and row.ms_p50 != "" and row.status == "ok" and "threads=1" in row.options:
            grouped.setdefault((row.mode, row.case), {})[row.provider] = row
    return grouped


def _runs(name: str) -> Iterable[dict]:
    """{(mode, case): {provider: row}} of each run in a file, where all was right."""
    found: dict = {}
    for row in rows.read(RESULTS / name):
        if row.ms_p50 != "" and row.status == "ok":
            found.setdefault(row.date, {}).setdefault((row.mode, row.case), {})[row.provider] = row
    return found.values()


def _ours(times: dict) -> rows.Row:
    return next(row for name, row in times.items() if name.startswith("fusedattn"))


def _both(ours: rows.Row, theirs: rows.Row) -> tuple[str, str, str]:
    """The times of both, and ours over theirs."""
    return _ms(ours), _ms(theirs), f"{ours.ms_p50 / theirs.ms_p50:.2f}"


def _ms(row: rows.Row) -> str:
    return f"{row.ms_p50:,.0f}" if row.ms_p50 >= 100 else f"{row.ms_p50:.3g}"


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _mode(mode: str) -> str:
    modes = dict(forward="output", backward="gradients", forward_backward="output and gradients", graph="output")
    return modes.get(mode, mode)


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        *(cpu_lengths, cpu_options, cpu_tangents, cpu_machine),
        *(gpu_speeds, gpu_others, gpu_machine, choices, versions),
    )
}
