"""Do forward and backward keep up with the best peer on long prompts?    python -m fusedattn.bench.attention

Cases x providers x modes, the most important first, a row in the CSV as soon as it is measured, a short table last.
"""

import argparse
import gc
import sys
import time

import torch

from . import accuracy, cases, cost, providers, rows, table, timing

MODES = ("forward", "backward", "forward_backward")
# Who goes first when time is short: without us and the fast peers there is no ratio at all.
TIERS = {"sdpa:efficient": 1, "sdpa:math": 1, "flex": 2, "naive": 3}
SLOW = ("sdpa:math", "naive")  # with an option anybody else may be the peer
BROKEN = 3  # exit status: the GPU takes no more work from this process; start again with --resume
BREAKS = 2  # how often a provider may do that in one mode before it is not tried again


def units(chosen, names):
    """(case, provider) in the order of importance: the fast providers through all cases, then the next."""
    late = set(cases.MORE)
    work = [(case, name) for case in chosen for name in names]

    def tier(unit):
        case, name = unit
        if case.options:
            return int(name in SLOW)
        return TIERS.get(name, 0) + (2 if case in late else 0)

    return sorted(work, key=tier)


def _is_ours(name, label):
    return label == name or (name in ("fusedattn", "fusedattn+plan") and label.startswith(f"{name}:"))


def _left(written, case, name, modes):
    """The modes that a run, broken off and now resumed, has yet to measure of a provider on a case."""
    own = [row for row in written if _is_ours(name, row.provider)]
    done = {row.mode for row in own if table.case_of(row) == case}
    broken = [row.mode for row in own if _broke(row.status)]
    return [mode for mode in modes if mode not in done and broken.count(mode) < BREAKS]


def _broke(status):
    return "CUDA error" in status or "Triton Error [CUDA]" in status


def _peak(step, device):
    """(what a step returns, the MiB it holds at its peak above what was held before); "" without a GPU."""
    if torch.device(device).type != "cuda":
        return step(), ""
    step()  # whatever it allocates or compiles once is no part of the peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = step()
    torch.cuda.synchronize()
    return result, (torch.cuda.max_memory_allocated() - before) / 2**20


def measured(case, mode, call, tensors, truth, device, budget_ms):
    """The measured columns of one row, with a status, and what is wrong; truth None is a result nobody can judge."""
    step = providers.step(mode, call, tensors)
    result, peak = _peak(step, device)
    error, eager, why = ("", "", "") if truth is None else accuracy.judge(case, mode, result, truth)
    del result
    times = timing.measure(step, device, budget_ms)
    return dict(
        ms_p20=times.p20,
        ms_p50=times.p50,
        ms_p80=times.p80,
        tflops=cost.flops(case, mode) / times.p50 / 1e9,
        gbps=cost.moved(case, mode) / times.p50 / 1e6,
        peak_mib=peak,
        err_max=error,
        err_eager=eager,
        status="wrong" if why else "ok",
    ), why


def unit(case, name, tensors, truth, modes, device, budget_ms):
    """(mode, provider, measured columns with a status, what to say of it) of one provider on one case, one by one."""
    label, refusal, call = name, None, None
    blind = providers.unchecked(case, name)
    try:
        label = providers.label(name, case, tensors)
        call = providers.find(name)(case, tensors)
    except Exception as error:  # a row like any other: what a peer cannot do is a result
        refusal = error
    for mode in modes:
        if call is None:
            yield mode, label, dict(status=_status(refusal)), ""
            continue
        try:
            columns, said = measured(case, mode, call, tensors, None if blind else truth, device, budget_ms)
            columns |= dict(status=f"unchecked: {blind}") if blind else {}
        except Exception as error:
            columns, said = dict(status=_status(error)), ""
        yield mode, label, columns, said


def out_of_memory(error):
    """Whether an error says so: on a CPU it is one of no type of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _status(error):
    if out_of_memory(error):
        return "oom"
    text = str(error) if isinstance(error, providers.Unsupported) else f"{type(error).__name__}: {error}"
    # Of a crash of the GPU the first line says all, of the rest (advice on environment variables) nothing.
    return "unsupported: " + text.strip().partition("\n")[0][:300]


def run(chosen, names, modes, device, writer, machine, budget=None, budget_ms=100.0, resume=False):
    """Measure; True if all of it was, False if the budget ended first, None if the GPU broke down."""
    deadline = time.monotonic() + (budget if budget else float("inf"))
    work = units(chosen, names)
    before = table.last_run(writer.rows) if resume else []
    drawn = tensors = truth = None
    for number, (case, name) in enumerate(work):
        left = _left(before, case, name, modes)
        if not left:
            continue
        if time.monotonic() > deadline:
            _say(f"the budget of {budget:g} s is over: {len(work) - number} of {len(work)} units are not measured")
            return False
        if drawn != case:
            drawn = tensors = truth = None  # free the last one first
            tensors = case.draw(device)
            truth, drawn = accuracy.truth(case, tensors), case
        for mode, label, columns, said in unit(case, name, tensors, truth, left, device, budget_ms):
            writer.write(rows.row(machine, mode, label, case, **columns))
            speed = f"{columns['ms_p50']:10.4f} ms {columns['tflops']:8.2f} TFLOP/s  " if "ms_p50" in columns else ""
            _say(f"[{number + 1}/{len(work)}] {case.name} {label} {mode}: {speed}{columns['status']} {said}")
            if _broke(columns["status"]):
                return None
            if time.monotonic() > deadline:
                break
        gc.collect()
        if torch.device(device).type == "cuda":
            torch.cuda.empty_cache()
    return True


def _say(line):
    print(line.rstrip(), file=sys.stderr, flush=True)


def _list(text):
    return text.split(",")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m fusedattn.bench.attention", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", choices=cases.TABLES, help="default: all on a GPU, tiny without")
    parser.add_argument("--providers", type=_list, help=f"some of {','.join(providers.PROVIDERS)},fusedattn:BACKEND")
    parser.add_argument("--modes", type=_list, default=list(MODES), help=",".join(MODES))
    parser.add_argument("--csv", help="append to this file")
    parser.add_argument("--resume", action="store_true", help="go on with the last run in the CSV")
    parser.add_argument("--budget", type=float, help="seconds after which no more is started")
    parser.add_argument("--repeat-ms", type=float, default=100.0, help="how long a row is timed, about")
    parser.add_argument("--commit", help="what the rows say, where git cannot tell")
    options = parser.parse_args(arguments)
    for name in options.providers or []:
        try:
            providers.find(name)
        except ValueError as error:
            parser.error(str(error))
    if not set(options.modes) <= set(MODES):
        parser.error(f"--modes: expected some of {','.join(MODES)}")

    on_gpu = torch.device(options.device).type == "cuda"
    names = options.providers or [n for n in providers.PROVIDERS if on_gpu or n in ("fusedattn", "naive", "sdpa:math")]
    writer = rows.Writer(options.csv)
    machine = rows.machine(options.device, options.commit)
    if options.resume and writer.rows:
        machine["date"] = writer.rows[-1].date
    _say(", ".join(f"{name} {value}" for name, value in machine.items() if value))
    chosen = cases.TABLES[options.cases or ("all" if on_gpu else "tiny")]
    done = run(
        chosen, names, options.modes, options.device, writer, machine, options.budget, options.repeat_ms, options.resume
    )
    print(table.text(writer.rows))
    return BROKEN if done is None else 0


if __name__ == "__main__":
    sys.exit(main())
