"""What a rank of a policy optimization run does: it trains, or it answers prompts.

The first ranks are those of the plan; with `rollout.sync` separate the others answer.
"""

from __future__ import annotations

from dataclasses import replace

from torch._C._distributed_c10d import Store

from workers.posttraining.reinforcement.attempt import PolicyAttempt
from workers.posttraining.reinforcement.separate_rollouts.exchange import join_store
from workers.posttraining.reinforcement.separate_rollouts.rollout_rank import run_rollout_rank
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import Outcome
from workers.training.setup.attempt import finish_attempt
from workers.training.setup.spec_loading import TrainingRun


def run_rank(run: TrainingRun, environment: Environment, store: Store | None = None) -> Outcome:
    """Train or answer, and write `rank-N/exit.json`. Raises only interrupts.

    `store` connects all ranks; without it that of torchrun's rendezvous does.
    """
    options = run.train.policy
    assert options is not None
    if not options.rollout.separate_devices:
        return finish_attempt(PolicyAttempt(run, environment))
    store = store or join_store(environment)
    if environment.rank >= run.plan.world_size:
        return run_rollout_rank(run, environment, store)
    trains = replace(environment, world_size=run.plan.world_size)
    attempt = PolicyAttempt(run, trains, store)
    outcome = finish_attempt(attempt)
    attempt.leave(outcome)
    return outcome
