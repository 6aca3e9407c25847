"""Builds the training loop with its collaborators over one frozen `StepContext`.

Does not depend on where training starts, nor on how an attempt ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from workers.contracts.catalog.model_flops import (
    MFU_RULE,
    head_flops_per_token,
    training_flops_per_token,
)
from workers.metrics.beacon import Beacon
from workers.metrics.kernel_choices import clear_records
from workers.metrics.peak import Peak, device_peak
from workers.metrics.recorder import Recorder
from workers.metrics.throughput import Throughput
from workers.models.moe.balance_control import Balancer, routing_layers
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import UserError
from workers.training import fp8
from workers.training.checkpoint import Checkpointer, Saved
from workers.training.data.examples.run_examples import open_run_chat_format
from workers.training.data.losses import SourceLosses
from workers.training.data.prompts import Prompts
from workers.training.data.rows import RowSource
from workers.training.loop.late_reads import LateReadLoop, can_read_late
from workers.training.loop.memory_metrics import MemoryMetrics
from workers.training.loop.progress import Progress
from workers.training.loop.rank_sync import run_on_leaders
from workers.training.loop.sequential_runner import SequentialRunner
from workers.training.loop.step_context import MicrobatchRunner, StepContext
from workers.training.loop.step_report import StepReport
from workers.training.loop.text_samples import SampleWriter
from workers.training.loop.train import Loop, StepPreparation
from workers.training.numerics.step_checks import StepChecks
from workers.training.objectives.build import (
    build_frozen_module,
    build_objective,
    objective_rows,
    trained_adapter,
    trained_model,
)
from workers.training.objectives.counts import Counts
from workers.training.objectives.frozen_module import FrozenModule
from workers.training.objectives.objective import TokenObjective
from workers.training.objectives.token_losses import uses_hidden_states
from workers.training.parallel.arrival_skew import ArrivalTracker
from workers.training.parallel.mesh import World
from workers.training.parallel.parallelize import Parallel, parallelize
from workers.training.recompute import hardware_factor
from workers.training.setup.control import Control
from workers.training.setup.spec_loading import TrainingRun
from workers.training.setup.trained_module import module_optimizer, module_recompute
from workers.training.trace.step_trace import Trace


@dataclass(frozen=True, slots=True)
class BuiltLoop:
    """The loop, the trace to close after it, and the device's peak for MFU: TFLOP/s and source."""

    loop: Loop
    trace: Trace
    peak: dict[str, Any]


