"""One attempt of a run on this rank, from process group to exit: sets up, trains, tells how it
ended.

Knows the order of setting up and what each failure means; the steps themselves are `loop`'s.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from workers.contracts.catalog.counts import flops_per_token, parameter_count
from workers.contracts.specs.model import ModelSource
from workers.contracts.specs.weight_rounding import group_for, linear_widths
from workers.metrics.beacon import Beacon
from workers.metrics.kernel_choices import clear_records
from workers.metrics.peak import Peak, device_peak
from workers.metrics.recorder import Recorder, RecorderError, last_attempt
from workers.metrics.throughput import Throughput
from workers.runtime.environment import Environment
from workers.runtime.exits import Outcome, UserError, classify, write_exit
from workers.training.checkpoint import Checkpointer, Saved, load_training
from workers.training.data.inherited import reader_of
from workers.training.data.opened import open_samples
from workers.training.data.prompts import Prompts, open_prompts
from workers.training.data.samples import Samples
from workers.training.loop.memory_metrics import MemoryMetrics, holding
from workers.training.loop.rank_sync import broadcast_decision, run_on_leaders
from workers.training.loop.train import Loop
from workers.training.optim import release
from workers.training.parallel.mesh import World, start_world
from workers.training.parallel.parallelize import Parallel, parallelize
from workers.training.recompute import hardware_factor
from workers.training.recompute.auto import choose_recompute
from workers.training.setup.control import Control
from workers.training.setup.initial_weights import fill_from, open_initial
from workers.training.setup.resume import Start, choose_start
from workers.training.setup.spec_loading import TrainingRun, mesh_axes
from workers.training.trace.step_trace import Trace


def run_attempt(run: TrainingRun, environment: Environment) -> Outcome:
    """Train; write `rank-N/exit.json`; never raises but for interrupts."""
    return finish_attempt(Attempt(run, environment))


def finish_attempt(attempt: Attempt) -> Outcome:
    """Whatever an attempt is about, from its first step to its exit file; never raises but for
    interrupts.
    """
    environment = attempt.environment
    try:
        outcome = attempt.go()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        outcome = attempt.failed(error)
    try:
        attempt.close()
    except RecorderError as error:
        outcome = Outcome("infrastructure", str(error), outcome.step)
    try:
        write_exit(environment.directory, environment.rank, outcome)
    except OSError as error:
        print(f"error: {environment.directory} cannot be written: {error}", file=sys.stderr)
    if outcome.code in (0, 67) and environment.world_size > 1:
        # leave together: torchrun ends the others as soon as it sees the first one gone
        # a peer that failed while closing has said so itself
        with contextlib.suppress(RuntimeError):
            dist.barrier()
    attempt.control.close()
    if attempt.beacon is not None:
        attempt.beacon.close()
    return outcome


class Attempt:
    """The parts of an attempt on this rank; `go` puts them together and trains."""

    def __init__(self, run: TrainingRun, environment: Environment) -> None:
        self.run, self.environment = run, environment
        self.control = Control(environment.directory, reads_file=environment.leads_node)
        self.recorder: Recorder | None = None
        self.beacon: Beacon | None = None
        self.loop: Loop | None = None
        self.trace: Trace | None = None
        self.peak: dict[str, Any] = {}
        self.began = time.perf_counter()

    def go(self) -> Outcome:
        run, environment = self.run, self.environment
        environment.rank_directory.mkdir(parents=True, exist_ok=True)
        (environment.rank_directory / "exit.json").unlink(missing_ok=True)
        self.beacon = Beacon(environment.rank_directory, stages=run.plan.pp)
        world = start_world(environment, run.plan)
        # until here a signal may simply end the process
        self.control.listen(too_late=self._leave_at_once)
        number, start = broadcast_decision(world, self._first_words, leads=world.rank == 0)
        self.recorder = Recorder(
            environment.rank_directory, run=environment.run, attempt=number, rank=world.rank
        )
        train, held_out = self._samples(world)
        self.loop = loop = self._loop(world, train, held_out, number, self._prompts())
        self._tell_plan(world)
        for message in start.rejected if world.rank == 0 else ():
            self.recorder.event("checkpoint_rejected", message=message)
        if start.folder is not None:
            self._restore(world, loop, start)
        elif run.train.init_from is not None:
            self._begin_from(world, loop, run.train.init_from)
        return loop.go(start)

    def failed(self, error: BaseException) -> Outcome:
        """Tell the error by event, on stderr and in torch elastic's error file."""
        step = self.loop.step if self.loop else 0
        outcome = classify(error, step)
        phase = self.loop.phase if self.loop else "starting"
        memory: dict[str, float] = {}
        if outcome.exit_class == "out_of_memory" and self.loop is not None:
            with contextlib.suppress(MemoryError, OSError):
                memory = self.loop.memory.values()
        if memory:
            told = f"in {phase} of step {step + 1}; {holding(memory)}"
            outcome = replace(outcome, reason=f"{outcome.reason.rstrip('. ')} ({told})")
        print(
            f"error: rank {self.environment.rank}, {phase}, after step {step}: {outcome.reason}",
            file=sys.stderr,
        )
        if outcome.exit_class not in ("user_error", "numerics") or not isinstance(
            error, (UserError, ArithmeticError)
        ):
            traceback.print_exception(error)
        if outcome.exit_class == "numerics" and self.loop is not None:
            # all ranks are here: a save under way can still become whole
            with contextlib.suppress(Exception):
                self.loop.checkpointer.finish()
        try:
            if outcome.exit_class == "out_of_memory" and self.recorder is not None:
                self.recorder.event(
                    "out_of_memory", step=step, phase=phase, message=outcome.reason, **memory
                )
        except OSError as broken:
            print(f"error: {broken}", file=sys.stderr)
        _record_for_elastic(error)
        return outcome

    def close(self) -> None:
        if self.trace is not None:
            self.trace.close()
        if self.loop is not None:
            release(self.loop.optimizer)
        if self.recorder is not None:
            self.recorder.close()

    def _leave_at_once(self) -> None:
        """Ends the process from beside a main thread that hangs in a collective."""
        step = self.loop.step if self.loop else 0
        outcome = Outcome(
            "preempted", "told to end, and no step boundary was reached in time to save", step
        )
        write_exit(self.environment.directory, self.environment.rank, outcome)
        os._exit(outcome.code)

    def _first_words(self) -> tuple[int, Start]:
        """What rank 0 decides for all: the attempt's number and the checkpoint to continue from."""
        environment = self.environment
        number = environment.attempt or 1 + last_attempt(
            environment.rank_directory / "points.jsonl"
        )
        return number, choose_start(
            self.run, checkpoints=environment.checkpoints, resume=environment.resume
        )

    def _samples(self, world: World) -> tuple[Samples, Samples | None]:
        """Training and held-out samples.

        What has to be tokenised is tokenised by one rank a node, once.
        """
        environment = self.environment

        def opened() -> tuple[Samples, Samples | None]:
            return open_samples(self.run, cache=environment.cache, kept=environment.checkpoints)

        run_on_leaders(world, opened, leads=environment.leads_node)
        return opened()

    def _prompts(self) -> Prompts | None:
        """What texts go on from; read by every rank from what is tokenised by now."""
        spec, environment = self.run.train.writes, self.environment
        if spec is None:
            return None
        return open_prompts(self.run, spec, cache=environment.cache, kept=environment.checkpoints)

    def _loop(
        self,
        world: World,
        train: Samples,
        held_out: Samples | None,
        number: int,
        prompts: Prompts | None = None,
    ) -> Loop:
        run, environment, recorder = self.run, self.environment, self.recorder
        assert recorder is not None and self.beacon is not None
        if run.train.compile:
            self._can_compile(world)
        clear_records()  # an earlier model's choices of kernels
        parallel = parallelize(
            run.model,
            run.plan,
            world,
            seed=run.train.seed,
            compiled=run.train.compile,
            fused=run.train.fused_kernels,
            aware=run.train.quantize_aware,
        )
        again = self._choose_recompute(parallel, masked=train.masked)
        world.barrier()
        peak = _peak(world.device, run.plan.precision, world.size)
        self.peak = {
            "tflops": peak.flops / 1e12,
            "source": peak.source,
            "precision": run.plan.precision,
        }
        if peak.measured:
            recorder.event("peak_measured", device=peak.device, **self.peak)
        flops = flops_per_token(run.model, run.train.seq_len)
        factor = hardware_factor(run.model, run.plan, run.train.seq_len, again=again)
        # all ranks divide by the same peak, so that mfu is one number
        mean_peak = (
            float(world.sum_(torch.tensor(peak.flops, dtype=torch.float64, device=world.device)))
            / world.size
        )
        self.trace = Trace(
            run,
            parallel,
            recorder=recorder,
            folder=environment.rank_directory,
            spans_nodes=environment.spans_nodes,
        )
        kind = Loop
        if run.plan.pp > 1 and run.plan.schedule == "pipedream":
            from workers.training.parallel.pipeline.pipedream_loop import PipeDreamLoop

            kind = PipeDreamLoop
        return kind(
            run,
            world,
            parallel,
            train=train,
            held_out=held_out,
            recorder=recorder,
            control=self.control,
            checkpointer=Checkpointer(
                environment.checkpoints,
                world,
                spec=run.train.checkpoint,
                tag=f"attempt-{number}",
                on_saved=self._tell_saved,
            ),
            throughput=Throughput(
                flops_per_token=flops,
                peak_flops=mean_peak,
                devices=world.size,
                hardware_factor=factor,
            ),
            memory=MemoryMetrics(
                parallel, world.device, local_world_size=environment.local_world_size
            ),
            scratch=environment.scratch,
            beacon=self.beacon,
            trace=self.trace,
            node=environment.node if environment.spans_nodes else None,
            prompts=prompts,
        )

    def _can_compile(self, world: World) -> None:
        # takes torch's compiler seconds to load
        from workers.training.setup.compile import refuse_uncompilable

        precision = self.run.plan.precision
        run_on_leaders(
            world,
            lambda: refuse_uncompilable(world.device, precision),
            leads=self.environment.leads_node,
        )

    def _choose_recompute(self, parallel: Parallel, *, masked: bool) -> float | None:
        """Recompute auto measures and chooses now: the share of the blocks' forward FLOPs that will
        run again.
        """
        if self.run.plan.recompute != "auto":
            return None
        assert self.recorder is not None
        chosen = choose_recompute(
            self.run, parallel, local_world_size=self.environment.local_world_size, masked=masked
        )
        if parallel.world.rank == 0:
            self.recorder.event("recompute_chosen", **chosen.event)
        return chosen.again

    def _tell_plan(self, world: World) -> None:
        assert self.recorder is not None
        if world.rank == 0:
            self.recorder.event(
                "plan_resolved",
                plan=self.run.plan.to_dict(),
                mesh=mesh_axes(self.run.plan),
                accumulation=self.run.plan.accumulation,
                parameters=parameter_count(self.run.model).total,
                **self._rounding(),
                peak=self.peak,
                device=str(world.device),
                torch=torch.__version__,
                setup_s=round(time.perf_counter() - self.began, 3),
            )

    def _rounding(self) -> dict[str, Any]:
        """What weights are rounded to while they learn, where they are."""
        kind = self.run.train.quantize_aware
        if kind is None:
            return {}
        told = {"quantize_aware": kind}
        return (
            told if kind == "int8" else {**told, "group": group_for(linear_widths(self.run.model))}
        )

    def _restore(self, world: World, loop: Loop, start: Start) -> None:
        assert self.recorder is not None and start.folder is not None
        began = time.perf_counter()
        load_training(start.folder, loop.parallel.weights(), loop.optimizer)
        loop.parallel.finish_update()
        if world.rank == 0:
            seconds = time.perf_counter() - began
            self.recorder.event(
                "checkpoint_restored", step=start.step, path=str(start.folder), seconds=seconds
            )

    def _begin_from(self, world: World, loop: Loop, source: ModelSource) -> None:
        """Existing weights in place of drawn ones; every rank reads, all agree on whether they can."""
        assert self.recorder is not None
        began = time.perf_counter()
        run_on_leaders(world, lambda: open_initial(source, self.run.model), leads=True)
        told = fill_from(loop.parallel.parts, open_initial(source, self.run.model))
        if world.rank == 0:
            reader = reader_of(self.run, kept=self.environment.checkpoints)
            self.recorder.event(
                "weights_loaded", **told, tokenizer=reader, seconds=time.perf_counter() - began
            )

    def _tell_saved(self, saved: Saved) -> None:
        assert self.recorder is not None
        self.recorder.event(
            "checkpoint_saved",
            step=saved.step,
            tokens=saved.tokens,
            path=str(saved.path),
            bytes=saved.bytes,
            seconds=saved.seconds,
            stall_s=saved.stall_s,
        )


@cache
def _peak(device: torch.device, precision: str, ranks: int) -> Peak:
    """Measured once in a process that sees many runs: benchmarks, tests.

    `ranks` measure at the same time.
    """
    return device_peak(device, precision)


def _record_for_elastic(error: BaseException) -> None:
    """The first cause, in the file that torchrun told in TORCHELASTIC_ERROR_FILE, in its own
    format.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
