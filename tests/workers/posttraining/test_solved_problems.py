"""The walk and the bandit: exact answers, and what the product's formulas learn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.contracts.catalog import solved_problems as problems
from workers.posttraining.solved_problems.main import main


def test_exact_answers():
    assert list(problems.walk_values().values()) == pytest.approx([k / 6 for k in range(1, 6)])
    assert problems.walk_advantages(0.95) == pytest.approx([0.475417, 0.325, 0.166667], abs=1e-6)
    assert problems.walk_advantages(1.0) == pytest.approx([0.5, 1 / 3, 1 / 6])
    optimum = [0.1784, 0.1996, 0.1819, 0.3296, 0.1105]
    assert problems.bandit_optimum() == pytest.approx(optimum, abs=1e-4)
    reached = [problems.best_objective(name) for name in problems.KL_ESTIMATORS]
    assert reached == pytest.approx([0.403650] * 3 + [0.384197], abs=1e-6)
    means = [problems.gradient_moments(name)[0] for name in problems.GRADIENTS]
    assert means[:3] == pytest.approx([means[0]] * 3)  # without bias
    policy = problems.bandit_optimum()
    for name in ("k1", "k3"):
        assert problems.divergence_moments(name)[0] == pytest.approx(problems.divergence(policy))


def test_the_run_approaches_the_exact_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ORRERY_RUN_DIR", str(tmp_path))
    assert main(["--steps", "100", "--seconds", "0"]) == 0
    lines = (tmp_path / "rank-0" / "points.jsonl").read_text().splitlines()
    points = [json.loads(line) for line in lines]
    assert [point["step"] for point in points] == list(range(1, 101))
    first, last = points[0]["values"], points[-1]["values"]
    for state, exact in problems.walk_values().items():
        assert last[f"walk/value/{state}"] == pytest.approx(exact, abs=0.02)
    for state, exact in zip(problems.PATH, problems.walk_advantages(0.95), strict=True):
        assert last[f"walk/advantage/{state}"] == pytest.approx(exact, abs=0.02)
    for lam in problems.LAMBDAS:
        assert last[f"walk/error/{lam:g}"] < first[f"walk/error/{lam:g}"] / 2
    # the value model follows the exact value of the policy, which approaches the best one
    assert last["walk/policy/bellman"] == pytest.approx(problems.best_walk_value(), abs=0.02)
    assert last["walk/policy/value"] == pytest.approx(last["walk/policy/bellman"], abs=0.02)
    for name in problems.KL_ESTIMATORS:
        assert last[f"bandit/objective/{name}"] == pytest.approx(
            problems.best_objective(name), abs=2e-3
        )
    best = problems.best_objective("k1_reward")
    for name in problems.SAMPLED_GRADIENTS:
        assert last[f"bandit/sampled/{name}"] == pytest.approx(best, abs=0.01)
    for what, names, moments in (
        ("gradient", problems.GRADIENTS, problems.gradient_moments),
        ("divergence", problems.DIVERGENCES, problems.divergence_moments),
    ):
        for name in names:
            mean, std = moments(name)
            # 409,600 samples: six standard errors
            assert last[f"bandit/{what}/{name}"] == pytest.approx(mean, abs=std * 6 / 640)
            assert last[f"bandit/{what}_std/{name}"] == pytest.approx(std, rel=0.05)


def test_bad_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    assert main(["--dir", str(tmp_path), "--steps", "0"]) == 64
    assert "--steps: 0" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--dir", str(tmp_path)]) == 64
    assert "Use devices 1." in capsys.readouterr().err
