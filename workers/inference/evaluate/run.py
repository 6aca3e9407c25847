"""Runs of kind evaluate: a result line per item, then the metrics over all items.

A restarted run continues after the lines already written.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.contracts.specs.run_bodies import EvaluateBody
from workers.contracts.wire.serving_reports import EVALUATED, ArtifactRef, Evaluated
from workers.inference.control import StopControl
from workers.inference.engine import check_prompt
from workers.inference.evaluate.likelihood import BATCH_TOKENS, losses
from workers.inference.evaluate.lines import Item, read_items
from workers.inference.evaluate.metrics import ANSWERS, CHOICES, LIKELIHOOD, read_metrics
from workers.inference.evaluate.predict import predict
from workers.inference.evaluate.scores import score_answers, score_line
from workers.inference.evaluate.units import build_units
from workers.inference.generate.answer_file import AnswerFile, compute_fingerprint
from workers.inference.liveness import mark_layers
from workers.inference.model_loading import LoadedModel, load_model, rank_device
from workers.inference.parallel.driver import distributed_forward
from workers.inference.parallel.groups import driving, join
from workers.inference.parallel.worker import Worker
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.spec_loading import InferenceRun
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder, last_attempt
from workers.runtime.environment import Environment
from workers.runtime.exits import NumericsError, Outcome, UserError, write_atomically

RESULTS, LINES, PREDICTIONS = "results.json", "results.jsonl", "predictions.jsonl"
WINDOW = 1024  # tokens, at most the model's context
_POINT_S = 0.5


class Evaluation:
    """`run` evaluates all items that are not evaluated yet.

    On a stop request it finishes the current batch; written lines stay. Raises UserError,
    NumericsError, OSError.
    """

    def __init__(
        self,
        run: InferenceRun,
        folder: Path,
        recorder: Recorder,
        beacon: Beacon,
        control: StopControl,
    ) -> None:
        self.spec, self.plan, self.folder = run.spec, run.plan, folder
        self.recorder, self.beacon, self.control = recorder, beacon, control
        self.body = evaluate_body(run)
        self.metrics = read_metrics(self.body.metrics)
        self.items = read_items(self.body.input, self.body.references, run.spec.data, self.metrics)
        self._began = self._reported_s = time.perf_counter()
        self._completed = 0

    def run(self, loaded: LoadedModel) -> Outcome:
        """Evaluate the remaining items and write the results."""
        body = self.body
        # heartbeats: a window can take minutes on a slow device
        mark_layers(loaded.decoder, self.beacon)
        self.window = min(body.window or WINDOW, loaded.spec.max_seq_len)
        self.stride = min(body.stride or self.window // 2, self.window - 1)
        spec = self.spec.to_dict()
        self._fingerprint = compute_fingerprint(
            {
                name: value
                for name, value in spec["evaluate"].items()
                if name not in ("input", "references")
            },
            spec["model"],
            self.plan.precision,
            [_fingerprint_data(item) for item in self.items],
        )
        metrics = set(self.metrics)
        rows = (
            self._score_answers(loaded)
            if metrics & set(ANSWERS)
            else [{"id": item.id} for item in self.items]
        )
        if rows is not None and metrics & {*LIKELIHOOD, *CHOICES}:
            rows = self._score_likelihoods(loaded, rows)
        if rows is None:
            reason = f"stopped on request after {self._completed} lines"
            return Outcome("preempted", reason, self._completed)
        results = self._compute_metrics(rows)
        self._write_results(results, rows)
        message = ", ".join(f"{name} {value:.6g}" for name, value in results.items())
        return Outcome("ok", f"{message} over {len(rows)} lines", len(rows))

    def _score_answers(self, loaded: LoadedModel) -> list[dict[str, Any]] | None:
        """A row per item with its scored answer; None after a stop request."""
        unanswered = [item for item in self.items if item.text is None]
        generated: dict[int, str] = {}
        if unanswered:
            sampling = SamplingParams(
                max_new_tokens=self.body.max_new_tokens,
                temperature=0,
                stop=tuple(self.body.stop),
                stop_token_ids=loaded.stop_token_ids,
            )
            prompts = [(item.id, self._tokenize(loaded, item)) for item in unanswered]
            answers = self._open_file(PREDICTIONS, [item.id for item in unanswered])
            try:
                done = predict(
                    loaded, prompts, answers, sampling=sampling, on_progress=self._on_progress
                )
            finally:
                answers.close()
            if not done:
                self._completed = answers.done
                return None
            written = [
                json.loads(row)
                for row in (self.folder / PREDICTIONS).read_text("utf-8").splitlines()
            ]
            generated = {
                id(item): row["text"] for item, row in zip(unanswered, written, strict=True)
            }
        rows = []
        for item in self.items:
            answer = item.text if item.text is not None else generated[id(item)]
            rows.append(
                {
                    "id": item.id,
                    "answer": answer,
                    **score_line(self.metrics, answer, item.references),
                }
            )
        return rows

    def _score_likelihoods(
        self, loaded: LoadedModel, rows: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """The rows with likelihoods, written to results.jsonl; None after a stop request."""
        units = build_units(
            loaded,
            self.items,
            rows,
            window=self.window,
            stride=self.stride,
            max_tokens=self.body.max_tokens,
        )
        file = self._open_file(LINES, [unit.row["id"] for unit in units])
        through = None
        if loaded.rank_group is not None:
            through = distributed_forward(loaded.decoder, loaded.rank_group)
        try:
            index, tokens, scored, nll = file.done, 0, 0, 0.0
            while index < len(units) and self.control.action is None:
                batch = units[index : index + 1]
                while (
                    index + len(batch) < len(units)
                    and sum(unit.tokens for unit in batch) < BATCH_TOKENS
                ):
                    batch.append(units[index + len(batch)])
                windows = [window for unit in batch for window in unit.windows]
                sums = iter(losses(loaded.decoder, windows, through=through))
                for unit in batch:
                    scores = unit.score([next(sums) for _ in unit.windows])
                    file.write(index, {**unit.row, **scores})
                    index += 1
                    tokens, scored = tokens + unit.tokens, scored + scores["tokens"]
                    nll += scores["nll"]
                self._point(index, tokens, last=index == len(units), loss=nll / max(1, scored))
            self._completed = file.done
        finally:
            file.close()
        if self._completed < len(units):
            return None
        return [json.loads(row) for row in (self.folder / LINES).read_text("utf-8").splitlines()]

    def _tokenize(self, loaded: LoadedModel, item: Item) -> list[int]:
        assert item.prompt is not None
        try:
            if loaded.tokenizer is None:
                raise ValueError(
                    "comparing answers as text requires a tokenizer and the model has none"
                )
            ids = item.prompt.tokens(loaded.tokenizer)
            check_prompt(ids, context=loaded.spec.max_seq_len, vocab=loaded.spec.vocab)
        except ValueError as error:
            raise UserError(
                f"evaluate.input: {self.body.input} line {item.prompt.number}: {error}"
            ) from None
        return ids

    def _compute_metrics(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """The metrics in the requested order. Raises NumericsError for a non-finite loss."""
        results: dict[str, float] = {}
        if set(self.metrics) & set(ANSWERS):
            answers = [row["answer"] for row in rows]
            references = [item.references for item in self.items]
            results |= score_answers(self.metrics, answers, references)
        if set(self.metrics) & set(LIKELIHOOD):
            tokens, size = sum(row["tokens"] for row in rows), sum(row["bytes"] for row in rows)
            if not tokens:
                raise UserError(
                    "evaluate.input: no text has two tokens, so none is predicted; give longer ones"
                )
            loss = math.fsum(row["nll"] for row in rows) / tokens
            if not math.isfinite(loss):
                raise NumericsError(
                    f"the loss of {self.body.input or 'the data'} is {loss}; try precision fp32"
                )
            results |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
            results["bits_per_byte"] = loss * tokens / math.log(2) / max(1, size)
        for name in set(self.metrics) & set(CHOICES):
            key = "right" if name == "accuracy" else "right_norm"
            results[name] = sum(row[key] for row in rows) / len(rows)
        return {name: results[name] for name in self.metrics}

    def _write_results(self, metrics: dict[str, float], rows: Sequence[dict[str, Any]]) -> None:
        lines, results = self.folder / LINES, self.folder / RESULTS
        if not set(self.metrics) & {*LIKELIHOOD, *CHOICES}:
            write_atomically(lines, "".join(json.dumps(row) + "\n" for row in rows))
        model, body = self.spec.model, self.body
        evaluated = Evaluated(
            metrics=metrics,
            lines=len(rows),
            tokens=sum(row.get("tokens", 0) for row in rows),
            seconds=round(time.perf_counter() - self._began, 3),
            model=model_name(model),
            quantize=body.quantize,
            input=body.input,
            window=self.window,
            stride=self.stride,
        )
        write_atomically(results, json.dumps(evaluated.to_dict(), indent=2) + "\n")
        paths = [path for path in (results, lines, self.folder / PREDICTIONS) if path.is_file()]
        files = [
            ArtifactRef(name=path.name, path=str(path), bytes=path.stat().st_size) for path in paths
        ]
        self.recorder.event(EVALUATED, **evaluated.model_copy(update={"files": files}).to_dict())

    def _open_file(self, name: str, ids: Sequence[Any]) -> AnswerFile:
        path = self.folder / name
        return AnswerFile(path, ids, fingerprint=self._fingerprint, field="evaluate")

    def _on_progress(self, done: int, tokens: int) -> bool:
        self._point(done, tokens)
        return self.control.action is None

    def _point(self, done: int, tokens: int, *, last: bool = False, **more: float) -> None:
        now = time.perf_counter()
        if last or now - self._reported_s >= _POINT_S:
            self._reported_s = now
            rate = tokens / (now - self._began)
            values = {"inference/answered": float(done), "inference/tokens_per_s": rate, **more}
            self.recorder.point(step=done, tokens=tokens, values=values)


def evaluate_body(run: InferenceRun) -> EvaluateBody:
    """The body of kind evaluate."""
    assert run.spec.evaluate is not None
    return run.spec.evaluate


def _fingerprint_data(item: Item) -> dict[str, Any]:
    """Keys as written by version 0.1, so that its unfinished runs can be continued."""
    data = asdict(item)
    prompt = data.pop("prompt")
    if prompt is not None:
        prompt["given"], prompt["own"] = prompt.pop("value"), prompt.pop("overrides")
    return {**data, "asks": prompt}


def results_folder(directory: Path, *, env: Mapping[str, str] = os.environ) -> Path:
    """The run's folder if attempts are below it, so that a later attempt continues; else the
    directory.
    """
    run = Path(env.get("ORRERY_CHECKPOINTS") or directory / "checkpoints").parent
    return run if directory.absolute().is_relative_to(run.absolute()) else directory


def model_name(model: str | ModelSpec | ModelSource) -> str:
    """The package, path, preset or name of a model."""
    if isinstance(model, ModelSource):
        return model.package or str(model.path)
    return model if isinstance(model, str) else model.name


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
                return Evaluation(
                    run, results_folder(around.directory), recorder, beacon, control
                ).run(loaded)
    finally:
        if rank_group is not None:
            rank_group.close()
        beacon.close()
        recorder.close()
