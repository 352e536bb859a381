"""How did the last run in a CSV compare with the best SDPA backend?    python -m fusedattn.bench.table FILE"""

import collections
import statistics
import sys

from . import cost, rows
from .cases import Case

GOALS = {"forward": 0.75, "backward": 0.5}  # of the best SDPA backend's speed, from S = 2048 on
LONG = 2048
MEMORY_GOAL = 1.2  # peak over query, key, value, output, lse and gradients
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def case_of(row):
    values = {field: getattr(row, field) for field in Case._fields}
    return Case(**values | {"causal": bool(row.causal)})


def last_run(written):
    """The rows of the last run: ratios are taken within one run alone."""
    return [row for row in written if row.date == written[-1].date] if written else []


def kind(case):
    """What a case has in common with those of other lengths."""
    return case._replace(B=0, Sq=0, Sk=0)


def ours(written):
    """Of the rows of one case and mode the fastest of ours that is right, or None."""
    right = [row for row in written if row.provider.startswith("fusedattn:") and row.status == "ok"]
    return min((row for row in right if row.ms_p50 != ""), key=lambda row: row.ms_p50, default=None)


def _cells(written, mode):
    """{case: its rows that were timed} in a mode."""
    cells = collections.defaultdict(list)
    for row in written:
        if row.mode == mode and row.ms_p50 != "":
            cells[case_of(row)].append(row)
    return cells


def _plain(written):
    """The rows whose case has no options: the goals are of those."""
    return [row for row in written if not row.options]


def ratios(written, mode):
    """{case: (our row, best row of the SDPA backends, their time over ours)} where both are there and ours is right."""
    found = {}
    for case, timed in _cells(written, mode).items():
        # One whose error is over our rule is a peer all the same.
        mine, peers = ours(timed), [row for row in timed if row.provider.startswith("sdpa:")]
        if mine and peers:
            best = min(peers, key=lambda row: row.ms_p50)
            found[case] = (mine, best, best.ms_p50 / mine.ms_p50)
    return found


def speedups(written, mode):
    """{provider that is not ours: {case: its time over ours}}"""
    found = collections.defaultdict(dict)
    for case, timed in _cells(written, mode).items():
        mine = ours(timed)
        for row in timed if mine else ():
            if not row.provider.startswith("fusedattn"):
                found[row.provider][case] = row.ms_p50 / mine.ms_p50
    return found


def shares(row):
    """(of the measured matmul ceiling, of the measured copy ceiling) of a row; None where one is not known."""
    return (
        row.tflops / row.matmul_tflops if row.matmul_tflops and row.tflops else None,
        row.gbps / row.copy_gbps if row.copy_gbps and row.gbps else None,
    )


def _grid(written, mode):
    """Lines of ratios, a length a column; the speed and the best peer are those of the longest."""
    found = ratios(_plain(written), mode)
    if not found:
        return [f"{mode}: nothing to compare"]
    lengths = sorted({(case.Sq, case.Sk) for case in found})
    kinds = list(dict.fromkeys(map(kind, found)))
    # One column a length of the main table; what is off the main road has lines of its own.
    square = [length for length in lengths if length[0] == length[1] and length[0] & (length[0] - 1) == 0]
    lines = [
        f"{mode:<17}"
        + "".join(f"{length:>7}" for length, _ in square)
        + "   TFLOP/s (of what a matmul reached), best peer (longest)"
    ]
    for one in kinds:
        row = {(case.Sq, case.Sk): cell for case, cell in found.items() if kind(case) == one}
        named = {length: f"{cell[2]:.2f}" for length, cell in row.items()}
        dims = f"d{one.D}" if one.D == one.Dv else f"d{one.D}-{one.Dv}"
        heads = "" if one.Hq == one.Hkv else f" gqa{one.Hq // one.Hkv}"
        name = f"{DTYPES.get(one.dtype, one.dtype)} {dims} {'causal' if one.causal else 'full'}{heads}"
        mine, best, _ = row[max(row)]
        other = " ".join(f"{q}x{k}:{named[q, k]}" for q, k in row if (q, k) not in square)
        cells = "".join(f"{named.get(length, ''):>7}" for length in square)
        speeds = " / ".join(f"{each.tflops:.4g}{_percent(shares(each)[0])}" for each in (mine, best))
        lines.append(f"{name:<17}{cells}   {speeds} {best.provider} {other}".rstrip())
    return lines


def _percent(share):
    return "" if share is None else f" ({share:.1%})"


def _speedups(written):
    """A line a mode and provider: its time over ours, and where that is least."""
    lines = []
    for mode in dict.fromkeys(row.mode for row in written):
        for provider, found in speedups(written, mode).items():
            worst, mean = min(found, key=found.get), statistics.geometric_mean(found.values())
            lines.append(
                f"    {mode:<17}{provider:<16}{mean:.2f} in {len(found)} cases, least {found[worst]:.2f} ({worst.name})"
            )
    return ["Speed-up over each provider, the geometric mean of their time over ours:", *lines] if lines else []


