"""The benchmark of the kernel for Hopper: its table, who wins, what its goals are, and what is not timed."""

import pytest
from fusedattn.bench import attention, calls, cases, contest, hopper, providers, table, variants

import fusedattn as fa

from .test_bench import made
from .test_questions import ask

pytestmark = pytest.mark.usefixtures("one_thread")


def a_pipeline(case, name, ms, **columns):
    return made(case, variants.PIPELINE + name, ms=ms, **columns)


def cell_of(dim, length, causal=False):
    return next(case for case in cases.HOPPER if (case.D, case.Sq, case.causal) == (dim, length, causal))


def test_the_hopper_table_has_the_best_of_each_cell_beside_the_goals():
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
    found = contest.cells(some, hopper.CONTEST)
    assert [(cell.best, cell.peer.provider) for cell in found.values()] == [
        ("128x128s2+grid", "sdpa:cudnn"),
        ("128x128s2", "flex"),
        ("128x128s2", "sdpa:cudnn"),
    ]
    assert found[full].ratio(found[full].other) == 0.72 and found[short].other is None
    speeds, count = contest.standings(found.values())
    assert count == 3 and list(speeds) == ["128x128s2", "128x128s2+grid"]
    assert speeds["128x128s2"] == pytest.approx(0.8 ** (1 / 3))  # 1.6 / 2.0, and twice the fastest
    assert contest.winners(some, hopper.CONTEST) == {128: "128x128s2"}
    shown = hopper.text(some)
    assert f"{'d128 full s4096':<19}{'128x128s2+grid':<20}     600   1.12 (0.95)   0.72 (0.80)  sdpa:cudnn 1" in shown
    assert "d128: 128x128s2 0.928, 128x128s2+grid 0.874 of the fastest, in 3 cells" in shown
    assert "d128 causal: 128x128s2 1.000, 128x128s2+grid 0.667 of the fastest, in 1 cells" in shown
    assert "first of d128: 128x128s2\n" in shown
    # By the pipeline that is first, 1.8 / 2.0 here; not by the best of each cell.
    assert f"goal hopper d128 full S > 1024 >= 0.95: met in 0 of 1 cells, worst 0.90 ({full.name})" in shown
    assert f"goal hopper d128 causal S > 1024 >= 1.0: met in 1 of 1 cells, worst 1.20 ({causal.name})" in shown
    assert f"goal hopper S <= 1024 >= 0.95: met in 0 of 1 cells, worst 0.80 ({short.name})" in shown
    assert f"goal hopper everywhere >= 0.85: met in 2 of 3 cells, worst 0.80 ({short.name})" in shown
    assert f"goal universal d128 >= 0.8: met in 0 of 1 cells, worst 0.72 ({full.name})" in shown
    assert "goal hopper d64 full S > 1024 >= 1.15: not measured" in shown and hopper.text([]) == "no rows"


def test_a_pipeline_that_failed_anywhere_does_not_win():
    cell, other = cell_of(64, 4096), cell_of(64, 512)
    fast, slow = "128x128s3", "192x128s2"
    some = [
        *(a_pipeline(cell, name, ms) for name, ms in ((fast, 1.0), (slow, 2.0))),
        *(a_pipeline(other, name, ms) for name, ms in ((fast, 1.0), (slow, 2.0))),
    ]
    assert contest.winners(some, hopper.CONTEST) == {64: fast}
    some[2] = some[2]._replace(status="wrong")
    assert contest.winners(some, hopper.CONTEST) == {64: slow} and contest.failed(some, hopper.CONTEST) == {fast}
    assert (
        contest.cells(some, hopper.CONTEST)[other].best == slow
        and contest.cells(some, hopper.CONTEST)[cell].best == fast
    )
    some[2] = some[2]._replace(status="unsupported: CUDA error: an illegal memory access", ms_p50="")
    assert contest.winners(some, hopper.CONTEST) == {64: slow}
    assert f"so out of the standings: {fast}\n" in hopper.text(some)
    del some[2]  # the time was over: it is compared where both were timed
    assert contest.standings(contest.cells(some, hopper.CONTEST).values()) == ({fast: 1.0, slow: 0.5}, 1)
    assert contest.winners(some, hopper.CONTEST) == {64: fast}


def test_the_goals_of_the_forward_are_those_that_were_set():
    goals = {(case.D, case.causal, case.Sq): hopper.goal(case) for case in cases.HOPPER}
    assert len(goals) == len(cases.HOPPER) == 3 * 2 * 6
    assert {goal for (_, _, length), goal in goals.items() if length <= 1024} == {0.95}
    long = {(dim, causal): goal for (dim, causal, length), goal in goals.items() if length > 1024}
    assert [long[dim, causal] for dim in (64, 128, 256) for causal in (False, True)] == [1.15, 1.15, 0.95, 1, 1.5, 1.5]
    assert all(case.B * case.Sq == 16384 and case.Hq * case.D == 2048 for case in cases.HOPPER)
    assert {(case.D, case.Sq) for case in cases.HOPPER[:4]} == {(128, 4096), (128, 16384)}  # the most telling first


