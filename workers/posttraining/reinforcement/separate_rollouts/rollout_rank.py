"""An attempt of a rollout rank: it receives weights, answers prompts and scores the answers.

Weights that arrive in the middle of an answer are used for its further tokens. Does not depend on
what is learned from the answers.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch._C._distributed_c10d import Store

from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder, RecorderError
from workers.models.weights.parameter_shapes import named_weights
from workers.posttraining.reinforcement.rewards.build import build_rewards
from workers.posttraining.reinforcement.rewards.reward import Reward
from workers.posttraining.reinforcement.rollouts import Rollout
from workers.posttraining.reinforcement.sampling.groups import GroupMaker, sampling_seed
from workers.posttraining.reinforcement.sampling.prompts import Prompts
from workers.posttraining.reinforcement.sampling.run_texts import (
    open_chat,
    read_run_prompts,
    rollout_digest,
    write_assets,
)
from workers.posttraining.reinforcement.sampling.sampler import Answer, AnswerEngine
from workers.posttraining.reinforcement.sampling.weight_copies import empty_decoder
from workers.posttraining.reinforcement.separate_rollouts.exchange import POLL_S, Exchange, State
from workers.posttraining.reinforcement.separate_rollouts.group_files import GroupFiles
from workers.posttraining.reinforcement.separate_rollouts.weight_link import WeightLink
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import Outcome, RunServerLost, classify, write_exit
from workers.training.data.pretrained_tokenizer import copy_tokenizer
from workers.training.numerics.precision import DTYPES
from workers.training.parallel.mesh import pick_device
from workers.training.setup.control import Control
from workers.training.setup.spec_loading import TrainingRun

GROUPS = "groups"  # folder of finished groups, next to the iterations


def run_rollout_rank(run: TrainingRun, environment: Environment, store: Store) -> Outcome:
    """Serve the training ranks until rank 0 leaves; writes `rank-N/exit.json`."""
    exchange = Exchange(store)
    rank = RolloutRank(run, environment, store, exchange)
    try:
        outcome = rank.execute()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        outcome = classify(error, max(0, rank.version))
        print(f"error: rank {environment.rank}, rollouts: {outcome.reason}", file=sys.stderr)
        if outcome.exit_class not in ("user_error", "preempted"):
            traceback.print_exception(error)
        exchange.fail(outcome.reason, exit_class=outcome.exit_class)
    try:
        rank.close()
    except RecorderError as error:
        outcome = Outcome("infrastructure", str(error), outcome.step)
    try:
        write_exit(environment.directory, environment.rank, outcome)
    except OSError as error:
        print(f"error: {environment.directory} cannot be written: {error}", file=sys.stderr)
    if outcome.code in (0, 67):
        exchange.leave(environment.world_size)
    return outcome


@dataclass
class RolloutRank:
    """One attempt's rollouts on this rank; `execute` returns when rank 0 leaves."""

    run: TrainingRun
    environment: Environment
    store: Store
    exchange: Exchange
    rewards: Sequence[Reward] = ()
    engine: AnswerEngine | None = None
    recorder: Recorder | None = None
    beacon: Beacon | None = None
    _ticket: int | None = None
    _positions: dict[int, int] = field(default_factory=dict)  # by number in the engine
    _scoring: list[tuple[int, Future[list[Rollout]]]] = field(default_factory=list)
    _pruned: int = 0
    _lost: bool = False  # a reward's server; rank 0 decides when all leave

    @property
    def version(self) -> int:
        """Of the weights that sample now."""
        return -1 if self.engine is None else self.engine.version

    def execute(self) -> Outcome:
        """Set up, then serve."""
        environment = self.environment
        environment.rank_directory.mkdir(parents=True, exist_ok=True)
        (environment.rank_directory / "exit.json").unlink(missing_ok=True)
        self.beacon = Beacon(environment.rank_directory)
        self.control = Control(environment.directory, reads_file=False)
        self.control.listen(too_late=self._leave_at_once)
        while (attempt := self.exchange.attempt()) is None:
            time.sleep(POLL_S)
        self.recorder = Recorder(
            environment.rank_directory,
            run=environment.run,
            attempt=attempt,
            rank=environment.rank,
        )
        self._open()
        with ThreadPoolExecutor(1, thread_name_prefix="rewards") as self._pool:
            return self._serve()

    def close(self) -> None:
        """Release what the attempt opened. Raises RecorderError."""
        for each in self.rewards:
            each.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.beacon is not None:
            self.control.close()
            self.beacon.close()

    def _open(self) -> None:
        """Prompts, rewards, the engine, and the link to the training ranks."""
        run, environment = self.run, self.environment
        options, checkpoints = run.train.policy, environment.checkpoints
        assert options is not None
        self.options, device = options, pick_device(environment)
        if environment.leads_node:  # of a node without training ranks
            copy_tokenizer(run, checkpoints=checkpoints)
        chat = open_chat(run, checkpoints)
        if environment.leads_node:
            write_assets(run, chat, checkpoints)
        self.prompts: Prompts = read_run_prompts(run, chat, checkpoints)
        self.rewards = build_rewards(
            options,
            device=device,
            dtype=DTYPES[run.plan.precision],
            checkpoints=checkpoints,
            judge_s=environment.timeout_s / 3,
            encode=chat.plain,
        )
        self.maker = GroupMaker(options, chat, self.rewards)
        self.engine = AnswerEngine(
            empty_decoder(run, device),
            options.rollout,
            chat.stops,
            longest=run.train.seq_len,
            node_ranks=environment.local_world_size,
            body=f"train.{run.train.objective}",
        )
        ahead = 1 + options.staleness.max // options.updates_per_step
        ranks = options.rollout.separate_devices
        prompts = -(-ahead * options.prompts_per_step // ranks)
        self.capacity = self.engine.reserve(prompts, options.group_size)
        first = environment.world_size - ranks
        self.link = WeightLink(
            self.store,
            rank=1 + environment.rank - first,
            size=1 + ranks,
            device=device,
            timeout_s=environment.timeout_s,
        )
        self.files = GroupFiles(
            checkpoints / "rollouts" / GROUPS, digest=rollout_digest(run, self.prompts)
        )
        # one rank of each node announces what an earlier attempt left there
        leads = environment.rank == first or environment.leads_node
        earlier = self.files.read_all() if leads else {}
        for position, text in earlier.items():
            self.exchange.finish(position, text, posted=False)
        self.exchange.announce(environment.rank, earlier)
        assert self.recorder is not None
        self.recorder.event(
            "rollout_rank_ready",
            device=str(device),
            sequences=self.capacity * options.group_size,
            earlier_groups=len(earlier),
        )

    def _serve(self) -> Outcome:
        assert self.engine is not None
        self._began, self._tokens = time.perf_counter(), 0
        while True:
            state = self.exchange.state()
            if state.stopping:
                exit_class, reason, step = self.exchange.outcome()
                return Outcome(exit_class, reason, step)
            if state.version > self.engine.version:
                self._receive(state.version)
            if state.oldest > self._pruned and self.environment.local_rank == self._leader:
                self._pruned = state.oldest
                self.files.prune(state.oldest)
            if self._lost:
                self._mark("rewards")
                time.sleep(POLL_S)
                continue
            self._take_prompts(state)
            if self.engine.busy:
                self._mark("generation")
                self._score(self.engine.step())
            else:
                time.sleep(POLL_S)
            try:
                self._post()
            except RunServerLost as error:
                self._lost = True
                self.exchange.fail(str(error), exit_class="preempted")
                for _, waiting in self._scoring:
                    waiting.cancel()

    @property
    def _leader(self) -> int:
        """The local rank that removes files on this node."""
        first = self.environment.world_size - self.options.rollout.separate_devices
        node_first = self.environment.rank - self.environment.local_rank
        return max(0, first - node_first)

    @torch.no_grad()
    def _receive(self, version: int) -> None:
        """Replace the weights; unfinished answers continue with the new ones."""
        assert self.engine is not None and self.recorder is not None
        self._mark("weight_sync")
        began, unfinished = time.perf_counter(), self.engine.unfinished
        self.link.receive(named_weights(self.engine.decoder))
        self.engine.take_weights(version)
        now, tokens = time.perf_counter(), self.engine.output_tokens
        if version > 0:
            values = {
                "inference/tokens_per_s": (tokens - self._tokens) / max(1e-9, now - self._began),
                "inference/running": float(unfinished * self.options.group_size),
                "sync_s": now - began,
            }
            self.recorder.point(step=version, tokens=tokens, values=values)
        self._began, self._tokens = now, tokens
        if self.beacon is not None:
            self.beacon.mark("generation", step=version)

    def _take_prompts(self, state: State) -> None:
        """One prompt or more, as far as the cache and this rank's share of all prompts go."""
        assert self.engine is not None
        if self.engine.version < 0:
            return
        ranks = self.options.rollout.separate_devices
        share = -(-(state.posted - state.finished) // ranks)
        while len(self._positions) < self.capacity:
            if self._ticket is None:
                if len(self._positions) + len(self._scoring) >= share:
                    return
                self._ticket = self.exchange.take_ticket()
            if self._ticket > state.posted:
                return
            position, self._ticket = self.exchange.prompt(self._ticket), None
            prompt = self.prompts.at(position)
            number = self.engine.add(
                prompt.ids,
                sampling_seed(self.run.train.seed, position),
                answers=self.options.group_size,
            )
            self._positions[number] = position

    def _score(self, finished: dict[int, list[Answer]]) -> None:
        """Score groups next to generation: a reward may take seconds."""
        for number, answers in finished.items():
            position = self._positions.pop(number)
            self._scoring.append((position, self._pool.submit(self._rate, position, answers)))

    def _rate(self, position: int, answers: list[Answer]) -> list[Rollout]:
        prompt = self.prompts.at(position)
        group = self.maker.make(prompt, answers, step=0)
        self.maker.rate(group, [prompt.where] * len(group))
        return group

    def _post(self) -> None:
        """Store and post the groups whose rewards are known."""
        while self._scoring and self._scoring[0][1].done():
            position, rated = self._scoring.pop(0)
            self._mark("rewards")
            self.exchange.finish(position, self.files.write(position, rated.result()))

    def _mark(self, phase: str) -> None:
        if self.beacon is not None:
            self.beacon.mark(phase)

    def _leave_at_once(self) -> None:
        """End the process from another thread: rank 0 did not leave in time."""
        outcome = Outcome(
            "preempted",
            "asked to exit, but the training ranks did not leave in time",
            max(0, self.version),
        )
        write_exit(self.environment.directory, self.environment.rank, outcome)
        os._exit(outcome.code)
