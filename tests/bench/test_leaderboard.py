"""Leaderboards of forms: of the kernel for Hopper and of the backward, the standings, the goals, and who is timed."""

import pytest
import torch
from fusedattn.bench import accuracy, calls, cases, providers
from fusedattn.bench.dev import leaderboard, questions
from fusedattn.bench.dev.questions import QUESTIONS

import fusedattn as fa
from fusedattn.launch import backward, run as launch, tiles as tile_table

from .test_bench import made
from .test_questions import ask

pytestmark = pytest.mark.usefixtures("one_thread")
HOPPER, BACKWARD = QUESTIONS["hopper"], QUESTIONS["backward_forms"]


def names(prefix, case=None):
    return [name.removeprefix(prefix) for name in providers.forms(case, prefix)]


def a_pipeline(case, name, ms, **columns):
    return made(case, providers.PIPELINE + name, ms=ms, **columns)


def cell_of(dim, length, causal=False):
    return next(case for case in cases.HOPPER if (case.D, case.Sq, case.causal) == (dim, length, causal))


def test_the_first_form_of_a_width_is_held_to_the_goals():
    full, causal, short = cell_of(128, 4096), cell_of(128, 4096, True), cell_of(128, 512)
    some = [
        *(a_pipeline(full, name, ms, tflops=600.0) for name, ms in (("128x128s2", 2.0), ("128x128s2+grid", 1.6))),
        made(full, "fusedattn:triton", ms=2.5),
        made(full, "sdpa:flash", ms=1.9),
        made(full, "sdpa:cudnn", ms=1.8, status="wrong"),  # by our rule; a peer all the same
        made(full, "flex", ms=3.0),
        *(a_pipeline(causal, name, ms) for name, ms in (("128x128s2", 1.0), ("128x128s2+grid", 1.5))),
        made(causal, "flex", ms=1.2),
        *(a_pipeline(short, name, ms) for name, ms in (("128x128s2", 1.0), ("128x128s2+grid", 1.0))),
        made(short, "fusedattn:triton", ms=0.1, status="wrong"),  # fast and wrong is no ratio
        made(short, "sdpa:cudnn", ms=0.8),
    ]
    speeds, count = leaderboard.standings(some, providers.PIPELINE)
    assert count == 3 and list(speeds) == ["128x128s2", "128x128s2+grid"]
    assert speeds["128x128s2"] == pytest.approx(0.8 ** (1 / 3))  # 1.6 / 2.0, and twice the fastest
    assert leaderboard.winners(some, providers.PIPELINE) == {128: "128x128s2"}
    shown = HOPPER.text(some)
    assert "d128: 128x128s2 0.928, 128x128s2+grid 0.874 of the fastest, in 3 cells" in shown
    assert "d128 causal: 128x128s2 1.000, 128x128s2+grid 0.667 of the fastest, in 1 cell" in shown
    assert shown.endswith("first of d128: 128x128s2")
    # By the pipeline that is first, 1.8 / 2.0 here; not by the best of each cell.
    assert (
        f"goal hopper d128 full S > 1024 >= 0.95: met in 0 of 1 case, median 0.900, worst 0.900 ({full.name})" in shown
    )
    assert (
        f"goal hopper d128 causal S > 1024 >= 1: met in 1 of 1 case, median 1.200, worst 1.200 ({causal.name})" in shown
    )
    assert f"goal hopper S <= 1024 >= 0.95: met in 0 of 1 case, median 0.800, worst 0.800 ({short.name})" in shown
    assert f"goal hopper everywhere >= 0.85: met in 2 of 3 cases, median 0.900, worst 0.800 ({short.name})" in shown
    assert f"goal universal d128 >= 0.8: met in 0 of 1 case, median 0.720, worst 0.720 ({full.name})" in shown
    assert "goal hopper d64 full S > 1024 >= 1.15: not measured" in shown and HOPPER.text([]) == "no rows"


def test_a_pipeline_that_failed_anywhere_does_not_win():
    cell, other = cell_of(64, 4096), cell_of(64, 512)
    fast, slow = "128x128s3", "192x128s2"
    some = [
        *(a_pipeline(cell, name, ms) for name, ms in ((fast, 1.0), (slow, 2.0))),
        *(a_pipeline(other, name, ms) for name, ms in ((fast, 1.0), (slow, 2.0))),
    ]
    assert leaderboard.winners(some, providers.PIPELINE) == {64: fast}
    some[2] = some[2]._replace(status="wrong")
    assert leaderboard.winners(some, providers.PIPELINE) == {64: slow} and leaderboard.failed(
        some, providers.PIPELINE
    ) == {fast}
    some[2] = some[2]._replace(status="unsupported: CUDA error: an illegal memory access", ms_p50="")
    assert leaderboard.winners(some, providers.PIPELINE) == {64: slow}
    assert f"so out of the standings: {fast}\n" in HOPPER.text(some)
    del some[2]  # the time was over: it is compared where both were timed
    assert leaderboard.standings(some, providers.PIPELINE) == ({fast: 1.0, slow: 0.5}, 1)
    assert leaderboard.winners(some, providers.PIPELINE) == {64: fast}


