"""Pipeline time in columns: closed forms against the event simulator."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planner.schedules.columns import StageTimes, pipeline_time
from orchestrator.planner.schedules.orders import SCHEDULES, problem_of
from orchestrator.planner.schedules.simulate import simulate
from tests.orchestrator.planner.schedules.simulated import simulated_time

CODE = {name: index for index, name in enumerate(SCHEDULES)}
UNEVEN_EXACT = ("naive", "gpipe", "1f1b", "pipedream")
seconds = st.floats(0.01, 10.0)
extra = st.tuples(*[st.one_of(st.just(0.0), st.floats(0.0, 10.0))] * 3)


@st.composite
def pipelines(draw, names=SCHEDULES):
    name = draw(st.sampled_from(names))
    pp = draw(st.integers(1, 9))
    v = {
        "zbv": 2,
        "dualpipev": 2,
        "interleaved_1f1b": draw(st.integers(2, 4)),
        "zb1p": draw(st.integers(2, 4)),
    }.get(name, 1)
    m = draw(st.integers(1, 40))
    if problem_of(name, pp, v, m):
        m = max(2, m // 4) * pp
    return name, pp, v, m


def simulated(name, pp, v, m, regular, first=(0, 0, 0), last=(0, 0, 0), hop=0.0, overlap=0.0):
    stages = np.repeat(np.asarray(regular, float)[:, None], pp * v, 1)
    stages[:, 0] += first
    stages[:, -1] += last
    f, b, w = stages
    return simulate(
        name,
        pp,
        m,
        virtual_stages=v,
        forward_s=f,
        backward_s=b,
        weight_s=w,
        hop_s=hop,
        overlap_s=overlap,
    )


@settings(max_examples=300, deadline=None)
@given(pipelines(), seconds, seconds, seconds, st.floats(0.0, 1.0))
def test_even_stages_are_exact_for_every_schedule(pipeline, f, b, w, saved):
    name, pp, v, m = pipeline
    overlap = saved * min(f, b + w)
    closed = pipeline_time(CODE[name], pp, v, m, StageTimes(f, b, w), overlap_s=overlap)
    run = simulated(*pipeline, (f, b, w), overlap=overlap)
    assert closed.makespan_s[0] == pytest.approx(run.makespan_s, rel=1e-9)
    assert closed.busy_s[0] == pytest.approx(run.busy_s.mean(), rel=1e-9)
    assert closed.bubble_fraction[0] == pytest.approx(run.bubble_fraction, abs=1e-9)


@settings(max_examples=300, deadline=None)
@given(
    pipelines(UNEVEN_EXACT), st.tuples(seconds, seconds, seconds), extra, extra, st.floats(0.0, 3.0)
)
def test_uneven_ends_and_hops_are_exact_where_the_closed_form_is(
    pipeline, regular, first, last, hop
):
    name, pp, v, m = pipeline
    closed = pipeline_time(
        CODE[name],
        pp,
        v,
        m,
        StageTimes(*regular),
        first=StageTimes(*first),
        last=StageTimes(*last),
        hop_s=hop,
    )
    run = simulated(*pipeline, regular, first, last, hop)
    assert closed.makespan_s[0] == pytest.approx(run.makespan_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "mean", "worst"),
    [
        ("interleaved_1f1b", 1e-4, 0.01),
        ("zb1p", 5e-4, 0.01),
        ("zbv", 2e-4, 0.01),
        ("dualpipev", 5e-4, 0.02),
    ],
)
def test_uneven_ends_and_hops_are_near_for_the_others(name, mean, worst):
    """Realistic ends: a head worth up to 1.5 chunks, a light embedding, hops up to a tenth of a
    chunk's forward.
    """
    rng = np.random.default_rng(3)
    n, errors = 24, []
    for pp in (2, 4, 8, 16):
        for v in (2,) if name in ("zbv", "dualpipev") else (2, 4):
            for m in (pp, pp + 1, 2 * pp, 4 * pp, 8 * pp):
                if problem_of(name, pp, v, m):
                    continue
                # without, some and full recomputation
                backward = rng.uniform(0.8, 1.3, n) + rng.choice([0, 0.2, 1], n)
                regular = StageTimes(np.ones(n), backward, rng.uniform(0.6, 1.05, n))
                changes = {
                    "first": StageTimes(*rng.uniform(0, 0.1, (3, n))),
                    "last": StageTimes(*(rng.uniform(0, 1.5, n) * rng.uniform(0.7, 1.3, (3, n)))),
                    "hop_s": rng.uniform(0, 0.1, n),
                    "overlap_s": rng.uniform(0, 0.2, n),
                }
                closed = pipeline_time(CODE[name], pp, v, m, regular, **changes)
                exact = simulated_time(CODE[name], pp, v, m, regular, **changes)
                np.testing.assert_allclose(closed.busy_s, exact.busy_s)
                errors.append(np.abs(closed.makespan_s / exact.makespan_s - 1))
    assert np.mean(errors) < mean and np.max(errors) < worst, (np.mean(errors), np.max(errors))


def test_textbook_bubbles():
    t = StageTimes(1.0, 1.0, 1.0)

    def bubble(name, pp, v, m, times=t):
        return float(pipeline_time(CODE[name], pp, v, m, times).bubble_s[0])

    assert bubble("gpipe", 8, 1, 32) == bubble("1f1b", 8, 1, 32) == 7 * 3  # (p - 1)(F + B)
    assert pipeline_time(CODE["1f1b"], 8, 1, 32, t).bubble_fraction[0] == pytest.approx(
        7 / (32 + 7)
    )
    quarter = StageTimes(0.25, 0.25, 0.25)
    assert bubble("interleaved_1f1b", 8, 4, 32, quarter) == pytest.approx(7 * 3 / 4)
    half = StageTimes(0.5, 0.5, 0.5)
    # (p - 1)(F + B - 2W), B the full backward
    assert bubble("zb1p", 8, 2, 32, half) == pytest.approx(7 * 0.5)
    assert bubble("zbv", 8, 2, 32, half) == pytest.approx(7 * 0.5)
    assert bubble("naive", 8, 1, 32) == 32 * 3 * 7
    assert bubble("pipedream", 8, 1, 32) == 0


def test_rows_of_many_schedules_at_once_are_the_rows_one_by_one():
    rng = np.random.default_rng(11)
    rows = [
        ("1f1b", 4, 1, 3),
        ("zbv", 4, 2, 3),
        ("zb1p", 4, 2, 2),
        ("naive", 2, 1, 5),
        ("zbv", 4, 2, 3),
        ("dualpipev", 2, 2, 9),
    ]
    code = [CODE[name] for name, *_ in rows]
    pp, v, m = np.array([counts for _, *counts in rows]).T
    times = rng.uniform(0.5, 2.0, (3, len(rows)))
    together = pipeline_time(code, pp, v, m, StageTimes(*times), hop_s=0.0)
    for i, row in enumerate(rows):
        assert together.makespan_s[i] == pytest.approx(simulated(*row, times[:, i]).makespan_s)


def test_busy_time_counts_what_pairs_save():
    run = simulated("dualpipev", 3, 2, 11, (1, 1, 1), (0.1, 0, 0.2), (0.5, 0.6, 0.7), 0.01, 0.3)
    ends = {
        "first": StageTimes(0.1, 0, 0.2),
        "last": StageTimes(0.5, 0.6, 0.7),
        "hop_s": 0.01,
        "overlap_s": 0.3,
    }
    closed = pipeline_time(CODE["dualpipev"], 3, 2, 11, StageTimes(1, 1, 1), **ends)
    assert closed.busy_s[0] == pytest.approx(run.busy_s.mean())


def test_rows_are_refused_exactly_where_one_alone_is():
    counts = np.stack(
        np.meshgrid(range(len(SCHEDULES)), range(-1, 5), range(-1, 4), range(-1, 12)), -1
    ).reshape(-1, 4)
    for code, pp, v, m in counts[::3].tolist():
        problem = problem_of(SCHEDULES[code], pp, v, m)
        if problem is None:
            pipeline_time(code, pp, v, m, StageTimes(1, 1, 1))
        else:
            with pytest.raises(ValueError, match=re.escape(problem)):
                pipeline_time(code, pp, v, m, StageTimes(1, 1, 1))


def test_a_row_that_cannot_run_is_refused_in_words():
    with pytest.raises(ValueError, match="at least 2 x pp = 8"):
        pipeline_time([CODE["1f1b"], CODE["dualpipev"]], 4, [1, 2], 7, StageTimes(1, 1, 1))
    with pytest.raises(ValueError, match="schedule index 8"):
        pipeline_time(8, 4, 1, 7, StageTimes(1, 1, 1))
