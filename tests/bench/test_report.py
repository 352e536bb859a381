"""The one reporter: which rows are compared, goals, shares of the machine, memory, and what is printed of a run."""

import pytest
from fusedattn.bench import cases, cost, report, rows, timing
from fusedattn.bench.dev import questions
from fusedattn.bench.dev.questions import QUESTIONS

from .test_bench import made


def test_goals_are_of_the_best_peer_and_of_ours_that_is_right():
    case, other = cases.LONG[:2]
    some = [
        made(case, "sdpa:flash", ms=4.0),
        made(case, "sdpa:cudnn", ms=1.6, status="wrong"),  # by our rule; a peer all the same
        made(case, "sdpa:math", ms=1.0, status="oom")._replace(ms_p50=""),
        made(case, "naive", ms=0.1),
        made(case, "fusedattn:triton", ms=2.0),
        made(other, "sdpa:flash", ms=1.0),
        made(other, "fusedattn:triton", ms=0.5, status="wrong"),  # fast and wrong is no ratio
    ]
    each = {one.other: one.ratios for one in report.standings(some)[1]}
    assert each == {"sdpa:flash": [2.0], "sdpa:cudnn": [0.8], "naive": [0.05]}
    forward, backward, memory = questions.SPEED
    said = f"met in 1 of 1 case, median 0.800, worst 0.800 ({case.name})"
    assert forward.line(some) == f"goal forward, speed over the best SDPA backend's, S >= 2048, >= 0.75: {said}"
    assert backward.line(some).endswith(">= 0.5: not measured")
    short = case._replace(Sq=512, Sk=512)
    quick = [made(short, "fusedattn:triton", ms=9.0), made(short, "sdpa:flash")]
    assert forward.line(some + quick) == forward.line(some)  # the goal is of long ones
    peak = (1.1 * cost.ideal(case) - cost.held(case)) / 2**20
    some.append(made(case, "fusedattn:triton", "forward_backward", peak_mib=peak))
    assert "<= 1.2: met in 1 of 1 case, median 1.100, worst 1.100" in memory.line(some)
    shown = QUESTIONS["attention"].text(some)
    assert forward.line(some) in shown and memory.line(some) in shown and report.text([]) == "no rows"


def test_a_run_on_a_gpu_has_shares_of_what_the_machine_reached():
    case = cases.LONG[0]
    ceilings = dict(matmul_tflops=800.0, copy_gbps=4000.0, peak_mib=1.0)
    mine = made(case, "fusedattn:triton", tflops=400.0, gbps=100.0, **ceilings)
    slow = made(case, "fusedattn:cpu", ms=9.0, tflops=1.0, gbps=1.0, **ceilings)
    peer = made(case, "sdpa:flash", ms=0.5, tflops=600.0, **ceilings)
    assert report.shares(mine) == (0.5, 0.025) and report.shares(made(case, "naive")) == (None, None)
    shown = report.text([slow, mine, peer])
    lines = {line.split()[0]: line.split() for line in shown.splitlines() if line[:2] == "  " != line[1:3]}
    assert lines["fusedattn:triton"][1:6] == ["1.000", "400.0", "1", "50%", "2%"]
    assert lines["sdpa:flash"][4] == "75%"
    assert "This machine reached: bf16 products 800 TFLOP/s, copies 4000 GB/s." in shown
    assert "reached" not in report.text([made(case, "fusedattn:triton")])


def test_rows_that_did_not_end_well_are_counted_with_a_reason():
    case, other = cases.LONG[:2]
    some = [made(case, "flex"), made(other, "flex", status="unsupported: no")._replace(ms_p50="")]
    assert report.text(some).splitlines()[1:3] == ["flex: 1 ok", "    1 unsupported: no"]


def test_the_peak_of_a_provider_is_told_beside_the_ideal():
    case = cases.LONG[0]
    held, forward, both = cost.held(case), cost.ideal(case, "forward"), cost.ideal(case)
    some = [
        made(case, "fusedattn:triton", peak_mib=(forward - held) / 2**20),
        made(case, "naive", peak_mib=(3 * forward - held) / 2**20),
        made(case, "fusedattn:triton", "forward_backward", peak_mib=(1.5 * both - held) / 2**20),
    ]
    first, second = questions.peaks(some)
    assert first.startswith(f"{case.name} forward, MiB (over the ideal, {forward / 2**20:.0f}): fusedattn:triton ")
    assert "(1.00)" in first and "naive" in first and "(3.00)" in first and "(1.50)" in second
    shown = QUESTIONS["peak"].text(some)
    assert first in shown and "met in 0 of 1 case, median 1.500, worst 1.500" in shown
    assert "not measured" in QUESTIONS["peak"].text([made(case, "naive")._replace(peak_mib="")])