def asked(board, mode):
    """{case: the number that goals ask of the forms of a board}, of every goal but those of all cases and of others."""
    goals = [
        goal for goal in leaderboard.GOALS[board] if "everywhere" not in goal.said and "universal" not in goal.said
    ]
    every = cases.HOPPER if board == providers.PIPELINE else cases.BACKWARD
    found = {case: [goal.ask for goal in goals if goal.where(case)] for case in every}
    assert {goal.mode for goal in goals} == {mode} and all(len(asks) == 1 for asks in found.values())
    return {case: ask for case, (ask,) in found.items()}


def test_the_goals_are_those_that_were_set():
    goals = {(case.D, case.causal, case.Sq): ask for case, ask in asked(providers.PIPELINE, "forward").items()}
    assert len(goals) == len(cases.HOPPER) == 3 * 2 * 6
    assert {ask for (_, _, length), ask in goals.items() if length <= 1024} == {0.95}
    long = {(dim, causal): ask for (dim, causal, length), ask in goals.items() if length > 1024}
    assert [long[dim, causal] for dim in (64, 128, 256) for causal in (False, True)] == [1.15, 1.15, 0.95, 1, 1.5, 1.5]
    assert all(case.B * case.Sq == 16384 and case.Hq * case.D == 2048 for case in cases.HOPPER)
    assert {(case.D, case.Sq) for case in cases.HOPPER[:4]} == {(128, 4096), (128, 16384)}  # the most telling first
    assert {(case.D, ask) for case, ask in asked(providers.BACKWARD, "backward").items()} == {
        (128, 0.85),
        (64, 1.0),
        (256, 1.2),
    }
    assert len(cases.BACKWARD) == len(set(cases.BACKWARD)) == 3 * 2 * 4
    assert {case.Sq for case in cases.BACKWARD} == {2048, 4096, 8192, 16384}


def test_what_is_measured_of_the_hopper_kernel_without_a_gpu_is_why_it_cannot_be(at_once, tmp_path, monkeypatch):
    never = fa.backends.Backend("triton", lambda *_: ["it is a test"], None)
    monkeypatch.setattr(fa.backends, "BACKENDS", fa.backends.BACKENDS | {"triton": never})
    monkeypatch.setitem(cases.TABLES, "tiny-hopper", cases.TINY_HOPPER[:4:3])
    found = ask("hopper", tmp_path / "a.csv")
    assert len({(row.provider, row.case) for row in found}) == len(found)
    for case in cases.TABLES["tiny-hopper"]:
        here = {row.provider: row.status for row in found if row.case == case}
        mine = set(providers.forms(case, providers.PIPELINE))
        assert {name for name in here if name.startswith(providers.PIPELINE)} == mine and len(mine) >= 3
        reasons = "unsupported: the tensors are on the CPU", "unsupported: Gluon, the language of its kernel, has no"
        assert all(here[name].startswith(reasons) for name in mine) and here["sdpa:flash"] == "ok"
        assert {"fusedattn:triton", "sdpa:cudnn", "sdpa:efficient", "flex"} < here.keys()
    work = questions.units(cases.HOPPER, HOPPER.providers("cuda"), ["forward"], questions.flex_last)
    assert [name for _, name, _ in work[-36:]] == ["flex"] * 36
    first = [name for case, name, _ in work[:7] if case == cases.HOPPER[0]]  # all of one cell before the next
    assert len(first) == 7 and first[0] == "fusedattn:hopper/128x128s2" and "sdpa:cudnn" in first


def printed(among, **names):
    """What `pytest -v` prints of tests, with pytest-xdist or without, until it is killed."""
    outcomes = {
        "t/a.py::test_a[full-{good}]": "PASSED",
        "t/a.py::test_b[causal-{good}-(8, 9)]": "PASSED",
        "t/a.py::test_a[full-{bad}]": "PASSED",
        "t/a.py::test_b[causal-{bad}]": "FAILED",
        "t/a.py::test_c": "PASSED",
        "t/a.py::test_a[full-{crashed}]": "ERROR",
        "t/a.py::test_b[full-{waits}]": "PASSED",
        "t/a.py::test_a[full-{waits}]": "",
    }
    lines = ["collected 8 items", ""]
    for name, outcome in outcomes.items():
        if among:
            lines += [f"{name} ", *([f"[gw11] [ 12%] {outcome} {name} "] if outcome else [])]
        else:
            lines.append(f"{name} {outcome}{' ' * 9}[ 12%]" if outcome else f"{name} ")
    return "\n".join([*lines, "tests/a.py:12: in check", ""]).format(**names)