def test_what_is_measured_of_the_hopper_kernel_without_a_gpu_is_why_it_cannot_be(
    at_once, tmp_path, monkeypatch, capsys
):
    never = fa.backends.Backend("triton", lambda *_: ["it is a test"], None)
    monkeypatch.setattr(fa.backends, "BACKENDS", fa.backends.BACKENDS | {"triton": never})
    found = ask(hopper.main, tmp_path / "a.csv")
    assert len({(row.provider, table.case_of(row)) for row in found}) == len(found)
    for case in cases.TINY_HOPPER:
        here = {row.provider: row.status for row in found if table.case_of(row) == case}
        mine = {variants.PIPELINE + name for name in variants.pipelines(case)}
        assert {name for name in here if name.startswith(variants.PIPELINE)} == mine and len(mine) >= 3
        reasons = "unsupported: the tensors are on the CPU", "unsupported: Gluon, the language of its kernel, has no"
        assert all(here[name].startswith(reasons) for name in mine) and here["sdpa:flash"] == "ok"
        assert {"fusedattn:triton", "sdpa:cudnn", "sdpa:efficient", "flex"} < here.keys()
    assert (
        f"\n{'d256 causal s16':<19}{'-':<20}{'-':>8}      - (0.95)      -         sdpa:flash" in capsys.readouterr().out
    )
    work = attention.units(cases.HOPPER, hopper.QUESTION.providers("cuda"), hopper.QUESTION.tier)
    assert [name for _, name in work[-36:]] == ["flex"] * 36
    first = [name for case, name in work[:7] if case == cases.HOPPER[0]]  # all of one cell before the next
    assert len(first) == 7 and first[0] == "fusedattn:hopper/128x128s2" and "sdpa:cudnn" in first


def test_what_did_not_pass_its_tests_in_the_same_run_is_not_timed(tmp_path, monkeypatch):
    (good, bad, crashed, untested), path = variants.pipelines(cases.TINY_HOPPER[0]), tmp_path / "tests.xml"
    assert not hopper.proven(path)  # pytest was killed before it wrote
    path.write_text(
        f"""<testsuites><testsuite>
        <testcase name="test_a[full-{good}]"/><testcase name="test_b[causal-{good}-8]"/><testcase name="test_c"/>
        <testcase name="test_a[full-{bad}]"/><testcase name="test_b[causal-{bad}]"><failure message="no"/></testcase>
        <testcase name="test_a[full-{crashed}]"><error message="worker crashed"/></testcase>
        <testcase name="test_a[full-{untested}]"><skipped/></testcase>
        <testcase name="test_c[7]"><failure/></testcase></testsuite></testsuites>"""
    )
    assert hopper.proven(path) == {good}
    monkeypatch.setattr(attention, "run", lambda chosen, names, *_: asked.append(names))
    asked = []
    hopper.main(["--device", "cpu", "--tests", str(path)])
    (names,) = asked
    assert [name for name in names if name.startswith(variants.PIPELINE)] == [variants.PIPELINE + good]
    assert "fusedattn:triton" in names and "sdpa:cudnn" in names


def test_a_pipeline_is_taken_while_it_is_called_and_no_longer(monkeypatch):
    """Also by a call that was repeated with another."""
    from fusedattn.launch import tiles
    from fusedattn.replay import cache

    case, before, seen = cases.TINY_HOPPER[0], tiles.HOPPER, []
    tensors = case.draw("cpu")
    monkeypatch.setattr(providers, "_explain", lambda *_: fa.backends.Explanation("hopper", {}, {}))
    monkeypatch.setattr(
        fa, "attention", lambda *_, **options: seen.append((tiles.pipeline(case.D), options["backend"]))
    )
    monkeypatch.setattr(cache, "forget", lambda: seen.append("forget"))
    for name, taken in variants.pipelines(case).items():
        providers.find(variants.PIPELINE + name)(case, tensors)(*tensors.inputs)
        assert seen == ["forget", (taken, "hopper"), "forget"] and tiles.HOPPER is before
        seen.clear()
    with pytest.raises(ValueError, match="provider: expected one of 128x128s3, .* after fusedattn:hopper/, got 1x1s1"):
        providers.find("fusedattn:hopper/1x1s1")
    other = next(iter(variants.pipelines(cases.TINY_HOPPER[-1])))
    with pytest.raises(calls.Unsupported, match="it is for another width"):
        providers.find(variants.PIPELINE + other)(case, tensors)


def test_each_pipeline_has_a_name_of_its_own():
    from fusedattn.launch import tiles

    for width, some in tiles.HOPPER.items():
        assert len(set(map(variants.pipeline_name, some))) == len(some)
        case = cases.TINY_HOPPER[0]._replace(D=width - 8, Dv=8)
        assert tuple(variants.pipelines(case).values()) == some
    assert set(variants.pipelines().values()) == {taken for some in tiles.HOPPER.values() for taken in some}
