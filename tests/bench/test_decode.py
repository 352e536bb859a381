"""The question of decoding: what it measures, whether it finds what is wrong, and what it says."""

import pytest
from fusedattn.bench import calls, cases, cost, providers
from fusedattn.bench.dev import questions
from fusedattn.bench.dev.questions import QUESTIONS

import fusedattn as fa

from ..close import assert_like
from .test_bench import made
from .test_questions import ask

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_run_without_a_gpu(at_once, tmp_path, capsys):
    found = {(row.mode, row.provider): row.status for row in ask("decode", tmp_path / "a.csv")}
    assert {found["forward", f"fusedattn:{name}"] for name in ("cache", "pages=16", "pages=256")} == {"ok"}
    assert found["graph", "fusedattn:cache"] == "unsupported: a CUDA graph needs a GPU"
    assert "us for one sequence of 1024 keys in a graph <= 8: not measured" in capsys.readouterr().out


@pytest.mark.parametrize("page", [None, 16])
def test_a_cache_and_pages_hold_the_same_keys(page):
    for case in cases.TINY_DECODE:
        tensors = case.draw("cpu")
        assert_like(providers.cached(page, case, tensors)(*tensors.inputs), fa.reference.eager, *tensors.inputs)
    with pytest.raises(calls.Unsupported, match="without options"):
        providers.cached(page, case._replace(options="softcap=3"), tensors)
    if page is not None:
        with pytest.raises(calls.Unsupported, match="its keys are no multiple of the page, 16"):
            providers.cached(page, case._replace(Sk=40), case._replace(Sk=40).draw("cpu"))


def test_the_table_is_what_the_goals_speak_of():
    assert {case.B for case in cases.DECODE} >= {1, 256} and {case.Hq // case.Hkv for case in cases.DECODE} == {1, 4, 8}
    assert {case.Sk for case in cases.DECODE} >= {1024, 131072} and all(case.Sq == 1 for case in cases.DECODE)
    assert len(set(cases.DECODE)) == len(cases.DECODE) and max(map(cost.held, cases.DECODE)) < 9e9
    assert any(cost.held(case) >= questions.LARGE for case in cases.DECODE)


def test_what_it_says():
    large, small = (
        next(case for case in cases.DECODE if (case.B, case.Sk, case.Hkv) == sizes)
        for sizes in ((64, 8192, 8), (1, 1024, 8))
    )
    some = [
        made(large, "fusedattn:cache", "forward", ms=0.6, gbps=3600.0, copy_gbps=4000.0),
        made(large, "sdpa:flash", "forward", ms=0.72, gbps=3000.0, copy_gbps=4000.0),
        made(large, "fusedattn:pages=16", "forward", ms=0.1, status="wrong"),
        made(small, "fusedattn:cache", "forward", ms=0.01, gbps=400.0, copy_gbps=4000.0),
        made(small, "fusedattn:cache", "graph", ms=0.009),
    ]
    shown = QUESTIONS["decode"].text(some)
    assert (
        f"a copy's speed from 256 MB on >= 0.85: met in 1 of 1 case, median 0.900, worst 0.900 ({large.name})" in shown
    )
    assert f"sdpa:flash from 256 MB on >= 1.1: met in 1 of 1 case, median 1.200, worst 1.200 ({large.name})" in shown
    assert f"in a graph <= 8: met in 0 of 1 case, median 9.000, worst 9.000 ({small.name})" in shown
    assert [goal.line([]).endswith(": not measured") for goal in questions.DECODE] == [True] * 3
    last = QUESTIONS["decode"].text([row._replace(gbps=3000.0) for row in some[:1]])
    assert f"met in 0 of 1 case, median 0.750, worst 0.750 ({large.name})" in last
