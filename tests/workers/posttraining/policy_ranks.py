"""Runs of policy optimization in this process, or in a pool of ranks."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from tests.workers.training.pool import Result, ended_process_group
from workers.models.decoder import Decoder
from workers.models.weights.reader import Weights, fill_model
from workers.posttraining.reinforcement.attempt import PolicyAttempt
from workers.runtime.environment import read_environment
from workers.training.setup.attempt import Attempt, finish_attempt
from workers.training.setup.spec_loading import accept


def train_policy(spec: dict[str, Any], directory: str) -> dict[str, Any]:
    """The outcome of `spec` on this rank."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    env = {name: os.environ[name] for name in names if name in os.environ}
    attempt = PolicyAttempt(accept(spec), read_environment(Path(directory), env=env))
    outcome = finish_attempt(attempt)
    return {"class": outcome.exit_class, "reason": outcome.reason, "step": outcome.step}


def run_policy(pools: Any, spec: dict[str, Any], directory: Path) -> Result:
    """`train_policy` on as many ranks as the plan has."""
    spec = json.loads(json.dumps(spec))
    ranks = math.prod(spec["plan"].get(axis, 1) for axis in ("dp", "tp", "pp", "cp"))
    given = {"spec": spec, "directory": str(directory)}
    if ranks > 1:
        call = "tests.workers.posttraining.policy_ranks:train_policy"
        return Result(pools(ranks).call(call, **given), directory)
    with ended_process_group():
        return Result([train_policy(**given)], directory)


def run_training(spec: dict[str, Any], directory: Path) -> None:
    """Train `spec` by another objective in this process."""
    attempt = Attempt(accept(spec), read_environment(directory, env={}))
    with ended_process_group():
        outcome = finish_attempt(attempt)
    assert outcome.exit_class == "ok", outcome.reason


@torch.no_grad()
def scores_of(weights: Weights, ids: list[int]) -> list[float]:
    """The scalar head's output at each of the ids."""
    model = Decoder(weights.spec)
    fill_model(model, weights)
    return model.eval()(torch.tensor([ids])).flatten().tolist()
