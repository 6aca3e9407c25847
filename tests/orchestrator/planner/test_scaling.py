"""Scaling laws and textbook examples against the papers' numbers."""

from __future__ import annotations

import pytest

from orchestrator.planner.scaling import scaling
from orchestrator.planner.textbook_examples import EXAMPLES, zero_state_bytes


def test_days_of_narayanans_equation_4() -> None:
    """175 B on 300 B tokens, 1,024 A100 at 140 TFLOP/s: 34 days; 1 T on 450 B, 3,072 at 163: 84
    days (section 5.1).
    """
    first = scaling(
        parameters=175e9, tokens=300e9, devices=1024, flops_per_device=140e12, recompute=True
    )
    second = scaling(
        parameters=1e12, tokens=450e9, devices=3072, flops_per_device=163e12, recompute=True
    )
    assert first["days"] == pytest.approx(33.9, abs=0.05) and second["days"] == pytest.approx(
        83.2, abs=0.05
    )


def test_budget_and_cost_agree() -> None:
    back = scaling(devices=64, flops_per_device=400e12, budget_days=30)
    forth = scaling(parameters=back["budget_parameters"], devices=64, flops_per_device=400e12)
    assert forth["days"] == pytest.approx(30) and forth["optimal_tokens"] == pytest.approx(
        back["budget_tokens"]
    )
    twice = scaling(devices=64, flops_per_device=400e12, budget_days=30, tokens_per_parameter=40)
    assert twice["budget_parameters"] < back["budget_parameters"]


def test_costs_and_trees() -> None:
    output = scaling(
        parameters=1e9, devices=8, flops_per_device=1e14, usd_per_hour=2.0, power_w=500
    )
    assert output["usd"] == pytest.approx(output["device_hours"] * 2)
    assert output["energy_kwh"] == pytest.approx(output["device_hours"] / 2)
    tree = scaling(parameters=1e9, flops_per_device=1e14, explained=True)["days"]
    assert tree["inputs"][0]["name"] == "total_flops" and "Kaplan" in tree["inputs"][0]["source"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"parameters": -1.0},
        {"parameters": 1e9, "devices": 0},
        {"parameters": float("nan")},
        {"budget_days": 0.0},
        {},
    ],
)
def test_bad_numbers_are_refused(wrong: dict[str, float]) -> None:
    output = scaling(**{"flops_per_device": 1e14, **wrong})
    assert output["ok"] is False and output["problems"][0]["message"]


@pytest.mark.parametrize(
    ("devices", "stage", "paper_gb"),
    [
        (1, 1, 120),
        (4, 1, 52.5),
        (64, 1, 31.4),
        (64, 2, 16.6),
        (64, 3, 1.88),
        (1024, 2, 15.1),
        (1024, 3, 0.12),
    ],
)
def test_zero_states_match_the_paper(devices: int, stage: int, paper_gb: float) -> None:
    """arXiv 1910.02054, table 1, 7.5 B parameters."""
    assert zero_state_bytes(7.5e9, devices, stage) / 1e9 == pytest.approx(paper_gb, rel=0.03)


def test_every_example_has_a_table() -> None:
    results = {example.id: example.compute() for example in EXAMPLES}
    for result in results.values():
        assert result.message and result.limits and result.source
        assert all(len(row) == len(result.columns) for row in result.rows) and result.rows
    assert [row[2] for row in results["zero-stages"].rows] == [120.0, 31.4, 16.6, 1.9]
    assert any("13.4 days" in result.message for result in results.values())
