"""Starts a run of kind evaluate: loads its model, and its baseline before, and evaluates them.

Does not depend on metrics.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from workers.inference.control import StopControl
from workers.inference.evaluate.evaluation import (
    BASELINE,
    BaselineResult,
    Evaluation,
    evaluate_body,
)
from workers.inference.model_loading import (
    load_model,
    rank_device,
    with_model_tokenizer,
)
from workers.inference.parallel.groups import driving, join
from workers.inference.parallel.worker import Worker
from workers.inference.spec_loading import InferenceRun
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder, last_attempt
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import Outcome


def results_folder(directory: Path, *, env: Mapping[str, str] = os.environ) -> Path:
    """The run's folder if attempts are below it, so that a later attempt continues; else the
    directory.
    """
    run = Path(env.get("ORRERY_CHECKPOINTS") or directory / "checkpoints").parent
    return run if directory.absolute().is_relative_to(run.absolute()) else directory


def run_evaluate(run: InferenceRun, around: Environment) -> Outcome:
    """Points and events go to the rank's folder, results to the run's.

    Raises what `Evaluation` raises, and ConnectionError if another rank disconnects.
    """
    attempt = around.attempt or 1 + last_attempt(around.rank_directory / "events.jsonl")
    recorder = Recorder(around.rank_directory, run=around.run, attempt=attempt, rank=around.rank)
    beacon = Beacon(around.rank_directory)
    device = rank_device(around)
    rank_group = None
    try:
        with StopControl(around.directory, around.rank_directory) as control:
            rank_group = join(run.plan, around, device)
            folder = results_folder(around.directory)
            before = None
            if evaluate_body(run).baseline is not None:
                scored = _evaluate_baseline(run, folder, recorder, beacon, control, device)
                if isinstance(scored, Outcome):
                    return scored
                before = scored
            loaded = load_model(
                run.spec.model,
                precision=run.plan.precision,
                device=device,
                quantize=evaluate_body(run).quantize,
                rank_group=rank_group,
                plan=run.plan,
            )
            if rank_group is not None and not rank_group.is_driver:
                return Worker(loaded, recorder, beacon).run()
            with driving(rank_group):
                evaluation = Evaluation(run, folder, recorder, beacon, control)
                return evaluation.run(loaded, before=before)
    finally:
        if rank_group is not None:
            rank_group.close()
        beacon.close()
        recorder.close()


def _evaluate_baseline(
    run: InferenceRun,
    folder: Path,
    recorder: Recorder,
    beacon: Beacon,
    control: StopControl,
    device: torch.device,
) -> BaselineResult | Outcome:
    """The baseline's rows, in the folder `baseline`; an Outcome after a stop request.

    A baseline without chat template formats messages as the model does: both answer the same text.
    """
    body = evaluate_body(run)
    assert body.baseline is not None
    spec = run.spec.model_copy(update={"model": body.baseline})
    (folder / BASELINE).mkdir(parents=True, exist_ok=True)
    evaluation = Evaluation(replace(run, spec=spec), folder / BASELINE, recorder, beacon, control)
    loaded = load_model(
        body.baseline,
        precision=run.plan.precision,
        device=device,
        field="evaluate.baseline",
        quantize=body.quantize,
        plan=run.plan,
    )
    loaded = with_model_tokenizer(loaded, run.spec.model)
    rows = evaluation.score(loaded)
    if rows is None:
        return evaluation.stopped()
    evaluation.write_rows(rows)
    return BaselineResult(evaluation.compute_metrics(rows), rows)
