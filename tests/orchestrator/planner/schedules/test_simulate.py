"""The event simulator: what it respects, what it counts, what it refuses."""

import numpy as np
import pytest

from orchestrator.planner.schedules import steady
from orchestrator.planner.schedules.columns import StageTimes, pipeline_time
from orchestrator.planner.schedules.inflight import in_flight, weight_versions
from orchestrator.planner.schedules.orders import SCHEDULES, device_of_stage, problem_of
from orchestrator.planner.schedules.simulate import simulate, steady_period_s
from orchestrator.planner.schedules.timeline import timeline

PIPELINES = [
    ("naive", 4, 1, 3),
    ("gpipe", 4, 1, 6),
    ("1f1b", 4, 1, 6),
    ("1f1b", 5, 1, 2),
    ("interleaved_1f1b", 3, 2, 6),
    ("interleaved_1f1b", 4, 3, 10),
    ("interleaved_1f1b", 4, 2, 3),
    ("zb1p", 3, 2, 9),
    ("zb1p", 4, 3, 2),
    ("zbv", 4, 2, 9),
    ("zbv", 4, 2, 2),
    ("dualpipev", 3, 2, 8),
    ("dualpipev", 1, 2, 4),
    ("pipedream", 4, 1, 8),
]


def uneven(rng, stages):
    return dict(
        zip(
            ("forward_s", "backward_s", "weight_s"), rng.uniform(0.5, 2.0, (3, stages)), strict=True
        )
    )


@pytest.mark.parametrize(("name", "pp", "v", "m"), PIPELINES)
def test_nothing_starts_before_its_device_is_free_and_its_input_there(name, pp, v, m):
    rng = np.random.default_rng(pp * 100 + m)
    stages = pp * v
    times, hops = uneven(rng, stages), rng.uniform(0.1, 0.5, stages - 1)
    run = simulate(name, pp, m, virtual_stages=v, hop_s=hops, overlap_s=0.1, **times)
    split = name in ("zb1p", "zbv", "dualpipev")
    done: dict[tuple[str, int, int], float] = {}
    begun: dict[tuple[str, int, int], float] = {}
    free = [0.0] * pp
    for event in sorted(run.events, key=lambda e: (e.device, e.start_s)):
        assert event.start_s >= free[event.device] - 1e-9
        assert event.device == device_of_stage(name, pp, event.stage)
        free[event.device] = event.end_s
        parts = [(event.kind, event.stage, event.micro_batch)]
        if event.kind == "FB":
            parts = [("F", *parts[0][1:]), ("B", event.backward_stage, event.backward_micro_batch)]
        for part in parts:
            begun[part], done[part] = event.start_s, event.end_s
    f, b, w = times.values()
    for (kind, stage, mb), start in begun.items():
        before = []
        if kind == "F" and stage:
            before = [("F", stage - 1)]
        elif kind in "BI":
            before = [("F", stage)] + (
                [("B", stage + 1), ("I", stage + 1)] if stage < stages - 1 else []
            )
        elif kind == "W":
            before = [("I", stage)]
        ends = [(s, done[k, s, mb]) for k, s in before if (k, s, mb) in done]
        assert bool(ends) == bool(before)
        for other, end in ends:
            apart = device_of_stage(name, pp, other) != device_of_stage(name, pp, stage)
            assert start >= end + (hops[min(stage, other)] if apart else 0.0) - 1e-9
    counted = {kind: sum(1 for key in done if key[0] == kind) for kind in "FBIW"}
    assert counted["F"] == counted["B"] + counted["I"] == m * stages
    assert counted["W"] == counted["I"] and (split or counted["I"] == 0)
    pairs = sum(1 for event in run.events if event.kind == "FB")
    assert run.busy_s.sum() == pytest.approx(m * (f + b + w).sum() - 0.1 * pairs)
    assert run.bubble_fraction == pytest.approx(1 - run.busy_s.sum() / (pp * run.makespan_s))


def test_activations_in_flight_are_the_formulas():
    for index, name in enumerate(SCHEDULES):
        for pp in (1, 2, 3, 4, 6):
            for v in (1, 2, 3, 4):
                for m in range(1, 3 * pp + 3):
                    if problem_of(name, pp, v, m):
                        continue
                    run = simulate(
                        name, pp, m, virtual_stages=v, forward_s=1, backward_s=1, weight_s=1
                    )
                    ours = in_flight(index, pp, v, m, np.arange(pp))
                    np.testing.assert_array_equal(
                        run.in_flight, ours, err_msg=f"{name} {pp} {v} {m}"
                    )


def test_in_flight_figures_of_the_papers():
    code = {name: index for index, name in enumerate(SCHEDULES)}
    assert in_flight(code["gpipe"], 8, 1, 32, 0) == 32
    assert in_flight(code["1f1b"], 8, 1, 32, [0, 3, 7]).tolist() == [8, 5, 1]
    # arXiv 2205.05198, section 5
    assert in_flight(code["interleaved_1f1b"], 8, 4, 32, 0) == 8 * (1 + 7 / (8 * 4))
    assert in_flight(code["zb1p"], 8, 2, 32, [0, 7]).tolist() == [8, 8]
    assert in_flight(code["zbv"], 8, 2, 32, [0, 7]).tolist() == [8, 8]
    assert in_flight(code["dualpipev"], 8, 2, 32, [0, 7]).tolist() == [8.5, 8.5]
    assert weight_versions(4, np.arange(4)).tolist() == [4, 3, 2, 1]