def _shares(written):
    """A line a mode: how near ours come to what was measured for this machine in the same run."""
    lines = []
    for mode in dict.fromkeys(row.mode for row in written):
        mine = [row for row in map(ours, _cells(written, mode).values()) if row]
        for place, what in enumerate(("the matmul ceiling", "the copy ceiling")):
            known = {case_of(row): shares(row)[place] for row in mine if shares(row)[place] is not None}
            if known:
                best, median = max(known, key=known.get), statistics.median(known.values())
                lines.append(f"    {mode:<17}{what:<19}median {median:.1%}, most {known[best]:.1%} ({best.name})")
    ceilings = {row.dtype: row for row in written if row.matmul_tflops}
    said = [f"{DTYPES.get(dtype, dtype)} {row.matmul_tflops:.4g} TFLOP/s" for dtype, row in ceilings.items()]
    copies = [f"copies {row.copy_gbps:.4g} GB/s" for row in list(ceilings.values())[:1]]
    reached = ", ".join(said + copies)
    return [f"Our share of what this machine reached in this run ({reached}):", *lines] if lines else []


def _goal(written, mode):
    found = {case: cell[2] for case, cell in ratios(_plain(written), mode).items() if case.Sq >= LONG}
    if not found:
        return f"goal {mode} >= {GOALS[mode]} at S >= {LONG}: not measured"
    goal, worst = GOALS[mode], min(found, key=found.get)
    met = sum(ratio >= goal for ratio in found.values())
    return (
        f"goal {mode} >= {goal} at S >= {LONG}: met in {met} of {len(found)} cells, "
        f"geometric mean {statistics.geometric_mean(found.values()):.2f}, "
        f"median {statistics.median(found.values()):.2f}, worst {found[worst]:.2f} ({worst.name})"
    )


def _options(written):
    """Lines of the cases that have options, a mode a line: our time, and everybody else's over it."""
    kinds = dict.fromkeys(case_of(row) for row in written if row.options)
    lines = []
    for case in kinds:
        lines.append(case.name)
        for mode in dict.fromkeys(row.mode for row in written if case_of(row) == case):
            timed = {
                row.provider: row
                for row in written
                if case_of(row) == case and row.mode == mode and row.ms_p50 != "" and row.status != "wrong"
            }
            mine = ours(timed.values())
            if mine:
                del timed[mine.provider]
            said = "" if mine is None else f"{mine.ms_p50:.4g} ms"
            others = (
                f"{name} {row.ms_p50 / mine.ms_p50:.2f}" if mine else f"{name} {row.ms_p50:.4g} ms"
                for name, row in sorted(timed.items(), key=lambda item: item[1].ms_p50)
            )
            lines.append(f"    {mode:<17}{said:<12} {'  '.join(others)}".rstrip())
    return ["Options: our time, and theirs over ours, the fastest first:", *lines] if lines else []


def memory(written):
    """{case: (peak MiB of forward and backward with query, key and value, ideal MiB)} of our rows."""
    mine = map(ours, _cells(_plain(written), "forward_backward").values())
    return {
        case_of(row): (row.peak_mib + cost.given(case_of(row)) / 2**20, cost.ideal(case_of(row)) / 2**20)
        for row in mine
        if row and row.peak_mib != ""
    }


def _memory(written):
    found = memory(written)
    if not found:
        return f"goal peak memory <= {MEMORY_GOAL} of q, k, v, out, lse and gradients: not measured"
    worst = max(found, key=lambda case: found[case][0] / found[case][1])
    peak, ideal = found[worst]
    met = sum(peak <= MEMORY_GOAL * ideal for peak, ideal in found.values())
    return (
        f"goal peak memory <= {MEMORY_GOAL} of q, k, v, out, lse and gradients: met in {met} of {len(found)} cases, "
        f"worst {peak / ideal:.2f} ({peak:.0f} MiB, ideal {ideal:.0f}; {worst.name})"
    )


def peaks(written):
    """MiB of each provider at its peak, query, key and value included, beside the least there can be; a line a cell."""
    written, lines = last_run(written), []
    for mode in ("forward", "forward_backward"):
        for case, timed in _cells(_plain(written), mode).items():
            given, ideal = cost.given(case) / 2**20, cost.ideal(case, mode) / 2**20
            held = {row.provider: row.peak_mib + given for row in timed if row.peak_mib != ""}
            said = "  ".join(f"{name} {peak:.0f} ({peak / ideal:.2f})" for name, peak in held.items())
            lines += [f"{case.name} {mode}, MiB (over the ideal, {ideal:.0f}): {said}"] if held else []
    return "\n".join([*lines, _memory(written)])


def others(written):
    """What did not end well, counted, with a reason each."""
    lines = []
    for provider in dict.fromkeys(row.provider for row in written):
        counts = collections.Counter(row.status for row in written if row.provider == provider)
        said = [f"{count} {status[:110]}" for status, count in counts.most_common(5) if status != "ok"]
        lines.append(f"{provider}: {counts['ok']} ok" + "".join(f"\n    {each}" for each in said))
    return lines


def text(written):
    """The table, as it is printed."""
    written = last_run(written)
    if not written:
        return "no rows"
    first = written[0]
    lines = [
        f"{first.gpu}, torch {first.torch}, triton {first.triton}, commit {first.commit}, {first.date}",
        *others(written),
        *_options(written),
    ]
    if _plain(written):
        lines += [
            "Their time over ours, of the best SDPA backend of each cell (1.00 is as fast, more is faster):",
            *(line for mode in ("forward", "backward", "forward_backward") for line in _grid(written, mode)),
            *(_goal(written, mode) for mode in GOALS),
            _memory(written),
        ]
    lines += [*_speedups(written), *_shares(written)]
    return "\n".join(lines)


def main(arguments=None):
    (path,) = sys.argv[1:] if arguments is None else arguments
    print(text(rows.read(path)))


if __name__ == "__main__":
    main()
