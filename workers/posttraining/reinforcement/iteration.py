"""One iteration of policy optimization before its updates: sync weights, sample, score, advantages.

The preparation of a training step. Does not depend on how losses are computed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.contracts.specs.finetuning.reinforcement import GrpoBody, PolicyBody, PpoBody
from workers.contracts.specs.finetuning.reinforcement_checks import policy_field
from workers.contracts.wire.rollouts import ROLLOUTS_SAMPLED
from workers.models.text.chat_format import ChatFormat
from workers.models.weights.manifest import complete_checkpoints
from workers.posttraining.reinforcement.advantages.assign import (
    assign_by_group,
    assign_by_token,
    log_ratios,
)
from workers.posttraining.reinforcement.advantages.group_advantages import adapted_coefficient
from workers.posttraining.reinforcement.iteration_metrics import is_equal, iteration_metrics
from workers.posttraining.reinforcement.rollout_log import RolloutLog
from workers.posttraining.reinforcement.rollouts import Rollout, RolloutFiles
from workers.posttraining.reinforcement.rows import RolloutRows
from workers.posttraining.reinforcement.sampling.answer_sources import AnswerSource
from workers.posttraining.reinforcement.scoring import score_answers
from workers.posttraining.reinforcement.shown_groups import choose_groups, is_shown
from workers.posttraining.reinforcement.value.model import ValueModel
from workers.posttraining.reinforcement.warning_rules import WarningRules
from workers.runtime.exit_codes import UserError
from workers.training.loop.rank_sync import broadcast_decision, run_on_leaders
from workers.training.loop.step_context import StepContext
from workers.training.objectives.policy import Policy

# DAPO replaces groups of equal reward; after this many rounds it trains on what there is
_ROUNDS = 4


class Iterations:
    """A `StepPreparation`: before the first update of an iteration its answers are sampled."""

    def __init__(
        self,
        context: StepContext,
        rows: RolloutRows,
        source: AnswerSource,
        *,
        chat: ChatFormat,
        files: RolloutFiles,
        log: RolloutLog | None = None,
        value: ValueModel | None = None,
    ) -> None:
        """`chat` decodes answers and knows what ends them; `log` is rank 0's file for people;
        `value` is PPO's value model.
        """
        options = context.run.train.policy
        assert options is not None and isinstance(context.objective, Policy)
        self.context, self.rows, self.source = context, rows, source
        self.stops, self.decode = chat.stops, chat.decode
        self.options: PolicyBody = options
        self.objective: Policy = context.objective
        self.files, self.log = files, log
        self.value = value
        self.dapo = isinstance(options, GrpoBody) and options.algorithm == "dapo"
        self.field = f"train.{policy_field(options)}"
        self.world = context.world
        self.next_kl_coef = options.kl.coef
        self.metrics: dict[str, float] = {}
        self.warnings = WarningRules(tuple(f"reward/{name}" for name in options.reward_names))

    def begin(self, checkpoint: Path | None) -> None:
        """See `StepPreparation`."""
        if self.value is not None:
            self.value.load(checkpoint)

    def after_update(self, step: int, first: int, values: Mapping[str, float]) -> dict[str, float]:
        """See `StepPreparation`: the value model's update, and warnings."""
        more = {} if self.value is None else self.value.update(step, first)
        began = time.perf_counter()
        self.source.updated(step)
        more["sync_s"] = values.get("sync_s", 0.0) + time.perf_counter() - began
        if self.world.rank == 0:
            iteration = self.rows.iteration_of(first)
            for each in self.warnings.add(iteration, {**values, **self.metrics}):
                self.context.recorder.event(
                    "learning_warning", step=step, kind=each.kind, **each.values
                )
        return more

    def finish(self, steps: int) -> None:
        """See `StepPreparation`: the value model must have been updated."""
        if self.value is not None:
            self.value.checks.require_update(steps)

    def tensors(self) -> dict[str, Any]:
        """See `StepPreparation`."""
        return {} if self.value is None else self.value.tensors()

    def manifest(self) -> dict[str, Any]:
        """See `StepPreparation`."""
        return {} if self.value is None else self.value.manifest()

    def prepare(self, step: int, first: int) -> dict[str, float]:
        """See `StepPreparation`."""
        iteration = self.rows.iteration_of(first)
        if iteration == self.rows.iteration:
            return self.metrics
        stored, before = broadcast_decision(
            self.world, lambda: self._read(iteration), leads=self.world.rank == 0
        )
        if stored is None:
            if before is not None:
                self.source.restore(before)
                self.next_kl_coef = float(before["next_kl_coef"])
            self.objective.kl_coef = self.next_kl_coef
            values = self._make(iteration, step)
        else:
            rollouts, state = stored
            self.source.restore(state)
            self.next_kl_coef = float(state["next_kl_coef"])
            self.objective.kl_coef = float(state["kl_coef"])
            self.rows.fill(iteration, rollouts)
            values = {}
            if self.world.rank == 0:
                self.context.recorder.event(
                    "rollouts_restored", step=step, iteration=iteration, answers=len(rollouts)
                )
            if self.log is not None and self.log.last_step < rollouts[0].step:
                self._report(iteration, rollouts)
        # every update of the iteration repeats them: not every step is logged
        self.metrics = iteration_metrics(self.rows.rollouts, self.options, self.stops)
        if self.options.needs_reference:
            self.metrics["kl_coef"] = self.objective.kl_coef
        return values | self.metrics

    def _read(
        self, iteration: int
    ) -> tuple[tuple[list[Rollout], dict[str, Any]] | None, dict[str, Any] | None]:
        """A stored iteration; for the first one of a resumed run the state of the one before."""
        stored = self.files.read(iteration)
        if stored is not None or self.rows.iteration >= 0 or iteration == 0:
            return stored, None
        before = self.files.read(iteration - 1)
        if before is not None:
            return None, before[1]
        # a fork, or another folder: exact without replaced groups and an adapted coefficient
        position = iteration * self.options.prompts_per_step
        self.context.recorder.event("rollouts_missing", iteration=iteration, position=position)
        return None, {"next_position": position, "next_kl_coef": self.options.kl.coef}

    def _make(self, iteration: int, step: int) -> dict[str, float]:
        """Sync, sample, score and store an iteration; its seconds by phase."""
        marks = [time.perf_counter()]
        self.context.progress.enter("weight_sync")
        self.source.begin(iteration, step)
        marks.append(time.perf_counter())
        rollouts = self._sample(iteration, step)
        marks.append(time.perf_counter())
        self.rows.fill(iteration, rollouts)
        self._score(rollouts)
        state = {
            "kl_coef": self.objective.kl_coef,
            "next_kl_coef": self.next_kl_coef,
            **self.source.state(),
        }
        self._store(iteration, step, rollouts, state)
        marks.append(time.perf_counter())
        names = ("sync_s", "generation_s", "scoring_s")
        seconds = {name: marks[i + 1] - marks[i] for i, name in enumerate(names)}
        if ranks := self.options.rollout.separate_devices:
            # rollout ranks sample during updates, too: training only waits for the rest
            seconds["generation_wait_s"] = seconds["generation_s"]
            seconds["generation_s"] = sum(each.generation_s for each in rollouts) / ranks
        return seconds

    def _sample(self, iteration: int, step: int) -> list[Rollout]:
        """Answers to the iteration's prompts, with rewards; equal on all ranks."""
        wanted, refills, source = self.options.prompts_per_step, self.dapo, self.source
        groups: list[list[Rollout]] = []
        equal: list[list[Rollout]] = []
        for each in range(_ROUNDS if refills else 1):
            places = source.more(wanted - len(groups)) if each else source.positions(iteration)
            for group in source.answer(places, step):
                useless = refills and is_equal(group)
                (equal if useless else groups).append(group)
            if len(groups) == wanted:
                break
        source.end(iteration)
        groups += equal[: wanted - len(groups)]
        rollouts = [each for group in groups for each in group]
        if all(each.failure for each in rollouts):
            raise UserError(
                f"{self.field}.rewards: no answer of an iteration has a reward; the first: "
                f"{rollouts[0].failure}. Fix the reward."
            )
        return rollouts

    def _score(self, rollouts: Sequence[Rollout]) -> None:
        """Log-probabilities and values that the updates need, then advantages."""
        options, reference = self.options, self.options.needs_reference
        policy = (
            options.updates_per_step > 1
            or options.staleness.correction == "decoupled"
            or (reference and self.value is not None)
        )
        if policy or reference:
            score_answers(self.context, self.rows, policy=policy, reference=reference)
        kl_coef = self.objective.kl_coef
        if isinstance(options, PpoBody):
            assert self.value is not None
            self.value.score(self.rows)
            assign_by_token(rollouts, options, kl_coef=kl_coef)
        else:
            assign_by_group(rollouts, options, kl_coef=kl_coef)
        if reference and options.kl.target is not None:
            tokens = sum(len(each.token_ids) for each in rollouts)
            divergence = sum(sum(log_ratios(each)) for each in rollouts) / max(1, tokens)
            self.next_kl_coef = adapted_coefficient(
                self.next_kl_coef, divergence, options.kl.target, answers=len(rollouts)
            )

    def _store(
        self, iteration: int, step: int, rollouts: list[Rollout], state: dict[str, Any]
    ) -> None:
        """Rank 0 writes the iteration next to the checkpoints, and removes those not needed."""

        def write() -> None:
            self.files.write(iteration, rollouts, state)
            folders = complete_checkpoints(self.files.folder.parent)
            steps = [int(each.name.removeprefix("step-")) for each in folders]
            oldest = min(steps, default=step - 1)
            # the iteration before holds where the next one begins
            first = min(oldest, step - 1) // self.options.updates_per_step - 1
            self.files.prune(first, iteration)
            self.source.saved()
            if self.log is not None:
                self._report(iteration, rollouts)

        run_on_leaders(self.world, write, leads=self.world.rank == 0)

    def _report(self, iteration: int, rollouts: list[Rollout]) -> None:
        """Write the answers for people, and send some of them to the run's page."""
        assert self.log is not None
        self.log.append(rollouts)
        iterations = -(-self.context.run.train.steps // self.options.updates_per_step)
        if is_shown(iteration, iterations):
            shown = choose_groups(rollouts, self.options.group_size, self.decode)
            self.context.recorder.event(ROLLOUTS_SAMPLED, **shown.to_dict())
