"""Trials of plans: which plan is tried next, when a trial ends, and what a trial trains."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.contracts.specs.autotune import LEAST_STEPS
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.wire.maintenance.plan_trials import TrialResult, TrialsOrder
from workers.training.setup.spec_loading import accept
from workers.training.trials import policy
from workers.training.trials.policy import Limits, NextTrial, Record
from workers.training.trials.trial import trial_run

MANY = Limits(steps=12, warmup_steps=3, run_steps=1_000_000, share=0.05)


def simulate(
    predicted: list[float], true: list[float], limits: Limits, *, setup_s: float = 1.0
) -> tuple[list[Record], float, list[int]]:
    """Follow the policy with noiseless times; the records, seconds spent, and tried plans."""
    records = [Record(index, time) for index, time in enumerate(predicted)]
    spent, tried = 0.0, []
    while not isinstance(chosen := policy.next_trial(records, limits, spent_s=spent), str):
        index = chosen.index
        tried.append(index)
        assert len(tried) <= policy.MOST_VISITS * len(records), "the trials end"
        others = [each for each in records if each.index != index]
        seconds: list[float] = []
        spent += setup_s + limits.warmup_steps * true[index]
        slower = False
        while len(seconds) < chosen.steps:
            seconds.append(true[index])
            spent += true[index]
            ended = policy.early_end(
                seconds,
                best_s=policy.best_step_s(others),
                spent_s=spent,
                budget_s=policy.budget_s(records, limits),
            )
            if ended is not None:
                slower = ended == "slower"
                break
        records[index] = records[index].visited(seconds, setup_s=setup_s, slower=slower)
    return records, spent, tried


TIMES = st.lists(st.floats(0.1, 2.0), min_size=2, max_size=8).map(sorted)


@settings(max_examples=150, deadline=None)
@given(st.data(), TIMES)
def test_with_enough_budget_the_fastest_plan_is_chosen(data: Any, predicted: list[float]) -> None:
    true = [time * data.draw(st.floats(0.2, 5.0)) for time in predicted]
    records, _, tried = simulate(predicted, true, MANY)
    best = policy.choice(records)
    assert best is not None and true[best.index] == min(true)
    assert set(tried) == set(range(len(predicted))), "every plan was tried"


@settings(max_examples=150, deadline=None)
@given(st.data(), TIMES, st.floats(0.001, 0.5), st.integers(10, 100_000))
def test_trials_stay_within_the_budget(
    data: Any, predicted: list[float], share: float, run_steps: int
) -> None:
    true = [time * data.draw(st.floats(0.5, 2.0)) for time in predicted]
    limits = Limits(steps=12, warmup_steps=3, run_steps=run_steps, share=share)
    records, spent, tried = simulate(predicted, true, limits)
    # of the first plan, which is always measured; a faster plan makes the budget smaller
    budget = limits.budget_s(true[tried[0]])
    first = 1.0 + (3 + 12) * true[tried[0]]
    longest = max(1.0 + (3 + 12) * time for time in true)
    assert spent <= max(budget, first) + longest
    assert policy.choice(records) is not None


@given(TIMES)
def test_a_failed_plan_is_neither_tried_nor_chosen(predicted: list[float]) -> None:
    records = [Record(index, time) for index, time in enumerate(predicted)]
    records[0] = Record(0, predicted[0], seconds=(0.001,), visits=1, failed=True)
    decided = policy.next_trial(records, MANY, spent_s=0.0)
    assert isinstance(decided, NextTrial) and decided.index != 0
    assert policy.choice(records) is None
    failed = [Record(each.index, each.predicted_s, failed=True) for each in records]
    assert policy.next_trial(failed, MANY, spent_s=0.0) == "every plan failed"


def test_without_budget_only_the_first_plan_is_measured() -> None:
    limits = Limits(steps=12, warmup_steps=3, run_steps=10, share=0.01)
    records, _, tried = simulate([1.0, 1.1, 1.2], [1.0, 0.5, 0.6], limits)
    assert tried == [0] and len(records[0].seconds) == LEAST_STEPS
    assert (policy.choice(records) or records[1]).index == 0


def test_a_small_budget_is_divided_among_the_plans() -> None:
    limits = Limits(steps=12, warmup_steps=1, run_steps=1000, share=1.0, max_seconds=40.0)
    records, spent, _ = simulate([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], limits, setup_s=0.0)
    assert all(LEAST_STEPS <= len(each.seconds) <= 13 for each in records) and spent <= 40.0


def test_close_plans_are_tried_again_in_alternating_order() -> None:
    _, _, tried = simulate([1.0, 1.1, 1.2, 9.0], [1.0, 1.01, 1.02, 9.0], MANY)
    assert tried == [0, 1, 2, 3, 2, 1, 0, 0, 1, 2]


def test_a_clearly_slower_plan_ends_early() -> None:
    def ends(*seconds: float) -> str | None:
        return policy.early_end(seconds, best_s=1.0, spent_s=1.0, budget_s=100.0)

    assert ends(1.3, 1.3) is None, "two steps are no evidence"
    assert ends(1.3, 1.4, 1.3) == "slower"
    assert ends(1.3, 1.0, 1.3) is None
    assert ends(1.15, 1.15, 1.15) is None and ends(*[1.15] * 6) == "slower"
    assert policy.early_end([9.0] * 9, best_s=None, spent_s=1.0, budget_s=100.0) is None


def test_a_trial_beyond_the_budget_ends_with_a_median_or_without_one() -> None:
    few, enough = [1.0], [1.0] * LEAST_STEPS
    assert policy.early_end(few, best_s=1.0, spent_s=110, budget_s=100) is None
    assert policy.early_end(enough, best_s=1.0, spent_s=110, budget_s=100) == "budget"
    assert policy.early_end(few, best_s=1.0, spent_s=130, budget_s=100) == "budget"
    assert policy.early_end(few, best_s=None, spent_s=130, budget_s=100) is None


def test_results_of_earlier_attempts_count() -> None:
    plan = ParallelPlan().to_dict()
    order = TrialsOrder.from_dict(
        {
            "candidates": [{"index": i, "plan": plan, "step_time_s": 1.0 + i} for i in range(3)],
            "steps": 4,
            "warmup_steps": 1,
            "run_steps": 100_000,
            "max_share": 0.05,
            "results": [
                {"index": 0, "state": "measured", "step_time_s": 2.0, "steps": 4, "visits": 1},
                {"index": 1, "state": "failed", "exit_class": "out_of_memory"},
            ],
        }
    )
    records = policy.records_of(order)
    assert [each.step_s for each in records] == [2.0, None, None]
    assert policy.next_trial(records, Limits.of(order), spent_s=0.0) == NextTrial(2, 4)


def test_a_trial_trains_the_same_data_without_side_effects() -> None:
    run = accept(
        {
            "kind": "train",
            "model": "llama-tiny",
            "plan": {"dp": 2, "global_batch_size": 4},
            "train": {
                "steps": 500,
                "seq_len": 64,
                "seed": 7,
                "accumulate": 2,
                "lr_schedule": {"name": "cosine", "warmup_steps": 100},
                "eval": {"every_steps": 1},
                "checkpoint": {"every_steps": 1},
            },
        }
    )
    other = ParallelPlan(dp=2, zero=1, global_batch_size=4, micro_batch_size=2)
    tried = trial_run(run, other, steps=15)
    train = tried.train
    assert (train.steps, train.seed, train.seq_len, tried.plan) == (15, 7, 64, other)
    assert train.eval is None and train.checkpoint is None and train.writes is None
    assert tried.spec.plan == other and tried.spec.data == run.spec.data


def test_results_name_their_plan() -> None:
    result = TrialResult(index=1, state="measured", step_time_s=0.5, steps=3, visits=1)
    assert TrialResult.from_dict(result.to_dict()) == result
