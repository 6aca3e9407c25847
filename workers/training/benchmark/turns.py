"""The order of a benchmark: the devices first, then every variant in turns that alternate, results
told as they come.

All in one set of processes, so that turns alternate within seconds and a slow hour of the machine
hits all alike.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workers.contracts.specs.benchmark import repeat_count, steps_per_repeat
from workers.contracts.specs.benchmark_variants import Variant
from workers.metrics.beacon import Beacon
from workers.metrics.peak import device_peak
from workers.metrics.recorder import Recorder
from workers.runtime.environment import Environment
from workers.runtime.exits import Outcome, classify, write_atomically
from workers.training.benchmark.accept import BenchmarkRun
from workers.training.benchmark.collectives import measure_collectives
from workers.training.benchmark.products import measure_products
from workers.training.benchmark.results import Results, earlier, row
from workers.training.benchmark.results import together as of_ranks
from workers.training.benchmark.turn import Requests, Turn, free_memory
from workers.training.data.opened import open_samples
from workers.training.data.samples import Samples
from workers.training.loop.rank_sync import broadcast_decision, run_on_leaders
from workers.training.parallel.mesh import World, start_world
from workers.training.setup.attempt import Attempt, finish_attempt

# for the other ranks at the end of a turn; longer, and one of them hangs in a collective
_PATIENCE_S = 120.0
FILE = "benchmark.json"


def run_benchmark(run: BenchmarkRun, environment: Environment) -> Outcome:
    """Measure everything; `DIR/benchmark.json` and events `benchmark_result` say what; never
    raises.
    """
    return finish_attempt(Benchmark(run, environment))


class Benchmark(Attempt):
    """One attempt at a benchmark on this rank."""

    def __init__(self, benchmark: BenchmarkRun, environment: Environment) -> None:
        super().__init__(benchmark.base, environment)
        self.benchmark = benchmark
        self.control = self.requests = Requests(
            environment.directory, reads_file=environment.leads_node
        )
        self.results = Results()
        self.worlds: dict[str, World] = {}
        self.voices: dist.ProcessGroup | None = None
        self.steps = self.tokens = 0

    def execute(self) -> Outcome:
        environment, body = self.environment, self.benchmark.body
        environment.rank_directory.mkdir(parents=True, exist_ok=True)
        (environment.rank_directory / "exit.json").unlink(missing_ok=True)
        # as many stages as ranks: which ranks may be late to what changes from variant to variant
        self.beacon = Beacon(environment.rank_directory, stages=environment.world_size)
        world = self._world(self.benchmark.expansion.variants[0])
        self.control.listen(too_late=self._leave_at_once)
        if world.size > 1:
            patience = timedelta(seconds=min(environment.timeout_s, _PATIENCE_S))
            self.voices = dist.new_group(backend="gloo", timeout=patience, group_desc="benchmark")
        kept = environment.cache / FILE
        spec = self.benchmark.spec.to_dict()
        (number, _), self.results = broadcast_decision(
            world, lambda: (self._decide_start(), earlier(kept, spec)), leads=world.rank == 0
        )
        self.recorder = Recorder(
            environment.rank_directory, run=environment.run, attempt=number, rank=world.rank
        )
        run_on_leaders(world, self._open, leads=environment.leads_node)
        samples = self._open()
        self._tell_peak(world)
        self._tell(world, "benchmark_began", **self.benchmark.describe())
        self.steps = sum(len(done) for done in self.results.turns.values()) * steps_per_repeat(body)
        self._measure_devices(world, kept, spec)
        for number, last, variant in self._order():
            if (
                variant.id in self.results.failed
                or len(self.results.turns.get(variant.id, [])) > number
            ):
                continue
            self.results.under_way = variant.id
            self._save(world, kept, spec)
            asked = self._turn(variant, samples, f"turn {number + 1} of {repeat_count(body)}")
            self.results.under_way = None
            self._save(world, kept, spec)
            if asked is not None:
                kind = "cancelled" if asked == "stop" else "preempted"
                return Outcome(kind, f"{asked} was asked for, left in {variant.id}", self.steps)
            if last or variant.id in self.results.failed:
                self._tell(
                    world, "benchmark_result", **row(variant, self.results, seq_len=body.seq_len)
                )
        return self._finished(world)

    def _order(self) -> Iterator[tuple[int, bool, Variant]]:
        """`(turn, whether it is the last one, variant)`; every other turn goes backward, which
        cancels a steady drift.

        The base begins in any case: losses are compared with it.
        """
        variants, count = self.benchmark.expansion.variants, repeat_count(self.benchmark.body)
        for number in range(count):
            for variant in variants if number % 2 == 0 else reversed(variants):
                yield number, number == count - 1, variant

    def _turn(self, variant: Variant, samples: Samples, where: str) -> str | None:
        """Train a variant once on all ranks; what was asked for meanwhile.

        Failures become the variant's row.
        """
        assert self.beacon is not None
        print(f"{variant.id}, {where}", flush=True)
        said: dict[str, Any] = {}
        turn = None
        try:
            world = self._world(variant)
            run = self.benchmark.run_of(variant)
            turn = Turn(
                run,
                self.environment,
                control=self.requests,
                beacon=self.beacon,
                on_point=self._point,
            )
            self.loop = None
            outcome = turn.train(world, samples)
            if outcome.exit_class == "ok":
                said["numbers"] = turn.numbers(warmup_steps=self.benchmark.body.warmup_steps)
        except (
            Exception
        ) as error:  # whatever a variant ends by, the others are still to be measured
            found = classify(error, 0)
            said["failed"] = (
                f"out of memory: {found.reason}"
                if found.exit_class == "out_of_memory"
                else found.reason
            )
            traceback.print_exception(error)
        finally:
            if turn is not None:
                turn.let_go()
            free_memory()
        said["asked"] = self.requests.asked
        told = self._of_all(said)
        failures = [
            f"{each['failed']} (rank {rank})" for rank, each in enumerate(told) if "failed" in each
        ]
        asked = next((each["asked"] for each in told if each["asked"] is not None), None)
        if failures:
            self.results.failed[variant.id] = failures[0]
        elif all("numbers" in each for each in told):
            self.results.turns.setdefault(variant.id, []).append(
                of_ranks([each["numbers"] for each in told])
            )
        return asked

    def _of_all(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says.

        Raises where one is silent: it hangs in a collective that another one left.
        """
        if self.voices is None:
            return [said]
        told: list[Any] = [None] * self.environment.world_size
        dist.all_gather_object(told, said, group=self.voices)
        return told

    def _world(self, variant: Variant) -> World:
        """The variant's mesh; those of one shape share it, because process groups are never given
        back.
        """
        plan = variant.plan
        shape = (
            plan.dp,
            plan.tp,
            plan.pp,
            plan.cp,
            plan.ep,
            plan.dp_replicate,
            plan.zero >= 2,
            plan.offloads_weights,
        )
        if str(shape) not in self.worlds:
            self.worlds[str(shape)] = start_world(self.environment, plan)
        return self.worlds[str(shape)]

    def _measure_devices(self, world: World, kept: Path, spec: dict[str, Any]) -> None:
        assert self.beacon is not None
        for name in self.benchmark.expansion.devices:
            if name in self.results.devices:
                continue
            self.beacon.mark(name)
            print(f"measuring {name}", flush=True)
            if name == "collectives":
                local = self.environment.local_world_size
                found = measure_collectives(
                    world, local_world_size=local, tell=partial(self.beacon.mark, name)
                )
            else:
                found = measure_products(world, tell=partial(self.beacon.mark, name))
            self.results.devices[name] = found
            self._save(world, kept, spec)
            self._tell(world, f"benchmark_{name}", **found)

    def _open(self) -> Samples:
        return open_samples(
            self.run, cache=self.environment.cache, kept=self.environment.checkpoints
        )[0]

    def _tell_peak(self, world: World) -> None:
        """What the device multiplies at most; the planner takes it for the pool's devices."""
        assert self.recorder is not None
        world.barrier()
        precision = self.run.plan.precision
        peak = device_peak(world.device, precision)
        if peak.measured:
            told = {"tflops": peak.flops / 1e12, "source": peak.source, "precision": precision}
            self.recorder.event("peak_measured", device=peak.device, **told)

    def _point(self, tokens: int, values: Mapping[str, float]) -> None:
        assert self.recorder is not None
        self.steps += 1
        self.tokens += self.run.tokens_per_step
        shown = {
            name: values[name]
            for name in ("loss", "step_time_s", "tokens_per_s", "mfu")
            if name in values
        }
        self.recorder.point(step=self.steps, tokens=self.tokens, values=shown)

    def _tell(self, world: World, type_: str, **data: Any) -> None:
        assert self.recorder is not None
        if world.rank == 0:
            self.recorder.event(type_, **data)

    def _save(self, world: World, path: Path, spec: dict[str, Any]) -> None:
        if world.rank == 0:
            self.results.save(path, spec)

    def _finished(self, world: World) -> Outcome:
        body = self.benchmark.body
        variants = self.benchmark.expansion.variants
        rows = [row(each, self.results, seq_len=body.seq_len) for each in variants]
        if world.rank == 0:
            told = {
                **self.benchmark.describe(),
                "time": time.time(),
                "torch": torch.__version__,
                "device": str(world.device),
                "rows": rows,
                "measured_devices": self.results.devices,
                "losses": {name: done[0]["losses"] for name, done in self.results.turns.items()},
            }
            write_atomically(self.environment.directory / FILE, json.dumps(told, indent=1))
        failed = len(self.results.failed)
        more = f", {failed} could not be" if failed else ""
        return Outcome("ok", f"{len(rows) - failed} variants measured{more}", self.steps)
