"""The one reporter: which rows are compared, goals, shares of the machine, memory, and what is printed of a run."""

from fusedattn.bench import cases, cost, report
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
    said = f"met in 1 of 1 case, median 0.80, worst 0.80 ({case.name})"
    assert forward.line(some) == f"goal forward, speed over the best SDPA backend's, S >= 2048, >= 0.75: {said}"
    assert backward.line(some).endswith(">= 0.5: not measured")
    short = case._replace(Sq=512, Sk=512)
    quick = [made(short, "fusedattn:triton", ms=9.0), made(short, "sdpa:flash")]
    assert forward.line(some + quick) == forward.line(some)  # the goal is of long ones
    peak = (1.1 * cost.ideal(case) - cost.held(case)) / 2**20
    some.append(made(case, "fusedattn:triton", "forward_backward", peak_mib=peak))
    assert "<= 1.2: met in 1 of 1 case, median 1.10, worst 1.10" in memory.line(some)
    shown = QUESTIONS["attention"].text(some)
    assert forward.line(some) in shown and memory.line(some) in shown and report.text([]) == "no rows"


def test_a_run_on_a_gpu_has_shares_of_what_the_machine_reached():
    case = cases.LONG[0]
    ceilings = dict(matmul_tflops=800.0, copy_gbps=4000.0, peak_mib=1.0)
    mine = made(case, "fusedattn:triton", tflops=400.0, gbps=100.0, **ceilings)
    slow = made(case, "fusedattn:naive", ms=9.0, tflops=1.0, gbps=1.0, **ceilings)
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
    assert first in shown and "met in 0 of 1 case, median 1.50, worst 1.50" in shown
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
        made(case, "fusedattn:naive", "graph", ms=0.001, status="wrong"),
    ]
    wall, graph = (goal.line(some) for goal in questions.SMALL)
    assert "own, <= 1.2: met in 1 of 2 cases" in wall and f"worst 1.30 ({other.name})" in wall
    assert "own, <= 1: met in 1 of 1 case" in graph and f"worst 0.75 ({case.name})" in graph
    assert "fusedattn:triton    0.0119" in QUESTIONS["small"].text(some)
