"""Rewards by a serve run on two training ranks: as on one; a lost server ends a step on both."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.workers.posttraining.policy_ranks import run_policy, train_policy
from tests.workers.posttraining.test_rewards import policy_spec
from tests.workers.posttraining.test_served_reward_model import SPEC, Server, server
from tests.workers.training.pool import Result
from workers.contracts.specs.finetuning.chat_servers import SERVERS_VARIABLE
from workers.models.weights.manifest import complete_checkpoints
from workers.posttraining.produce import client

__all__ = ["server"]
pytestmark = pytest.mark.ranks
LINES = [{"prompt": prompt} for prompt in ("ab", "de", "gh")]


def train_with_servers(spec: dict[str, Any], directory: str, servers: str) -> dict[str, Any]:
    """On a rank of a pool, which has an environment of its own."""
    with patch.dict(os.environ, {SERVERS_VARIABLE: servers}), patch.object(client, "TRIES", 2):
        return train_policy(spec, directory)


def run_on_two(pools: Any, spec: dict[str, Any], directory: Path) -> Result:
    call = f"{__name__}:train_with_servers"
    given = {"spec": spec, "directory": str(directory), "servers": os.environ[SERVERS_VARIABLE]}
    return Result(pools(2).call(call, **given), directory)


def rewards_of(result: Result) -> dict[tuple[int, int, int], tuple[list[int], float]]:
    lines = (result.directory / "rank-0" / "rollouts.jsonl").read_text().splitlines()
    return {
        (each["step"], each["prompt_id"], each["sample"]): (each["token_ids"], each["reward"])
        for each in map(json.loads, lines)
    }


def made(tmp_path: Path, plan: dict[str, Any]) -> dict[str, Any]:
    spec = policy_spec(tmp_path, LINES, rewards=[SPEC])
    spec["plan"] |= plan
    spec["train"]["steps"] = 4
    return spec


@pytest.mark.parametrize("plan", [{"dp": 2, "zero": 3}, {"tp": 2}])
def test_each_rank_scores_its_own_answers_by_the_server(
    pools: Any, server: Server, tmp_path: Path, plan: dict[str, Any]
) -> None:
    alone = run_policy(None, made(tmp_path, {}), tmp_path / "alone")
    scored = [body["input"] for _, _, body in server.requests if isinstance(body["input"], list)]
    server.requests.clear()
    both = run_on_two(pools, made(tmp_path, plan), tmp_path / "both")
    assert {each["class"] for each in both.outcomes} == {"ok"}, both.outcomes
    assert rewards_of(both) == rewards_of(alone)
    for name in ("reward/mean", "loss", "grad_norm"):
        assert both.values(name) == pytest.approx(alone.values(name), rel=1e-5, abs=1e-6), name
    # each answer is scored once; each rank checks the tokenizer
    again = [body["input"] for _, _, body in server.requests if isinstance(body["input"], list)]
    answers = 4 * 4
    assert (len(scored), len(again)) == (answers + 1, answers + 2)
    assert {str(each) for each in again} == {str(each) for each in scored}


def test_two_ranks_without_their_server_save_and_continue(
    pools: Any, server: Server, tmp_path: Path
) -> None:
    """The server goes away between the answers of the ranks: one may have all its scores."""
    whole = run_policy(None, made(tmp_path, {}), tmp_path / "whole")
    server.requests.clear()
    server.left = 2 * 2 + 2 * 4 + 3  # both ranks' checks, two steps, and three answers
    plan = {"dp": 2, "zero": 2}
    first = run_on_two(pools, made(tmp_path, plan), tmp_path / "run")
    assert {(each["class"], each["step"]) for each in first.outcomes} == {("preempted", 2)}
    assert all("run 12" in each["reason"] for each in first.outcomes)
    folder = tmp_path / "run" / "checkpoints"
    assert [each.name for each in complete_checkpoints(folder)] == ["step-00000002"]
    server.down, server.left = False, None
    second = run_on_two(pools, made(tmp_path, plan), tmp_path / "run")
    assert {(each["class"], each["step"]) for each in second.outcomes} == {("ok", 4)}
    assert rewards_of(second) == rewards_of(whole)
    assert second.values("loss") == pytest.approx(whole.values("loss"), rel=1e-5, abs=1e-6)
