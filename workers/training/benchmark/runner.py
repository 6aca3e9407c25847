"""Runs a benchmark: the devices first, then repeats of every variant in alternating order.

All in one set of processes, so that repeats alternate within seconds and a slow period of the
machine affects all variants.
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

from workers.contracts.specs.benchmarks.techniques import repeat_count, steps_per_repeat
from workers.contracts.specs.benchmarks.variants import Variant
from workers.metrics.beacon import Beacon
from workers.metrics.peak import device_peak
from workers.metrics.recorder import Recorder
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import Outcome, classify, write_atomically
from workers.training.benchmark.accept import BenchmarkRun
from workers.training.benchmark.collectives import measure_collectives
from workers.training.benchmark.matmul import measure_products
from workers.training.benchmark.repeat import Repeat, Requests, free_memory
from workers.training.benchmark.results import Results, load_earlier, merge_ranks, row
from workers.training.data.run_samples import open_samples
from workers.training.data.samples import Samples
from workers.training.loop.rank_sync import broadcast_decision, run_on_leaders
from workers.training.parallel.mesh import World, start_world
from workers.training.setup.attempt import Attempt, finish_attempt

# for the other ranks at the end of a repeat; after that, one hangs in a collective
_TIMEOUT_S = 120.0
FILE = "benchmark.json"


def run_benchmark(run: BenchmarkRun, environment: Environment) -> Outcome:
    """Measure everything into `DIR/benchmark.json` and events `benchmark_result`; never raises."""
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
        self.result_group: dist.ProcessGroup | None = None
        self.steps = self.tokens = 0

    def execute(self) -> Outcome:
        """Run the benchmark."""
        environment, body = self.environment, self.benchmark.body
        environment.rank_directory.mkdir(parents=True, exist_ok=True)
        (environment.rank_directory / "exit.json").unlink(missing_ok=True)
        # one stage per rank: which ranks may arrive late differs between variants
        self.beacon = Beacon(environment.rank_directory, stages=environment.world_size)
        world = self._world(self.benchmark.expansion.variants[0])
        self.control.listen(too_late=self._leave_at_once)
        if world.size > 1:
            timeout = timedelta(seconds=min(environment.timeout_s, _TIMEOUT_S))
            self.result_group = dist.new_group(
                backend="gloo", timeout=timeout, group_desc="benchmark"
            )
        path = environment.cache / FILE
        spec = self.benchmark.spec.to_dict()
        (number, _), self.results = broadcast_decision(
            world, lambda: (self._decide_start(), load_earlier(path, spec)), leads=world.rank == 0
        )
        self.recorder = Recorder(
            environment.rank_directory, run=environment.run, attempt=number, rank=world.rank
        )
        run_on_leaders(world, self._read_samples, leads=environment.leads_node)
        samples = self._read_samples()
        self._record_peak(world)
        self._record_event(world, "benchmark_began", **self.benchmark.describe())
        self.steps = sum(len(done) for done in self.results.repeats.values()) * steps_per_repeat(
            body
        )
        self._measure_devices(world, path, spec)
        for number, last, variant in self._order():
            if (
                variant.id in self.results.failed
                or len(self.results.repeats.get(variant.id, [])) > number
            ):
                continue
            self.results.in_progress = variant.id
            self._save(world, path, spec)
            received = self._repeat(
                variant, samples, f"repeat {number + 1} of {repeat_count(body)}"
            )
            self.results.in_progress = None
            self._save(world, path, spec)
            if received is not None:
                kind = "cancelled" if received == "stop" else "preempted"
                return Outcome(kind, f"{received} was requested during {variant.id}", self.steps)
            if last or variant.id in self.results.failed:
                self._record_event(
                    world, "benchmark_result", **row(variant, self.results, seq_len=body.seq_len)
                )
        return self._finished(world)

    def _order(self) -> Iterator[tuple[int, bool, Variant]]:
        """`(repeat, whether it is the last, variant)`; odd repeats in reverse, which cancels a
        steady drift.

        The base is always first: losses are compared with it.
        """
        variants, count = self.benchmark.expansion.variants, repeat_count(self.benchmark.body)
        for number in range(count):
            for variant in variants if number % 2 == 0 else reversed(variants):
                yield number, number == count - 1, variant

    def _repeat(self, variant: Variant, samples: Samples, where: str) -> str | None:
        """Train a variant once on all ranks; returns the request to stop, if any.

        Failures become the variant's row.
        """
        assert self.beacon is not None
        print(f"{variant.id}, {where}", flush=True)
        result: dict[str, Any] = {}
        repeat = None
        try:
            world = self._world(variant)
            run = self.benchmark.training_run(variant)
            repeat = Repeat(
                run,
                self.environment,
                control=self.requests,
                beacon=self.beacon,
                on_point=self._point,
            )
            self.loop = None
            outcome = repeat.train(world, samples)
            if outcome.exit_class == "ok":
                result["numbers"] = repeat.measurements(
                    warmup_steps=self.benchmark.body.warmup_steps
                )
        except Exception as error:  # the other variants are still measured
            failure = classify(error, 0)
            result["failed"] = (
                f"out of memory: {failure.reason}"
                if failure.exit_class == "out_of_memory"
                else failure.reason
            )
            traceback.print_exception(error)
        finally:
            if repeat is not None:
                repeat.release_model()
            free_memory()
        result["received"] = self.requests.received
        results_of_ranks = self._gather_ranks(result)
        failures = [
            f"{each['failed']} (rank {rank})"
            for rank, each in enumerate(results_of_ranks)
            if "failed" in each
        ]
        received = next(
            (each["received"] for each in results_of_ranks if each["received"] is not None), None
        )
        if failures:
            self.results.failed[variant.id] = failures[0]
        elif all("numbers" in each for each in results_of_ranks):
            self.results.repeats.setdefault(variant.id, []).append(
                merge_ranks([each["numbers"] for each in results_of_ranks])
            )
        return received

    def _gather_ranks(self, result: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's `result`. Raises if a rank hangs in a collective that another one left."""
        if self.result_group is None:
            return [result]
        results_of_ranks: list[Any] = [None] * self.environment.world_size
        dist.all_gather_object(results_of_ranks, result, group=self.result_group)
        return results_of_ranks

    def _world(self, variant: Variant) -> World:
        """The variant's mesh, shared by variants of one shape: process groups are not freed."""
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

    def _measure_devices(self, world: World, path: Path, spec: dict[str, Any]) -> None:
        assert self.beacon is not None
        for name in self.benchmark.expansion.devices:
            if name in self.results.devices:
                continue
            self.beacon.mark(name)
            print(f"measuring {name}", flush=True)
            if name == "collectives":
                local = self.environment.local_world_size
                measured = measure_collectives(
                    world, local_world_size=local, mark_progress=partial(self.beacon.mark, name)
                )
            else:
                measured = measure_products(world, mark_progress=partial(self.beacon.mark, name))
            self.results.devices[name] = measured
            self._save(world, path, spec)
            self._record_event(world, f"benchmark_{name}", **measured)

    def _read_samples(self) -> Samples:
        return open_samples(
            self.run, cache=self.environment.cache, checkpoints=self.environment.checkpoints
        )[0]

    def _record_peak(self, world: World) -> None:
        """Record the device's measured peak; the planner uses it for the pool's devices."""
        assert self.recorder is not None
        world.barrier()
        precision = self.run.plan.precision
        peak = device_peak(world.device, precision)
        if peak.measured:
            data = {"tflops": peak.flops / 1e12, "source": peak.source, "precision": precision}
            self.recorder.event("peak_measured", device=peak.device, **data)

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

    def _record_event(self, world: World, type_: str, **data: Any) -> None:
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
            document = {
                **self.benchmark.describe(),
                "time": time.time(),
                "torch": torch.__version__,
                "device": str(world.device),
                "rows": rows,
                "measured_devices": self.results.devices,
                "losses": {name: done[0]["losses"] for name, done in self.results.repeats.items()},
            }
            write_atomically(self.environment.directory / FILE, json.dumps(document, indent=1))
        failed = len(self.results.failed)
        more = f", {failed} failed" if failed else ""
        return Outcome("ok", f"{len(rows) - failed} variants measured{more}", self.steps)