@pytest.mark.parametrize("among", [False, True], ids=["alone", "xdist"])
def test_what_did_not_pass_its_tests_in_the_same_run_is_not_timed(among, tmp_path, monkeypatch):
    (good, bad, crashed, waits), path = names(providers.PIPELINE, cases.TINY_HOPPER[0]), tmp_path / "tests.log"
    forms = [*providers.forms(prefix=providers.PIPELINE)]
    assert leaderboard.proven([*forms, "flex"], path) == ["flex"]  # pytest did not begin
    path.write_text(printed(among, good=good, bad=bad, crashed=crashed, waits=waits))
    asked = []
    monkeypatch.setattr(questions, "run", lambda work, *_: asked.append([name for _, name, _ in work]) or True)
    questions.main(["hopper", "--device", "cpu", "--tests", str(path)])
    (timed,) = asked
    assert {name for name in timed if name.startswith(providers.PIPELINE)} == {providers.PIPELINE + good}
    assert "fusedattn:triton" in timed and "sdpa:cudnn" in timed


def test_a_pipeline_is_taken_while_it_is_called_and_no_longer(monkeypatch):
    """Also by a call that was repeated with another."""
    from fusedattn.replay import cache

    case, before, seen = cases.TINY_HOPPER[0], launch.form_on_hopper, []
    tensors = case.draw("cpu")
    monkeypatch.setattr(providers, "_explain", lambda *_: fa.backends.Explanation("hopper", {}, {}))
    monkeypatch.setattr(
        fa, "attention", lambda *_, **options: seen.append((launch.form_on_hopper("hopper", None), options["backend"]))
    )
    monkeypatch.setattr(cache, "forget", lambda: seen.append("forget"))
    for taken in tile_table.HOPPER[128]:
        providers.find(providers.PIPELINE + providers.pipeline_name(taken))(case, tensors)(*tensors.inputs)
        assert seen == ["forget", (taken, "hopper"), "forget"] and launch.form_on_hopper is before
        seen.clear()
    with pytest.raises(
        ValueError, match="provider: expected one of .*fusedattn:hopper/128x128s3, .* got fusedattn:hopper/1x1s1"
    ):
        providers.find("fusedattn:hopper/1x1s1")
    other = names(providers.PIPELINE, cases.TINY_HOPPER[-1])[0]
    with pytest.raises(calls.Unsupported, match="it is for another width"):
        providers.find(providers.PIPELINE + other)(case, tensors)


def test_each_pipeline_has_a_name_of_its_own():
    for width, some in tile_table.HOPPER.items():
        assert len(set(map(providers.pipeline_name, some))) == len(some)
        case = cases.TINY_HOPPER[0]._replace(D=width - 8, Dv=8)
        assert names(providers.PIPELINE, case) == list(map(providers.pipeline_name, some))
    every = {providers.pipeline_name(taken) for some in tile_table.HOPPER.values() for taken in some}
    assert set(names(providers.PIPELINE)) == every


def a_form(case, name, ms, **columns):
    return made(case, providers.BACKWARD + name, ms=ms, mode="backward", **columns)


def test_the_first_backward_is_held_to_the_goals():
    full, causal = (next(case for case in cases.BACKWARD if (case.D, case.causal) == (128, c)) for c in (False, True))
    some = [
        *(a_form(full, name, ms, tflops=300.0) for name, ms in (("64x128w8s2+bulk", 2.0), ("two-passes", 2.5))),
        made(full, "fusedattn:triton", ms=2.5, mode="backward"),
        made(full, "sdpa:cudnn", ms=1.8, mode="backward"),
        made(full, "flex", ms=3.0, mode="backward"),
        *(a_form(causal, name, ms) for name, ms in (("64x128w8s2+bulk", 1.5), ("two-passes", 1.4))),
        made(causal, "flex", ms=0.6, mode="backward"),
    ]
    assert leaderboard.winners(some, providers.BACKWARD) == {128: "64x128w8s2+bulk"}
    shown = BACKWARD.text(some)
    assert f"goal backward d128 full >= 0.85: met in 1 of 1 case, median 0.900, worst 0.900 ({full.name})" in shown
    assert f"goal backward d128 causal >= 0.85: met in 0 of 1 case, median 0.400, worst 0.400 ({causal.name})" in shown
    assert f"goal backward everywhere >= 0.7: met in 1 of 2 cases, median 0.650, worst 0.400 ({causal.name})" in shown
    over = (
        f"backward over FlexAttention everywhere >= 1.3: met in 1 of 2 cases, median 0.950, worst 0.400 ({causal.name})"
    )
    assert over in shown and "goal backward d256 full >= 1.2: not measured" in shown


