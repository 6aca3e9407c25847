"""An attempt of a policy optimization run: the training engine's, with sampled rows.

Does not depend on how answers are sampled or scored.
"""

from __future__ import annotations

import contextlib
import traceback

from torch._C._distributed_c10d import PrefixStore, Store

from workers.posttraining.reinforcement.iteration import Iterations
from workers.posttraining.reinforcement.rewards.build import build_rewards
from workers.posttraining.reinforcement.rewards.reward import Reward
from workers.posttraining.reinforcement.rollout_log import RolloutLog
from workers.posttraining.reinforcement.rollouts import RolloutFiles
from workers.posttraining.reinforcement.rows import RolloutRows
from workers.posttraining.reinforcement.sampling.answer_sources import AnswerSource, ColocatedSource
from workers.posttraining.reinforcement.sampling.groups import GroupMaker
from workers.posttraining.reinforcement.sampling.prompts import Prompts
from workers.posttraining.reinforcement.sampling.run_texts import (
    hash_prompts,
    open_chat,
    read_run_prompts,
    rollout_digest,
    write_assets,
)
from workers.posttraining.reinforcement.sampling.sampler import Sampler
from workers.posttraining.reinforcement.separate_rollouts.exchange import Exchange
from workers.posttraining.reinforcement.separate_rollouts.source import SeparateSource
from workers.posttraining.reinforcement.separate_rollouts.weight_link import WeightLink
from workers.posttraining.reinforcement.value.model import ValueModel
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import Outcome, RunServerLost
from workers.training.data.pretrained_tokenizer import check_inherited, copy_tokenizer
from workers.training.data.prompts import Prompts as SamplePrompts
from workers.training.data.rows import RowSource
from workers.training.loop.rank_sync import broadcast_decision, run_on_leaders
from workers.training.loop.step_context import StepContext
from workers.training.numerics.precision import DTYPES
from workers.training.optim import release
from workers.training.parallel.mesh import World, start_world
from workers.training.setup.attempt import Attempt
from workers.training.setup.spec_loading import TrainingRun


class PolicyAttempt(Attempt):
    """Samples, scores and learns by turns."""

    _prompts: Prompts
    _rows: RolloutRows
    _rewards: tuple[Reward, ...] = ()
    _value: ValueModel | None = None

    def __init__(
        self, run: TrainingRun, environment: Environment, store: Store | None = None
    ) -> None:
        """With `store`, through which rollout ranks are reached, `environment` counts the training
        ranks only.
        """
        super().__init__(run, environment)
        self.store = store

    def start_world(self) -> World:
        """Join the process group of the training ranks."""
        if self.store is None:
            return super().start_world()
        store = PrefixStore("training", self.store)
        return start_world(self.environment, self.run.plan, store=store)

    def open_samples(self, world: World) -> tuple[RowSource, RowSource | None]:
        """The rows of rollouts, still without any; reads the prompts and starts the rewards."""
        run, checkpoints = self.run, self.environment.checkpoints
        options = run.train.policy
        assert options is not None
        run_on_leaders(
            world,
            lambda: copy_tokenizer(run, checkpoints=checkpoints),
            leads=self.environment.leads_node,
        )
        check_inherited(run, checkpoints=checkpoints)
        self._chat = open_chat(run, checkpoints)
        run_on_leaders(
            world,
            lambda: write_assets(run, self._chat, checkpoints),
            leads=self.environment.leads_node,
        )

        def prepare() -> None:
            self._prompts = read_run_prompts(run, self._chat, checkpoints)
            if self.store is None:  # else rollout ranks compute them
                self._rewards = tuple(
                    build_rewards(
                        options,
                        device=world.device,
                        dtype=DTYPES[run.plan.precision],
                        checkpoints=checkpoints,
                        judge_s=self.environment.timeout_s / 3,
                        encode=self._chat.plain,
                    )
                )

        run_on_leaders(world, prepare, leads=True)
        self._rows = RolloutRows(options, run.train.seq_len, run.train.seed)
        return self._rows, None

    def data_fingerprint(self, samples: RowSource) -> str:
        """Of the prompts and expected answers: rows exist once their answers are sampled."""
        return hash_prompts(self.run, self._prompts)

    def open_prompts(self) -> SamplePrompts | None:
        """None: rollouts are the run's text samples."""
        return None

    def preparation(self, context: StepContext) -> Iterations:
        """What samples answers before each iteration's first update."""
        leads = context.world.rank == 0
        ppo = self.run.train.ppo
        digest = rollout_digest(self.run, self._prompts)
        if ppo is not None:
            self._value = ValueModel(context, ppo, self.environment)
        files = RolloutFiles(self.environment.checkpoints / "rollouts", digest=digest)
        return Iterations(
            context,
            self._rows,
            self._source(context, files),
            chat=self._chat,
            files=files,
            log=RolloutLog(self.environment.rank_directory) if leads else None,
            value=self._value,
        )

    def _source(self, context: StepContext, files: RolloutFiles) -> AnswerSource:
        options, train = self.run.train.policy, self.run.train
        assert options is not None
        maker = GroupMaker(options, self._chat, self._rewards)
        if self.store is None:
            sampler = Sampler(
                context,
                options.rollout,
                self._chat.stops,
                longest=train.seq_len,
                node_ranks=self.environment.local_world_size,
            )
            return ColocatedSource(context, sampler, self._prompts, maker)
        leads = context.world.rank == 0
        stored = broadcast_decision(context.world, files.stored, leads=leads)
        if not leads:
            return SeparateSource(context, maker, None, None, stored=stored)
        exchange = Exchange(self.store)
        exchange.open(context.recorder.attempt)
        link = WeightLink(
            self.store,
            rank=0,
            size=1 + options.rollout.separate_devices,
            device=context.world.device,
            timeout_s=self.environment.timeout_s,
        )
        return SeparateSource(context, maker, exchange, link, stored=stored)

    def report_failure(self, error: BaseException) -> Outcome:
        """As of every attempt; without a reward's server the finished steps are saved.

        All ranks are here then, before their next step.
        """
        outcome = super().report_failure(error)
        if not isinstance(error, RunServerLost):
            return outcome
        if self.recorder is not None and self.environment.rank == 0:
            self.recorder.event("server_lost", message=str(error))
        if self.loop is not None:
            try:
                self.loop.save_last_step()
            except Exception:  # an earlier checkpoint is used
                traceback.print_exc()
        return outcome

    def leave(self, outcome: Outcome) -> None:
        """Let rollout ranks leave with this rank; torchrun ends all when the first one fails."""
        options = self.run.train.policy
        if self.store is None or options is None:
            return
        exchange = Exchange(self.store)
        if self.environment.rank == 0:
            exchange.stop(outcome.exit_class, outcome.reason, outcome.step)
        if outcome.code in (0, 67):
            exchange.leave(self.environment.world_size + options.rollout.separate_devices)

    def close(self) -> None:
        """End the rewards' processes, then what every attempt opened."""
        for each in self._rewards:
            with contextlib.suppress(Exception):
                each.close()
        if self._value is not None:
            release(self._value.optimizer)
        super().close()