def test_a_tiny_call_is_held_to_torchs_own():
    case, other = cases.SMALL[:2]
    some = [
        made(case, "sdpa", "wall", ms=0.010),
        made(case, "sdpa:flash", "wall", ms=0.002),
        made(case, "fusedattn:triton", "wall", ms=0.0119),
        made(other, "sdpa", "wall", ms=0.010),
        made(other, "fusedattn:triton", "wall", ms=0.013),
        made(case, "sdpa", "graph", ms=0.004),
        made(case, "fusedattn:triton", "graph", ms=0.003),
        made(case, "fusedattn:cpu", "graph", ms=0.001, status="wrong"),
    ]
    wall, graph = (goal.line(some) for goal in questions.SMALL)
    assert "own, <= 1.2: met in 1 of 2 cases" in wall and f"worst 1.300 ({other.name})" in wall
    assert "own, <= 1: met in 1 of 1 case" in graph and f"worst 0.750 ({case.name})" in graph
    assert "fusedattn:triton    0.0119" in QUESTIONS["small"].text(some)


def timed(provider, ms, case=cases.LONG[0], mode="forward", **columns):
    about = dict.fromkeys(rows.COLUMNS[:8], "x")
    times = {} if ms == "" else dict(ms_p20=ms, ms_p50=ms, ms_p80=ms, tflops=cost.flops(case, mode) / ms / 1e9)
    return rows.row(about, mode, provider, case, **times | columns)


def sentences(some, busy=False):
    return report.sentences(report.judged(some, busy))


def test_the_verdict_is_the_median_over_cases():
    first, second, third = cases.LONG[:3]
    some = []
    for case, ours, flash, cudnn in ((first, 2.0, 4.0, 3.0), (second, 2.0, 1.0, 5.0), (third, 1.0, 1.2, 9.0)):
        some += [
            timed("fusedattn:triton", ours, case),
            timed("sdpa:flash", flash, case),
            timed("sdpa:cudnn", cudnn, case),
        ]
    some.append(timed("naive", "", first, status="oom"))
    (best,), each = report.standings(some)
    assert best.ratios == [1.5, 0.5, 1.2] and best.median == 1.2 and best.faster == 2
    assert best.other == "sdpa:flash, sdpa:cudnn"  # the fastest other of two cases, and of one
    assert {one.other: one.median for one in each} == {"sdpa:flash": 1.2, "sdpa:cudnn": 2.5}
    first_line, *others = sentences(some)
    assert first_line == (
        "forward: fusedattn:triton is 1.20x faster than the fastest other of each case (sdpa:flash, sdpa:cudnn), "
        "by the median of 3 cases. It is clearly faster in 2 and clearly slower in 1."
    )
    assert others == [
        "fusedattn: 3 of 3 results right, by the rule of its tests against float64.",
        "1 of 10 could not be measured; their rows say why.",
    ]


def test_a_row_that_could_not_be_measured_says_all_of_why():
    why = "its causal mask is aligned to the top left, ours to the bottom right, which is another computation"
    row = timed("sdpa", "", status=f"unsupported: {why}")
    assert any(line.split(maxsplit=1) == ["sdpa", why] for line, _ in report.lines(report.Judged([row])))
    assert report.reason(row) == why and report.reason(timed("naive", "", status="oom")) == "out of memory"


def test_the_verdict_where_there_is_little_to_compare():
    ours, other = timed("fusedattn:triton", 1.0), timed("sdpa:flash", 2.0)
    assert (
        sentences([ours, other])[0] == "forward: fusedattn:triton is 2.00x faster than the fastest other, sdpa:flash."
    )
    assert sentences([ours])[0] == "forward: there is no other to compare with."
    alone = sentences([other, timed("naive", 9.0)])
    assert alone == ["forward: the fastest of each case: sdpa:flash."]
    both = [ours, timed("fusedattn:cpu", 5.0), other]  # the faster of ours is what counts
    assert report.standings(both)[0][0].ratios == [2.0]


SAMPLES = {  # of a quiet machine, and of one where threads wait for each other: milliseconds
    "ours": ([0.050, 0.052, 0.051, 0.050, 0.053], [0.050, 0.9, 28.0, 0.051, 36.0]),
    "theirs": ([0.024, 0.025, 0.024, 0.026, 0.025], [0.024, 0.025, 0.024, 0.024, 0.025]),
}