def test_forms_are_all_tiles_of_the_forward_two_passes_and_the_tiles_of_one_with_dq_by_either_way():
    for case in cases.TINY_BACKWARD:
        forms, fits = names(providers.BACKWARD, case), case.D <= tile_table.ONE_PASS
        tiles = tile_table.candidates("one_pass", 90, 2, case.D) if fits else ()
        ways = [
            *tiles,
            *(tile._replace(bulk=False) for tile in tiles if tile in tile_table.tiles("one_pass", 90, 2, case.D)),
        ]
        of_hopper = [name for name in forms if name.startswith("hopper")]
        assert len(of_hopper) == sum(
            len(rows.get(case.D, ())) for name, rows in tile_table.ON_HOPPER.items() if name != "hopper"
        )
        assert forms == ["two-passes", *map(providers.tile_name, ways), *of_hopper]
        assert set(forms) <= set(names(providers.BACKWARD))
        tiles = tile_table.candidates("forward", 90, 2, case.D)
        assert names(providers.FORWARD, case) == list(map(providers.tile_name, tiles)) and len(tiles) > 4
    work = questions.units(cases.BACKWARD, BACKWARD.providers("cuda"), ["backward"], questions.flex_last)
    wide = [name for case, name, _ in work if case.D == 256 and name.startswith(providers.BACKWARD)]
    assert set(wide) == {
        f"fusedattn:backward/{name}" for name in ("two-passes", "hopper-bwd-256-64x64s2", "hopper-stored-64x128s3")
    }
    assert [name for _, name, _ in work[-24:]] == ["flex"] * 24
    with pytest.raises(
        ValueError, match="expected one of .*fusedattn:backward/two-passes, .* got fusedattn:backward/three"
    ):
        providers.find("fusedattn:backward/three")


def test_a_backward_is_taken_while_it_is_called_and_no_longer(monkeypatch):
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
    for name in names(providers.BACKWARD, case):
        if name.startswith("hopper"):
            continue  # it has no interpreter
        call = providers.find(providers.BACKWARD + name)(case, tensors)
        ran.clear()
        with calls.step("backward", call, tensors) as step:
            result = step()
        assert accuracy.judge(case, "backward", result, truth)[2] == ""
        launched = dict(ran)
        assert ("one_pass" in launched) == (name != "two-passes") != ("dq" in launched)
        assert name == "two-passes" or providers.tile_name(launched["one_pass"]) == name
    assert not torch.are_deterministic_algorithms_enabled()
    assert backward.passes(_call(tensors), (True,) * 3 + (False,) * 3)[1] == "one_pass"


def test_a_forward_is_by_its_tile():
    pytest.importorskip("triton", reason="kernels need Triton")
    if not launch.interpreting():
        pytest.skip("kernels run on CPU tensors in the interpreter alone")
    case = cases.TINY_BACKWARD[0]
    tensors = case.draw("cpu")
    for name in names(providers.FORWARD, case):
        call = providers.find(providers.FORWARD + name)(case, tensors)
        with calls.step("forward", call, tensors) as step:
            result, (tile,) = step(), launch.candidates("forward", _call(tensors))
        assert accuracy.judge(case, "forward", result, accuracy.truth(case, tensors))[2] == ""
        assert providers.tile_name(tile) == name


def _call(tensors):
    from fusedattn.call.form import Arguments
    from fusedattn.call.rules import checked

    return checked(Arguments(*tensors[:3]))


def test_without_a_gpu_each_form_says_why_it_is_not_measured_or_is_right(at_once, tmp_path, capsys):
    chosen = [providers.BACKWARD + "two-passes", providers.BACKWARD + "64x128w8s2+bulk", "sdpa:flash"]
    found = ask("backward_forms", tmp_path / "a.csv", "--providers", ",".join(chosen))
    assert {row.mode for row in found} == {"backward"}
    for case in cases.TINY_BACKWARD:
        here = {row.provider for row in found if row.case == case}
        assert here == {name for name in chosen if providers.concerns(name, case)}
    assert "goal backward everywhere" in capsys.readouterr().out
