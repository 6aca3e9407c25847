"""One attempt of a run on this rank, from process group to exit file: setup, training, outcome.

The composition root of the engine: the only place that constructs the loop's collaborators. Does
not depend on how a step is computed.
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
from workers.models.moe.balance_control import Balancer, routing_layers
from workers.runtime.environment import Environment
from workers.runtime.exits import Outcome, UserError, classify, write_exit
from workers.training.checkpoint import Checkpointer, Saved, load_training
from workers.training.data.inherited import describe_tokenizer
from workers.training.data.losses import SourceLosses
from workers.training.data.prompts import Prompts, open_prompts
from workers.training.data.run_samples import open_samples
from workers.training.data.samples import Samples
from workers.training.loop.memory_metrics import MemoryMetrics, describe_memory
from workers.training.loop.objective import uses_hidden_states
from workers.training.loop.progress import Progress
from workers.training.loop.rank_sync import broadcast_decision, run_on_leaders
from workers.training.loop.sequential_runner import SequentialRunner
from workers.training.loop.step_context import MicrobatchRunner, StepContext
from workers.training.loop.step_report import StepReport
from workers.training.loop.text_samples import SampleWriter
from workers.training.loop.train import Loop
from workers.training.numerics.step_checks import StepChecks
from workers.training.optim import build_optimizer, release
from workers.training.parallel.arrival_skew import ArrivalTracker
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
        world = start_world(environment, run.plan)
        # until here a signal may end the process at once
        self.control.listen(too_late=self._leave_at_once)
        number, start = broadcast_decision(world, self._decide_start, leads=world.rank == 0)
        self.recorder = Recorder(
            environment.rank_directory, run=environment.run, attempt=number, rank=world.rank
        )
        train, held_out = self._open_samples(world)
        self.loop = loop = self.build_loop(world, train, held_out, number, self._open_prompts())
        self._record_plan(world)
        for message in start.rejected if world.rank == 0 else ():
            self.recorder.event("checkpoint_rejected", message=message)
        if start.folder is not None:
            self._restore(world, loop, start)
        elif run.train.init_from is not None:
            self._load_initial(world, loop, run.train.init_from)
        return loop.run_steps(start)

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
        if outcome.exit_class not in ("user_error", "numerics") or not isinstance(
            error, (UserError, ArithmeticError)
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

    def _open_samples(self, world: World) -> tuple[Samples, Samples | None]:
        """Training and held-out samples; one rank per node tokenises, once."""
        environment = self.environment

        def open_both() -> tuple[Samples, Samples | None]:
            return open_samples(
                self.run, cache=environment.cache, checkpoints=environment.checkpoints
            )

        run_on_leaders(world, open_both, leads=environment.leads_node)
        return open_both()

    def _open_prompts(self) -> Prompts | None:
        """The prompts of text samples; every rank reads them from the tokenised data."""
        spec, environment = self.run.train.writes, self.environment
        if spec is None:
            return None
        return open_prompts(
            self.run, spec, cache=environment.cache, checkpoints=environment.checkpoints
        )

    def build_loop(
        self,
        world: World,
        samples: Samples,
        held_out: Samples | None,
        number: int,
        prompts: Prompts | None = None,
    ) -> Loop:
        """The loop with its collaborators, over one frozen `StepContext`."""
        run, environment, recorder = self.run, self.environment, self.recorder
        assert recorder is not None and self.beacon is not None
        if run.train.compile:
            self._check_compiler(world)
        clear_records()  # an earlier model's choices of kernels
        parallel = parallelize(
            run.model,
            run.plan,
            world,
            seed=run.train.seed,
            compile=run.train.compile,
            fused=run.train.fused_kernels,
            quantize_aware=run.train.quantize_aware,
        )
        recomputed_share = self._choose_recompute(parallel, masked=samples.masked)
        world.barrier()
        throughput = self._throughput(world, recomputed_share)
        parameters = parallel.parameters()
        optimizer = build_optimizer(
            parameters,
            run.train.optimizer,
            shard_state=run.plan.zero == 1 and world.axis("data").size > 1,
            process_group=lambda parameter: parallel.replica_axis(parameter).group,
            offload=run.plan.offload,
            scratch=environment.scratch,
            fused=run.train.fused_kernels,
        )
        self.trace = trace = Trace(
            run,
            parallel,
            optimizer,
            recorder=recorder,
            folder=environment.rank_directory,
            spans_nodes=environment.spans_nodes,
        )
        arrivals = ArrivalTracker(
            rank=world.rank, size=world.size, stages=run.plan.pp, device=world.device
        )
        if run.plan.zero < 2:
            arrivals.watch(parameters.values())
        context = StepContext(
            run=run,
            world=world,
            parallel=parallel,
            optimizer=optimizer,
            samples=samples,
            source_losses=SourceLosses(samples, world.device) if len(samples.names) > 1 else None,
            memory=MemoryMetrics(
                parallel, world.device, local_world_size=environment.local_world_size
            ),
            trace=trace,
            progress=Progress(self.beacon, trace.time_breakdown, arrivals),
            recorder=recorder,
            loss_from_hidden=run.train.fused_kernels and uses_hidden_states(run.plan, world.device),
        )
        asynchronous = run.plan.pp > 1 and run.plan.schedule == "pipedream"
        runner = build_runner(context)
        checks = StepChecks(run, parallel, parameters, recorder)
        balancer = (
            Balancer(routing_layers(parallel.parts, run.model), run.model.moe)
            if run.model.moe
            else None
        )
        report = StepReport(
            context,
            balancer=balancer,
            checks=checks,
            arrivals=None if asynchronous else arrivals,
            throughput=throughput,
            node=environment.node if environment.spans_nodes else None,
        )
        writer = None
        if prompts is not None and prompts.ids and run.train.writes is not None:
            writer = SampleWriter(context, run.train.writes, prompts, runner)
        kind: type[Loop] = Loop
        if asynchronous:
            from workers.training.parallel.pipeline.pipedream_loop import PipeDreamLoop

            kind = PipeDreamLoop
        checkpointer = Checkpointer(
            environment.checkpoints,
            world,
            spec=run.train.checkpoint,
            tag=f"attempt-{number}",
            on_saved=self._record_saved,
        )
        return kind(
            context,
            runner=runner,
            checks=checks,
            report=report,
            balancer=balancer,
            throughput=throughput,
            control=self.control,
            checkpointer=checkpointer,
            held_out=held_out,
            writer=writer,
        )

    def _throughput(self, world: World, recomputed_share: float | None) -> Throughput:
        """Also measures the device's peak, where it is not in the catalogue."""
        run = self.run
        assert self.recorder is not None
        peak = _peak(world.device, run.plan.precision, world.size)
        self.peak = {
            "tflops": peak.flops / 1e12,
            "source": peak.source,
            "precision": run.plan.precision,
        }
        if peak.measured:
            self.recorder.event("peak_measured", device=peak.device, **self.peak)
        # all ranks divide by the same peak, so that mfu is one number
        total = world.sum_(torch.tensor(peak.flops, dtype=torch.float64, device=world.device))
        return Throughput(
            flops_per_token=flops_per_token(run.model, run.train.seq_len),
            peak_flops=float(total) / world.size,
            devices=world.size,
            hardware_factor=hardware_factor(
                run.model, run.plan, run.train.seq_len, recomputed_share=recomputed_share
            ),
        )

    def _check_compiler(self, world: World) -> None:
        # torch's compiler takes seconds to load
        from workers.training.parallel.compile import refuse_uncompilable

        precision = self.run.plan.precision
        run_on_leaders(
            world,
            lambda: refuse_uncompilable(world.device, precision),
            leads=self.environment.leads_node,
        )

    def _choose_recompute(self, parallel: Parallel, *, masked: bool) -> float | None:
        """Measure and choose for `auto`: the share of the blocks' forward FLOPs that runs again."""
        if self.run.plan.recompute != "auto":
            return None
        assert self.recorder is not None
        choice = choose_recompute(
            self.run, parallel, local_world_size=self.environment.local_world_size, masked=masked
        )
        if parallel.world.rank == 0:
            self.recorder.event("recompute_chosen", **choice.event)
        return choice.recomputed_share

    def _record_plan(self, world: World) -> None:
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
        """The rounding of weights in quantisation-aware training, if any."""
        kind = self.run.train.quantize_aware
        if kind is None:
            return {}
        group = {} if kind == "int8" else {"group": group_for(linear_widths(self.run.model))}
        return {"quantize_aware": kind, **group}

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

    def _load_initial(self, world: World, loop: Loop, source: ModelSource) -> None:
        """Load existing weights; every rank reads, and all fail if one does."""
        assert self.recorder is not None
        began = time.perf_counter()
        run_on_leaders(world, lambda: open_initial(source, self.run.model), leads=True)
        loaded = fill_from(loop.parallel.parts, open_initial(source, self.run.model))
        if world.rank == 0:
            reader = describe_tokenizer(self.run, checkpoints=self.environment.checkpoints)
            self.recorder.event(
                "weights_loaded", **loaded, tokenizer=reader, seconds=time.perf_counter() - began
            )

    def _record_saved(self, saved: Saved) -> None:
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


def build_runner(context: StepContext) -> MicrobatchRunner:
    """The runner of the plan: sequential, a torch schedule, or PipeDream. Collective."""
    plan = context.run.plan
    if plan.pp == 1:
        return SequentialRunner(context)
    if plan.schedule == "pipedream":
        from workers.training.parallel.pipeline.pipedream import PipeDreamRunner

        return PipeDreamRunner(context)
    # torch's pipelining takes seconds to load
    from workers.training.parallel.pipeline.schedule_runner import PipelineRunner

    return PipelineRunner(context)


@cache
def _peak(device: torch.device, precision: str, ranks: int) -> Peak:
    """Measured once per process, which may run many attempts; `ranks` measure at the same time."""
    return device_peak(device, precision)


def _record_for_elastic(error: BaseException) -> None:
    """Write the first cause to TORCHELASTIC_ERROR_FILE in torchrun's format."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