def sampled(provider, samples, **columns):
    times = timing.quantiles(samples)
    return timed(provider, times.p50, **times.columns(), gbps=1.0, **columns)


def test_a_machine_that_is_disturbed_is_judged_by_the_least():
    quiet = sampled("fusedattn:triton", SAMPLES["ours"][0]), sampled("sdpa:flash", SAMPLES["theirs"][0])
    noisy = sampled("fusedattn:triton", SAMPLES["ours"][1]), sampled("sdpa:flash", SAMPLES["theirs"][1])
    assert noisy[0].ms_p50 == 0.9 and noisy[0].ms_min == 0.05 and sentences(quiet)[0].split()[3] == "2.04x"
    for some, busy in ((noisy, False), (noisy, True), (quiet, True)):
        found = report.judged(some, busy)
        assert [row.ms_p50 for row in found.rows] == [0.05, 0.024]
        assert [row.tflops * row.ms_p50 for row in found.rows] == pytest.approx([r.tflops * r.ms_p50 for r in some])
        assert report.sentences(found)[0].endswith("differ by no more than noise.")
        assert report.sentences(found)[-1].endswith(
            "Each is judged by the least of its repeats, and up to 2.5 times is noise."
        )
    slow = [sampled("fusedattn:triton", SAMPLES["ours"][0]), sampled("naive", [0.5, 0.51, 0.52, 0.53, 0.6])]
    assert "10.00x faster" in report.sentences(report.judged(slow, busy=True))[0]
    assert report.judged(quiet).rows == list(quiet) and not report.judged(quiet).why
    assert "1 of 2 times vary by more than half" in report.judged(noisy).why
    absent = timed("naive", "", status="oom"), timed("naive", 1.0)  # not timed; timed before there was a least
    assert report.judged(absent, busy=True).rows == list(absent)


def test_noise_is_no_verdict():
    ours = sampled("fusedattn:triton", [0.05, 40.0, 100.0, 119.0, 150.0])  # by the median 2000 times slower
    other, slower = sampled("sdpa:flash", [0.049, 0.051, 0.051, 0.052, 0.06]), sampled("naive", [200.0, 210.0, 300.0])
    some = [ours, other, slower]
    best, each = report.standings(report.judged(some).rows)
    assert [one.is_clear for one in each] == [False, True] and best[0].faster == 0
    first = sentences(some)[0]
    assert first == "forward: fusedattn:triton and the fastest other, sdpa:flash, differ by no more than noise."
    shown = "\n".join(text for text, _ in report.lines(report.judged(some), [""] * 3))
    assert shown.count("within noise") == 2 and "2000" not in shown and "ms is the least" in shown
    (line,) = (line for line in shown.splitlines() if line.startswith("  sdpa:flash"))
    assert "within noise" in line


def test_noise_in_most_cases_is_no_verdict_and_in_few_is():
    near, far = [1.0, 1.1, 1.2, 1.1, 1.0], [2.0, 2.1, 2.2, 2.1, 2.0]
    first, second, third = (case._replace(options="") for case in cases.LONG[:3])
    some = [sampled("fusedattn:triton", near, case=case) for case in (first, second, third)]
    peers = [
        sampled("sdpa:flash", samples, case=case) for samples, case in ((near, first), (near, second), (far, third))
    ]
    assert sentences(some + peers)[0] == (
        "forward: fusedattn:triton and the fastest other of each case (sdpa:flash) differ by no more than noise in 2 "
        "of 3 cases. It is clearly faster in 1 and clearly slower in 0."
    )
    peers[0] = sampled("sdpa:flash", far, case=first)
    assert "is 1.91x faster than the fastest other of each case" in sentences(some + peers)[0]


@pytest.mark.parametrize("ratio, expected", [(1.8, "1.80x faster"), (0.5, "2.00x slower"), (1.004, "as fast")])
def test_words(ratio, expected):
    assert report.words(ratio) == expected


def test_rows_are_shown_mode_by_mode_and_short_to_long():
    long, short = cases.LONG[0]._replace(Sq=4096, Sk=4096), cases.LONG[0]
    other = short._replace(causal=False)
    some = [timed("naive", 1.0, case, mode) for case in (long, other, short) for mode in ("forward", "backward")]
    assert list(report.groups(some)) == [
        (mode, case) for mode in ("forward", "backward") for case in (short, long, other)
    ]
    assert {row.case for group in report.groups(some).values() for row in group} == {short, long, other}
