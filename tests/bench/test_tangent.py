"""The question what a tangent costs: what is timed beside what, whether a wrong one is found, and what is asked."""

import pytest
import torch
from fusedattn.bench import calls, cases, timing
from fusedattn.bench.dev import tangent

import fusedattn as fa

from .test_bench import made
from .test_questions import ask

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def quickly(monkeypatch):
    """Where it is not asked how long a step takes."""
    times = timing.Times(1.0, 2.0, 3.0, 1.0)
    monkeypatch.setattr(timing, "in_turns", lambda steps, budget_ms: dict.fromkeys(steps, (times, 5.0)))


def test_output_and_tangent_are_right_together_and_apart(tmp_path, quickly, capsys):
    found = ask("tangent", tmp_path / "a.csv", "--cases", "tiny-tangent", "--device", "cpu")
    statuses = {(row.mode, row.provider): row.status for row in found}
    right = {pair for pair, status in statuses.items() if status == "ok"}
    apart = {("alone", "fusedattn+forward:cpu"), ("alone", "fusedattn+tangent:cpu")}
    assert right >= apart | {("tangent", name) for name in ("fusedattn:cpu", "naive", "sdpa:math")}
    assert statuses["tangent", "sdpa"].startswith("unsupported: Trying to use forward AD")
    assert statuses["tangent", "flex"].startswith("unsupported: ")
    assert len(found) == len(tangent.units(cases.TINY_TANGENT, "cpu"))
    shown = capsys.readouterr().out
    assert "goal float32, tangent over forward, <= 2.5: met in " in shown
    assert f"{found[0].case.name}: tangent over forward 1.00" in shown


def test_a_wrong_tangent_is_found(tmp_path, quickly, monkeypatch):
    apply = tangent.Operator.apply

    def doubled(*arguments):
        out, *rest = apply(*arguments)
        return 1.02 * out, *rest

    monkeypatch.setattr(tangent.Operator, "apply", doubled)
    found = ask("tangent", tmp_path / "a.csv", "--cases", "tiny-tangent", "--device", "cpu")
    wrong = {(row.mode, row.provider) for row in found if row.status == "wrong"}
    assert wrong == {("alone", "fusedattn+tangent:cpu"), ("tangent", "fusedattn:cpu")}


def test_the_goal_is_the_tangent_over_the_forward_of_a_run():
    case = cases.CPU_LENGTHS[0]
    some = [made(case, "fusedattn+forward:cpu", ms=2.0), made(case, "fusedattn+tangent:cpu", ms=5.0)]
    assert tangent.over_forward(case, some) == 2.5
    assert tangent.over_forward(case, some[:1]) is None
    assert {goal.ask for goal in tangent.GOALS[:2]} == {2.5}


def test_what_is_timed():
    """The formula and SDPA's math hold all weights, so not of the longest; on a GPU SDPA's backends one by one."""
    every = tangent.units(cases.CPU_LENGTHS, "cpu")
    assert {case.Sq for case, name, _ in every if name == "naive"} == {128, 256, 512, 1024, 2048}
    assert {case.Sq for case, name, _ in every if name == "fusedattn"} == {128, 256, 512, 1024, 2048, 4096}
    on_gpu = {name for _, name, _ in tangent.units(cases.TANGENT, "cuda")}
    assert {"sdpa:cudnn", "sdpa:flash", "sdpa:efficient", tangent.FORWARD, tangent.ALONE} <= on_gpu


def test_options_are_refused_by_name():
    with pytest.raises(calls.Unsupported, match="without options"):
        tangent.Tangents(cases.TINY_TANGENT[0]._replace(options="softcap=2"), "cpu")


def test_what_is_timed_alone_is_what_jvp_gives():
    workload = tangent.Tangents(cases.TINY_TANGENT[0], "cpu")
    with torch.no_grad():
        (alone,) = workload.setup(tangent.ALONE).run()
        _, both = workload.setup("fusedattn").run()
    assert torch.equal(alone, both)
    assert fa.explain(*workload.tensors[:3], causal=True).backend == "cpu"