def test_pipedream_steady_state_has_no_bubble_where_balanced():
    run = simulate("pipedream", 4, 12, forward_s=1, backward_s=1, weight_s=1)
    assert run.bubble_fraction == 0 and run.makespan_s == 36
    assert run.in_flight.tolist() == [4, 3, 2, 1]
    heavy = simulate("pipedream", 4, 12, forward_s=[1, 1, 2, 1], backward_s=1, weight_s=1)
    assert heavy.makespan_s == 12 * 4 and heavy.bubble_fraction == pytest.approx(
        1 - (3 + 3 + 4 + 3) / 16
    )


def test_pipedream_period_is_the_rate_a_long_1f1b_run_settles_at():
    rng = np.random.default_rng(7)
    for _ in range(12):
        pp = int(rng.integers(2, 6))
        f, b, w = rng.uniform(0.5, 1.5, (3, pp))
        hops = rng.uniform(0, 1.0, pp - 1)
        far = 60 * 12  # divides by every length of cycle up to 6

        def span(m, f=f, b=b, w=w, hops=hops, pp=pp):
            return simulate(
                "1f1b", pp, m, forward_s=f, backward_s=b, weight_s=w, hop_s=hops
            ).makespan_s

        assert (span(far + 60) - span(far)) / 60 == pytest.approx(
            steady_period_s(f + b + w, hops), rel=1e-9
        )


@pytest.mark.parametrize(
    ("name", "pp", "v", "m"),
    [
        ("naive", 3, 1, 64),
        ("1f1b", 4, 1, 71),
        ("1f1b", 4, 1, 120),
        ("interleaved_1f1b", 3, 2, 60),
        ("interleaved_1f1b", 5, 3, 60),
        ("interleaved_1f1b", 12, 2, 143),
        ("zb1p", 3, 2, 60),
        ("zbv", 3, 2, 62),
        ("dualpipev", 3, 2, 61),
    ],
)
def test_long_steps_are_worked_out_from_short_ones_exactly(monkeypatch, name, pp, v, m):
    rng = np.random.default_rng(m)
    shortened = 0
    for _ in range(6):
        given = {
            **uneven(rng, pp * v),
            "virtual_stages": v,
            "hop_s": rng.choice([0, 0.2]),
            "overlap_s": 0.1,
        }
        whole = simulate(name, pp, m, **given)
        with monkeypatch.context() as patch:
            patch.setattr(steady, "_MANY", 0)
            short = simulate(name, pp, m, **given)
        shortened += short.listed < m
        assert whole.listed == m
        assert short.makespan_s == pytest.approx(whole.makespan_s, rel=1e-9)
        np.testing.assert_allclose(short.busy_s, whole.busy_s)
        np.testing.assert_array_equal(short.in_flight, whole.in_flight)
        listed = [event[:6] for event in whole.events if event.micro_batch < short.listed]
        np.testing.assert_allclose([e[4:] for e in listed], [event[4:6] for event in short.events])
        assert [e[:4] for e in listed] == [event[:4] for event in short.events]
    assert shortened


def test_a_very_long_step_agrees_with_its_closed_form():
    run = simulate("zbv", 32, 2048, virtual_stages=2, forward_s=1, backward_s=1.3, weight_s=0.9)
    closed = pipeline_time(SCHEDULES.index("zbv"), 32, 2, 2048, StageTimes(1, 1.3, 0.9))
    assert run.listed < run.micro_batches == 2048
    assert run.makespan_s == pytest.approx(closed.makespan_s[0], rel=1e-9)
    assert run.bubble_fraction == pytest.approx(closed.bubble_fraction[0], rel=1e-6)


def test_timeline_draws_the_first_micro_batches_in_plain_numbers():
    run = simulate("dualpipev", 3, 40, virtual_stages=2, forward_s=1, backward_s=1, weight_s=1)
    drawn = timeline(run, 8)
    assert (drawn["devices"], drawn["micro_batches"], drawn["drawn"]) == (3, 40, 8)
    assert {row["kind"] for row in drawn["rows"]} == {"F", "B", "W", "F&B"}
    assert max(row["micro_batch"] for row in drawn["rows"]) == 7
    assert drawn["drawn_s"] < drawn["makespan_s"] == run.makespan_s
    assert drawn["bubble_fraction"] == run.bubble_fraction
    pair = next(row for row in drawn["rows"] if row["kind"] == "F&B")
    assert pair["backward_stage"] == 5 - pair["stage"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batches": 0}, "micro-batches is 0"),
        ({"pp": 0}, "pp is 0"),
        ({"schedule": "dualpipev", "virtual_stages": 2, "micro_batches": 7}, "at least 2 x pp = 8"),
        ({"forward_s": [1.0, 2.0]}, r"forward_s has shape \(2,\), must be one number or 4"),
        ({"weight_s": -1.0}, "weight_s must be finite and not negative"),
        ({"hop_s": float("nan")}, "hop_s must be finite"),
        ({"hop_s": [0.1] * 4}, "one number or 3"),
        ({"schedule": "gpipe", "micro_batches": 10**7}, "too long to simulate"),
    ],
)
def test_wrong_input_is_refused_in_words(changes, message):
    given = {
        "schedule": "1f1b",
        "pp": 4,
        "micro_batches": 8,
        "forward_s": 1.0,
        "backward_s": 1.0,
        "weight_s": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        simulate(**{**given, **changes})
