"""The benchmark of the backward in one pass and in two: its forms, its table, and what its goals are."""

import pytest
import torch
from fusedattn.bench import accuracy, attention, calls, cases, contest, passes, providers, table, variants

from fusedattn.launch import backward, run as launch, tiles as configs

from .test_bench import made
from .test_questions import ask

pytestmark = pytest.mark.usefixtures("one_thread")


def a_form(case, name, ms, **columns):
    return made(case, variants.BACKWARD + name, ms=ms, mode="backward", **columns)


def test_the_table_has_the_best_form_beside_the_goals():
    full, causal = (next(case for case in cases.BACKWARD if (case.D, case.causal) == (128, c)) for c in (False, True))
    some = [
        *(a_form(full, name, ms, tflops=300.0) for name, ms in (("64x128w8s2+bulk", 2.0), ("two-passes", 2.5))),
        made(full, "fusedattn:triton", ms=2.5, mode="backward"),
        made(full, "sdpa:cudnn", ms=1.8, mode="backward"),
        made(full, "flex", ms=3.0, mode="backward"),
        *(a_form(causal, name, ms) for name, ms in (("64x128w8s2+bulk", 1.5), ("two-passes", 1.4))),
        made(causal, "flex", ms=0.6, mode="backward"),
    ]
    assert contest.winners(some, passes.CONTEST) == {128: "64x128w8s2+bulk"}
    shown = passes.text(some)
    assert f"{'d128 full s4096':<19}{'64x128w8s2+bulk':<20}     300   0.90 (0.85)   0.72 (0.85)  sdpa:cudnn 1" in shown
    assert f"goal backward d128 full >= 0.85: met in 1 of 1 cells, worst 0.90 ({full.name})" in shown
    assert f"goal backward d128 causal >= 0.85: met in 0 of 1 cells, worst 0.40 ({causal.name})" in shown
    assert f"goal backward everywhere >= 0.7: met in 1 of 2 cells, worst 0.40 ({causal.name})" in shown
    assert (
        f"goal backward over FlexAttention everywhere >= 1.3: met in 1 of 2 cells, worst 0.40 ({causal.name})" in shown
    )
    assert "goal backward d256 full >= 1.2: not measured" in shown


def test_the_goals_of_the_backward_are_those_that_were_set():
    assert len(cases.BACKWARD) == len(set(cases.BACKWARD)) == 3 * 2 * 4
    assert {(case.D, passes.goal(case)) for case in cases.BACKWARD} == {(128, 0.85), (64, 1.0), (256, 1.2)}
    assert {case.Sq for case in cases.BACKWARD} == {2048, 4096, 8192, 16384}
    assert all(case.B * case.Sq == 16384 and case.Hq * case.D == 2048 for case in cases.BACKWARD)


def test_forms_are_two_passes_and_the_tiles_of_one_with_dq_by_either_way():
    for case in cases.TINY_BACKWARD:
        found = variants.backwards(case)
        assert found.pop("two-passes", 0) is None and set(found) <= set(variants.backwards())
        tiles = configs.tiles("one_pass", 90, 2, case.D) if case.D <= configs.ONE_PASS else ()
        assert list(found.values()) == [tile._replace(spills=0, bulk=bulk) for bulk in (True, False) for tile in tiles]
        assert list(found) == list(map(variants.tile_name, found.values()))
    work = attention.units(cases.BACKWARD, passes.QUESTION.providers("cuda"), passes.QUESTION.tier)
    wide = [name for case, name in work if case.D == 256 and name.startswith(variants.BACKWARD)]
    assert set(wide) == {"fusedattn:backward/two-passes"}
    assert [name for _, name in work[-24:]] == ["flex"] * 24
    with pytest.raises(ValueError, match="expected one of two-passes, .* after fusedattn:backward/, got three"):
        providers.find("fusedattn:backward/three")


def test_a_form_is_taken_while_it_is_called_and_no_longer(monkeypatch):
    """Each gives right gradients, by its kernels and by its tile."""
    pytest.importorskip("triton", reason="kernels need Triton")
    if not launch.interpreting():
        pytest.skip("kernels run on CPU tensors in the interpreter alone")
    case = cases.TINY_BACKWARD[0]
    tensors, ran = case.draw("cpu"), []
    truth, run = accuracy.truth(case, tensors), launch.run_tiled
    monkeypatch.setattr(
        launch,
        "run_tiled",
        lambda name, call, *rest: (ran.append((name, launch.candidates(name, call)[0])), run(name, call, *rest)),
    )
    for name in variants.backwards(case):
        tile = variants.backwards()[name]
        call = providers.find(variants.BACKWARD + name)(case, tensors)
        step = calls.step("backward", call, tensors)
        ran.clear()
        result = step()
        assert accuracy.judge(case, "backward", result, truth)[2] == ""
        launched = dict(ran)
        assert ("one_pass" in launched) == (name != "two-passes") != ("dq" in launched)
        assert tile is None or launched["one_pass"] == tile
    assert not torch.are_deterministic_algorithms_enabled()
    assert backward.passes(_call(tensors), (True,) * 3 + (False,) * 3)[1] == "one_pass"


def _call(tensors):
    from fusedattn.call.form import Arguments
    from fusedattn.call.rules import checked

    return checked(Arguments(*tensors[:3]))


def test_without_a_gpu_each_form_says_why_it_is_not_measured_or_is_right(at_once, tmp_path, capsys):
    chosen = [variants.BACKWARD + "two-passes", variants.BACKWARD + "64x128w8s2+bulk", "sdpa:flash"]
    question = passes.QUESTION._replace(providers=lambda device: chosen)
    found = ask(attention.main, tmp_path / "a.csv", question=question)
    assert {row.mode for row in found} == {"backward"}
    for case in cases.TINY_BACKWARD:
        here = {row.provider for row in found if table.case_of(row) == case}
        assert here == {name for name in chosen if variants.concerns(name, case)}
    assert "best form" in capsys.readouterr().out
