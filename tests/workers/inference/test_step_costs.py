"""Fitted step costs, from steps with known times."""

from __future__ import annotations

import random

import pytest

from workers.inference.request import Request
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.step_plan import ScheduledTokens, StepPlan
from workers.inference.step_costs import StepCostFit

TRUE = {"step_s": 4e-3, "prefill_token_s": 2e-4, "decode_s": 1e-3, "decode_context_s": 3e-6}


def recorded(*, noise: float = 0.0, outliers: bool = False, steps: int = 400) -> StepCostFit:
    fit, rng = StepCostFit(), random.Random(1)
    decoder = Request((1,), SamplingParams(max_new_tokens=9))
    prompt = Request((1,), SamplingParams(max_new_tokens=9))
    for step in range(steps):
        count = rng.choice((0, 0, 30, 100))
        parts = [ScheduledTokens(prompt, 0, count, num_logits=1)] if count else []
        contexts = [rng.randrange(20, 800) for _ in range(rng.randrange(1, 9))]
        parts += [ScheduledTokens(decoder, context - 1, 1, num_logits=1) for context in contexts]
        seconds = (
            TRUE["step_s"]
            + TRUE["prefill_token_s"] * count
            + TRUE["decode_s"] * len(contexts)
            + TRUE["decode_context_s"] * sum(contexts)
        )
        seconds *= 1 + noise * rng.uniform(-1, 1)
        if outliers and step > 100 and step % 40 == 0:
            seconds += 5.0
        fit.record(StepPlan(tuple(parts)), {decoder}, seconds)
    return fit


def test_costs_are_recovered() -> None:
    costs = recorded().costs()
    assert costs is not None and costs.steps == 400
    for name, value in TRUE.items():
        assert getattr(costs, name) == pytest.approx(value, rel=0.02), name
    assert costs.prefill_context_s < 1e-7


def test_noise_and_pauses_of_the_process_do_not_spoil_the_fit() -> None:
    costs = recorded(noise=0.2, outliers=True).costs()
    assert costs is not None
    assert costs.decode_s == pytest.approx(TRUE["decode_s"], rel=0.15)
    assert costs.prefill_token_s == pytest.approx(TRUE["prefill_token_s"], rel=0.15)


def test_prompts_after_a_long_time_of_decoding_are_learned() -> None:
    fit = StepCostFit()
    decoder = Request((1,), SamplingParams(max_new_tokens=9))
    prompt = Request((1,), SamplingParams(max_new_tokens=9))
    for step in range(300):
        parts = [ScheduledTokens(decoder, 20 + step, 1, num_logits=1)]
        if step >= 200 and step % 10 == 0:
            parts.append(ScheduledTokens(prompt, 0, 500, num_logits=1))
        fit.record(StepPlan(tuple(parts)), {decoder}, 0.005 + 2e-4 * 500 * (len(parts) - 1))
    costs = fit.costs()
    assert costs is not None
    cost_of_prompt = 500 * costs.prefill_token_s + 500 * 501 / 2 * costs.prefill_context_s
    assert cost_of_prompt == pytest.approx(0.1, rel=0.05)


def test_a_server_that_becomes_slower_is_followed() -> None:
    fit = StepCostFit()
    decoder = Request((1,), SamplingParams(max_new_tokens=9))
    plan = StepPlan((ScheduledTokens(decoder, 20, 1, num_logits=1),))
    for step in range(4000):
        fit.record(plan, {decoder}, 0.005 if step < 200 else 0.05)
    costs = fit.costs()
    assert costs is not None
    assert costs.step_s + costs.decode_s + 21 * costs.decode_context_s == pytest.approx(0.05)


def test_there_are_no_costs_before_enough_steps() -> None:
    assert recorded(steps=52).costs() is None  # the first three are not used
