"""One attempt of a run on this rank, from process group to exit file: setup, training, outcome.

Joins the process group, restores weights and writes the exit file; `loop_builder` builds the loop.
Does not depend on how a step is computed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from workers.contracts.catalog.adapter_shapes import trained_parameter_count
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.specs.model import ModelSource
from workers.contracts.specs.weight_rounding import group_for, linear_widths
from workers.contracts.wire.samples import TRAINING_ROWS
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder, RecorderError, last_attempt
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import Outcome, RunServerLost, UserError, classify, write_exit
from workers.training.adapter_files import base_of
from workers.training.checkpoint import load_training
from workers.training.data.examples.run_examples import open_run_chat_format
from workers.training.data.examples.samples import ExampleSamples
from workers.training.data.examples.training_rows import describe_rows
from workers.training.data.pretrained_tokenizer import check_teacher_tokenizer, describe_tokenizer
from workers.training.data.prompts import Prompts, open_prompts
from workers.training.data.rows import RowSource
from workers.training.data.run_samples import open_samples
from workers.training.loop.memory_metrics import describe_memory
from workers.training.loop.rank_sync import broadcast_decision, run_on_leaders
from workers.training.loop.step_context import StepContext
from workers.training.loop.train import Loop, StepPreparation
from workers.training.objectives.frozen_module import FrozenModule
from workers.training.optim import release
from workers.training.parallel.mesh import World, start_world
from workers.training.setup.control import Control
from workers.training.setup.data_fingerprint import fingerprint_rows
from workers.training.setup.initial_weights import fill_from, open_initial
from workers.training.setup.loop_builder import LoopBuilder
from workers.training.setup.resume import Start, check_same_base, check_same_data, choose_start
from workers.training.setup.spec_loading import TrainingRun, mesh_axes
from workers.training.trace.step_trace import Trace


def run_attempt(run: TrainingRun, environment: Environment) -> Outcome:
    """Train and write `rank-N/exit.json`. Raises only interrupts."""
    return finish_attempt(Attempt(run, environment))


def finish_attempt(attempt: Attempt) -> Outcome:
    """Execute an attempt and write its exit file. Raises only interrupts."""
    environment = attempt.environment
    try:
        outcome = attempt.execute()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is not an Exception
        outcome = attempt.report_failure(error)
    try:
        attempt.close()
    except RecorderError as error:
        outcome = Outcome("infrastructure", str(error), outcome.step)
    try:
        write_exit(environment.directory, environment.rank, outcome)
    except OSError as error:
        print(f"error: {environment.directory} cannot be written: {error}", file=sys.stderr)
    if outcome.code in (0, 67) and environment.world_size > 1:
        # leave together: torchrun ends the other ranks when the first one exits
        # a peer that failed while closing has reported it itself
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    attempt.control.close()
    if attempt.beacon is not None:
        attempt.beacon.close()
    return outcome


class Attempt:
    """The parts of an attempt on this rank; `execute` builds them and trains."""

    def __init__(self, run: TrainingRun, environment: Environment) -> None:
        self.run, self.environment = run, environment
        self.control = Control(environment.directory, reads_file=environment.leads_node)
        self.recorder: Recorder | None = None
        self.beacon: Beacon | None = None
        self.loop: Loop | None = None
        self.trace: Trace | None = None
        self.peak: dict[str, Any] = {}
        self.began = time.perf_counter()

    def execute(self) -> Outcome:
        """Set up, restore and train."""
        run, environment = self.run, self.environment
        environment.rank_directory.mkdir(parents=True, exist_ok=True)
        (environment.rank_directory / "exit.json").unlink(missing_ok=True)
        self.beacon = Beacon(environment.rank_directory, stages=run.plan.pp)
        world = self.start_world()
        # until here a signal may end the process at once
        self.control.listen(too_late=self._leave_at_once)
        number, start = broadcast_decision(world, self._decide_start, leads=world.rank == 0)
        self.recorder = Recorder(
            environment.rank_directory, run=environment.run, attempt=number, rank=world.rank
        )
        train, held_out = self.open_samples(world)
        fingerprint = self.data_fingerprint(train)
        self._check_data(world, start, fingerprint)
        self.loop = loop = self.build_loop(
            world, train, held_out, number, self.open_prompts(), data_fingerprint=fingerprint
        )
        self._record_plan(world)
        if world.rank == 0 and isinstance(train, ExampleSamples):
            self._record_data(train)
        for message in start.rejected if world.rank == 0 else ():
            self.recorder.event("checkpoint_rejected", message=message)
        # checkpoints of an adapter do not hold its base, nor do others the reference
        frozen, adapts = loop.context.frozen, run.train.adapter is not None
        if run.train.init_from is not None and (
            start.folder is None or frozen is not None or adapts
        ):
            self._load_initial(world, loop, run.train.init_from)
        if frozen is not None:
            self._load_frozen(world, loop, frozen)
        if start.folder is not None:
            self._restore(world, loop, start)
        if loop.preparation is not None:
            loop.preparation.begin(start.folder)
        return loop.run_steps(start)

    def start_world(self) -> World:
        """Join the process group of the training ranks."""
        return start_world(self.environment, self.run.plan)

    def report_failure(self, error: BaseException) -> Outcome:
        """Report the error as an event, on stderr and in torch elastic's error file."""
        step = self.loop.step if self.loop else 0
        outcome = classify(error, step)
        phase = self.loop.progress.phase if self.loop else "starting"
        memory: dict[str, float] = {}
        if outcome.exit_class == "out_of_memory" and self.loop is not None:
            with contextlib.suppress(MemoryError, OSError):
                memory = self.loop.memory.values()
        if memory:
            usage = f"in {phase} of step {step + 1}; {describe_memory(memory)}"
            outcome = replace(outcome, reason=f"{outcome.reason.rstrip('. ')} ({usage})")
        print(
            f"error: rank {self.environment.rank}, {phase}, after step {step}: {outcome.reason}",
            file=sys.stderr,
        )
        if outcome.exit_class not in ("user_error", "numerics", "preempted") or not isinstance(
            error, (UserError, ArithmeticError, RunServerLost)
        ):
            traceback.print_exception(error)
        if outcome.exit_class == "numerics" and self.loop is not None:
            # all ranks are here: a save in progress can still complete
            with contextlib.suppress(Exception):
                self.loop.checkpointer.finish()
        try:
            if outcome.exit_class == "out_of_memory" and self.recorder is not None:
                self.recorder.event(
                    "out_of_memory", step=step, phase=phase, message=outcome.reason, **memory
                )
        except OSError as write_error:
            print(f"error: {write_error}", file=sys.stderr)
        _record_for_elastic(error)
        return outcome

    def close(self) -> None:
        """Release what the attempt opened. Raises RecorderError."""
        if self.trace is not None:
            self.trace.close()
        if self.loop is not None:
            release(self.loop.optimizer)
        if self.recorder is not None:
            self.recorder.close()

    def _leave_at_once(self) -> None:
        """End the process from another thread while the main thread hangs in a collective."""
        step = self.loop.step if self.loop else 0
        outcome = Outcome(
            "preempted", "asked to exit, but no step boundary was reached in time to save", step
        )
        write_exit(self.environment.directory, self.environment.rank, outcome)
        os._exit(outcome.code)

    def _decide_start(self) -> tuple[int, Start]:
        """Rank 0 decides the attempt's number and the checkpoint to continue from."""
        environment = self.environment
        number = environment.attempt or 1 + last_attempt(
            environment.rank_directory / "points.jsonl"
        )
        return number, choose_start(
            self.run, checkpoints=environment.checkpoints, resume=environment.resume
        )

    def open_samples(self, world: World) -> tuple[RowSource, RowSource | None]:
        """Training and held-out samples; one rank per node tokenizes, once."""
        environment = self.environment

        def open_both() -> tuple[RowSource, RowSource | None]:
            return open_samples(
                self.run, cache=environment.cache, checkpoints=environment.checkpoints
            )

        run_on_leaders(world, open_both, leads=environment.leads_node)
        return open_both()

    def data_fingerprint(self, samples: RowSource) -> str:
        """What checkpoints store to recognize the run's data."""
        return fingerprint_rows(samples)

    def _check_data(self, world: World, start: Start, fingerprint: str) -> None:
        """Refuse other data than those of the checkpoint, or report an allowed change."""
        assert self.recorder is not None
        allowed = self.run.train.allow_data_change
        same = check_same_data(start, fingerprint, allow_change=allowed)
        if world.rank == 0 and not same:
            self.recorder.event(
                "data_changed",
                step=start.step,
                message=f"step {start.step} of {start.folder} was trained on other data; "
                "train.allow_data_change continues on these",
            )

    def open_prompts(self) -> Prompts | None:
        """The prompts of text samples; every rank reads them from the tokenized data."""
        spec, environment = self.run.train.writes, self.environment
        if spec is None:
            return None
        return open_prompts(
            self.run, spec, cache=environment.cache, checkpoints=environment.checkpoints
        )

    def build_loop(
        self,
        world: World,
        samples: RowSource,
        held_out: RowSource | None,
        number: int,
        prompts: Prompts | None = None,
        data_fingerprint: str | None = None,
    ) -> Loop:
        """The loop with its collaborators (`loop_builder`)."""
        assert self.recorder is not None and self.beacon is not None
        builder = LoopBuilder(
            self.run, self.environment, world, self.recorder, self.beacon, self.control
        )
        built = builder.build(
            samples,
            held_out,
            number=number,
            prompts=prompts,
            prepare=self.preparation,
            data_fingerprint=data_fingerprint,
        )
        self.trace, self.peak = built.trace, built.peak
        return built.loop

    # makes what acts before each step, from the step's context
    preparation: Callable[[StepContext], StepPreparation] | None = None

    def _record_plan(self, world: World) -> None:
        assert self.recorder is not None
        if world.rank == 0:
            self.recorder.event(
                "plan_resolved",
                plan=self.run.plan.to_dict(),
                mesh=mesh_axes(self.run.plan),
                accumulation=self.run.plan.accumulation,
                parameters=parameter_count(self.run.model).total,
                trained_parameters=trained_parameter_count(self.run.model, self.run.train),
                **self._rounding(),
                peak=self.peak,
                device=str(world.device),
                torch=torch.__version__,
                setup_s=round(time.perf_counter() - self.began, 3),
            )

    def _record_data(self, samples: ExampleSamples) -> None:
        """What the rows of an epoch hold, and the first ones as text."""
        assert self.recorder is not None
        self.recorder.event("data_statistics", **samples.describe())
        chat = open_run_chat_format(self.run, checkpoints=self.environment.checkpoints)
        self.recorder.event(TRAINING_ROWS, **describe_rows(samples, chat).to_dict())

    def _rounding(self) -> dict[str, Any]:
        """The rounding of weights in quantization-aware training, if any."""
        kind = self.run.train.quantize_aware
        if kind is None:
            return {}
        group = {} if kind == "int8" else {"group": group_for(linear_widths(self.run.model))}
        return {"quantize_aware": kind, **group}

    def _restore(self, world: World, loop: Loop, start: Start) -> None:
        assert self.recorder is not None and start.folder is not None
        began = time.perf_counter()
        if loop.base is not None:
            check_same_base(start.folder, loop.base)
        load_training(start.folder, loop.saved_weights(), loop.optimizer)
        loop.parallel.finish_update()
        if world.rank == 0:
            seconds = time.perf_counter() - began
            self.recorder.event(
                "checkpoint_restored", step=start.step, path=str(start.folder), seconds=seconds
            )

    def _load_frozen(self, world: World, loop: Loop, frozen: FrozenModule) -> None:
        """Fill the reference or teacher, before a checkpoint replaces the initial weights."""
        assert self.recorder is not None
        began = time.perf_counter()
        if frozen.use == "teacher" and frozen.source is not None:
            check_teacher_tokenizer(frozen.source, checkpoints=self.environment.checkpoints)
        loaded = frozen.load(loop.parallel.parts)
        if world.rank == 0:
            seconds = time.perf_counter() - began
            self.recorder.event(
                "frozen_weights_loaded",
                **loaded,
                use=frozen.use,
                bytes=frozen.bytes,
                seconds=seconds,
            )

    def _load_initial(self, world: World, loop: Loop, source: ModelSource) -> None:
        """Load existing weights; every rank reads, and all fail if one does."""
        assert self.recorder is not None
        began = time.perf_counter()
        run_on_leaders(world, lambda: open_initial(source, self.run.model), leads=True)
        weights = open_initial(source, self.run.model)
        loaded = fill_from(loop.parallel.parts, weights)
        if self.run.train.adapter is not None:
            loop.base = base_of(weights)
        if world.rank == 0:
            reader = describe_tokenizer(self.run, checkpoints=self.environment.checkpoints)
            self.recorder.event(
                "weights_loaded", **loaded, tokenizer=reader, seconds=time.perf_counter() - began
            )


def _record_for_elastic(error: BaseException) -> None:
    """Write the first cause to TORCHELASTIC_ERROR_FILE in torchrun's format."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
