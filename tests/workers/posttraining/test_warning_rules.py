"""Warnings about policy optimization: each rule at its limit, and once while it holds."""

from __future__ import annotations

import pytest

from webui.presentation.event_messages import describe, get_kind
from workers.posttraining.reinforcement.warning_rules import WarningRules, warnings_of

FIRST = {
    "entropy": 2.0,
    "response_tokens": 20.0,
    "groups/equal": 0.2,
    "mismatch/kl": 1e-6,
    "mismatch/outside": 0.0,
    "reward/mean": 0.2,
    "reward/std": 0.3,
    "reward/exact": 0.5,
    "kl": 0.01,
    "value/explained_variance": -0.2,
}
HEALTHY = {**FIRST, "reward/mean": 0.9, "entropy": 0.3, "value/explained_variance": 0.8}


def kinds(last, components=("reward/exact",)):
    return [each.kind for each in warnings_of(FIRST, {**HEALTHY, **last}, components)]


@pytest.mark.parametrize(
    ("kind", "below", "above"),
    [
        ("entropy_collapse", {"entropy": 0.21}, {"entropy": 0.19}),
        ("length_growth", {"response_tokens": 39.0}, {"response_tokens": 40.0}),
        ("equal_groups", {"groups/equal": 0.89}, {"groups/equal": 0.9}),
        ("mismatch_drift", {"mismatch/kl": 0.009}, {"mismatch/kl": 0.011}),
        ("mismatch_drift", {"mismatch/outside": 0.04}, {"mismatch/outside": 0.06}),
        (
            "value_unexplained",
            {"value/explained_variance": 0.0},
            {"value/explained_variance": -0.1},
        ),
        ("reward_hacking", {"kl": 0.9}, {"kl": 1.1}),
        ("reward_hacking", {"reward/exact": 0.41}, {"reward/exact": 0.39}),
        ("reward_hacking", {"kl": 9.0, "reward/mean": 0.49}, {"kl": 9.0, "reward/mean": 0.51}),
    ],
)
def test_each_rule_at_its_limit(kind, below, above):
    assert kinds(below) == []
    assert kinds(above) == [kind]


def test_a_warning_comes_once_while_its_rule_holds():
    rules, begun = WarningRules(("reward/exact",)), []
    for iteration in range(60):
        values = FIRST if iteration < 20 else {**FIRST, "value/explained_variance": 0.5}
        if 25 <= iteration < 40:
            values = {**values, "groups/equal": 1.0}
        for _update in range(2):
            begun += [(iteration, each.kind) for each in rules.add(iteration, values)]
    # nine of the last ten iterations have them by the end of iteration 33
    assert [each for each in begun if each[1] == "equal_groups"] == [(34, "equal_groups")]
    assert [each for each in begun if each[1] == "value_unexplained"] == []


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        ({"entropy": 0.1}, "its entropy is 0.1 nats per token, below a tenth of the 2 at"),
        ({"response_tokens": 50.0}, "50 tokens on average, at least twice the 20 at the start"),
        ({"groups/equal": 0.95}, "in 95% of the groups"),
        ({"mismatch/kl": 0.05}, "a divergence of 0.05 nats per token (limit 0.01)"),
        ({"value/explained_variance": -0.5}, "it explains -0.5 of their variance"),
        ({"kl": 3.0}, "while the divergence is 3 nats per token (above 1)"),
        ({"reward/exact": 0.1}, "while exact fell from 0.5 to 0.1"),
    ],
)
def test_the_run_page_states_the_rule(last, sentence):
    [each] = warnings_of(FIRST, {**HEALTHY, **last}, ("reward/exact",))
    data = {"kind": each.kind, "step": 40, **each.values}
    assert sentence in describe("learning_warning", data, 0)
    assert get_kind("learning_warning", data) == "event"