@dataclass(frozen=True, slots=True)
class LoopBuilder:
    """Builds the loop of one attempt on this rank."""

    run: TrainingRun
    environment: Environment
    world: World
    recorder: Recorder
    beacon: Beacon
    control: Control

    def build(
        self,
        samples: RowSource,
        held_out: RowSource | None,
        *,
        number: int,
        prompts: Prompts | None = None,
        prepare: Callable[[StepContext], StepPreparation] | None = None,
        data_fingerprint: str | None = None,
    ) -> BuiltLoop:
        """The loop of attempt `number`; `prepare` makes what acts before each step. Collective.

        Checkpoints store `data_fingerprint`.
        """
        run, environment, recorder, world = self.run, self.environment, self.recorder, self.world
        samples = objective_rows(run, samples, training=True)
        held_out = held_out and objective_rows(run, held_out, training=False)
        if run.plan.precision == "fp8":
            self._check_fp8()
        if run.train.compile:
            self._check_compiler()
        clear_records()  # an earlier model's choices of kernels
        parallel = parallelize(
            trained_model(run),
            run.plan,
            world,
            seed=run.train.seed,
            compile=run.train.compile,
            fused=run.train.fused_kernels,
            quantize_aware=run.train.quantize_aware,
            adapter=trained_adapter(run),
            frozen=run.train.freeze,
        )
        frozen = build_frozen_module(run, world, parallel)
        objective = build_objective(run, world)
        loss_from_hidden = run.train.fused_kernels and uses_hidden_states(run.plan, world.device)
        recomputed_share = self._choose_recompute(
            parallel,
            masked=samples.masked,
            loss_from_hidden=loss_from_hidden and isinstance(objective, TokenObjective),
        )
        world.barrier()
        throughput, peak = self._throughput(recomputed_share, frozen)
        parameters = parallel.parameters()
        optimizer = module_optimizer(run, parallel, environment)
        trace = Trace(
            run,
            parallel,
            optimizer,
            recorder=recorder,
            folder=environment.rank_directory,
            spans_nodes=environment.spans_nodes,
        )
        with ExitStack() as undo:
            undo.callback(trace.close)
            arrivals = ArrivalTracker(
                rank=world.rank, size=world.size, stages=run.plan.pp, device=world.device
            )
            if run.plan.zero < 2:
                arrivals.watch(parameters.values())
            counts = Counts(objective, samples)
            context = StepContext(
                run=run,
                world=world,
                parallel=parallel,
                optimizer=optimizer,
                samples=samples,
                objective=objective,
                counts=counts,
                source_losses=SourceLosses(samples, counts, world.device)
                if len(samples.names) > 1
                else None,
                memory=MemoryMetrics(
                    parallel,
                    world.device,
                    local_world_size=environment.local_world_size,
                    frozen=frozen,
                ),
                trace=trace,
                progress=Progress(self.beacon, trace.time_breakdown, arrivals),
                recorder=recorder,
                loss_from_hidden=loss_from_hidden,
                frozen=frozen,
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
            elif can_read_late(context, checks, prepares=prepare is not None):
                kind = LateReadLoop
            checkpointer = Checkpointer(
                environment.checkpoints,
                world,
                spec=run.train.checkpoint,
                tag=f"attempt-{number}",
                on_saved=self._record_saved,
            )
            loop = kind(
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
                stops=self._stops(),
                preparation=None if prepare is None else prepare(context),
                data_fingerprint=data_fingerprint,
            )
            undo.pop_all()
        return BuiltLoop(loop, trace, peak)

    def _stops(self) -> tuple[int, ...]:
        """Tokens that end an answer of the model, if the objective lets it write some."""
        distill = self.run.train.distill
        if distill is None or not distill.on_policy:
            return ()
        return open_run_chat_format(self.run, checkpoints=self.environment.checkpoints).stops

    def _throughput(
        self, recomputed_share: float | None, frozen: FrozenModule | None
    ) -> tuple[Throughput, dict[str, Any]]:
        """With the device's peak, which is measured where it is not in the catalogue."""
        run, world = self.run, self.world
        second = None if frozen is None else frozen.parts[0].spec
        flops_per_token = training_flops_per_token(run.model, run.train, second=second)
        peak = _peak(world.device, run.plan.precision, world.size)
        # all ranks divide by the same peak, so that mfu is one number
        total = world.sum_(torch.tensor(peak.flops, dtype=torch.float64, device=world.device))
        flops = float(total) / world.size
        described = {
            "tflops": flops / 1e12,
            "source": peak.source,
            "precision": run.plan.precision,
            "mfu_rule": MFU_RULE,
        }
        if peak.measured:
            self.recorder.event("peak_measured", device=peak.device, **described)
        throughput = Throughput(
            flops_per_token=flops_per_token,
            peak_flops=flops,
            devices=world.size,
            head_flops_per_token=head_flops_per_token(run.model, run.train),
            hardware_factor=hardware_factor(
                run.model,
                run.plan,
                run.train.seq_len,
                flops_per_token=flops_per_token,
                recomputed_share=recomputed_share,
            ),
        )
        return throughput, described

    def _check_compiler(self) -> None:
        # torch's compiler takes seconds to load
        from workers.training.parallel.compile import refuse_uncompilable

        precision = self.run.plan.precision
        run_on_leaders(
            self.world,
            lambda: refuse_uncompilable(self.world.device, precision),
            leads=self.environment.leads_node,
        )

    def _check_fp8(self) -> None:
        recipe = self.run.plan.chosen_fp8_recipe(compiled=self.run.train.compile)

        def refuse() -> None:
            problem = fp8.why_not(recipe, self.world.device)
            if problem is not None:
                message, hint = problem
                raise UserError(f"plan.precision: fp8 ({recipe}): {message}. {hint}")

        run_on_leaders(self.world, refuse, leads=self.environment.leads_node)

    def _choose_recompute(
        self, parallel: Parallel, *, masked: bool, loss_from_hidden: bool
    ) -> float | None:
        """Measure and choose for `auto`: the share of the blocks' forward FLOPs that runs again."""
        choice = module_recompute(
            self.run,
            parallel,
            self.environment,
            masked=masked,
            loss_from_hidden=loss_from_hidden,
        )
        if choice is None:
            return None
        if parallel.world.rank == 0:
            self.recorder.event("recompute_chosen", **choice.event)
        return choice.recomputed_share

    def _record_saved(self, saved: Saved) -> None:
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
