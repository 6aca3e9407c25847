"""A run of kind evaluate: what is to be judged through the model, a line of results for each, and
the metrics of all.

Goes on after the lines that are there. Knows files and events; how a likelihood or a score comes
about is others'.
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
from workers.inference.evaluate.units import units_of
from workers.inference.generate.answer_file import Answers, fingerprint
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
    """`go` judges what is not judged yet; asked to leave, it finishes the present batch, and what
    is judged stays.

    Raises UserError, NumericsError, OSError.
    """

    def __init__(
        self, run: InferenceRun, folder: Path, recorder: Recorder, beacon: Beacon, control: StopControl
    ) -> None:
        self.run, self.folder, self.recorder, self.beacon, self.control = (
            run,
            folder,
            recorder,
            beacon,
            control,
        )
        self.body = body_of(run)
        self.metrics = read_metrics(self.body.metrics)
        self.items = read_items(self.body.input, self.body.references, run.spec.data, self.metrics)
        self._began = self._told = time.perf_counter()
        self._found = 0

    def go(self, loaded: LoadedModel) -> Outcome:
        body, spec = self.body, self.run.spec
        # signs of life: a window can take a slow device minutes
        mark_layers(loaded.decoder, self.beacon)
        self.window = min(body.window or WINDOW, loaded.spec.max_seq_len)
        self.stride = min(body.stride or self.window // 2, self.window - 1)
        told = spec.to_dict()
        self._made_by = fingerprint(
            {
                name: value
                for name, value in told["evaluate"].items()
                if name not in ("input", "references")
            },
            told["model"],
            self.run.plan.precision,
            [asdict(each) for each in self.items],
        )
        wants = set(self.metrics)
        rows = (
            self._answered(loaded)
            if wants & set(ANSWERS)
            else [{"id": item.id} for item in self.items]
        )
        if rows is not None and wants & {*LIKELIHOOD, *CHOICES}:
            rows = self._judged(loaded, rows)
        if rows is None:
            return Outcome("preempted", f"asked to leave after {self._found} lines", self._found)
        metrics = self._all(rows)
        self._tell(metrics, rows)
        message = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
        return Outcome("ok", f"{message} over {len(rows)} lines", len(rows))

    def _answered(self, loaded: LoadedModel) -> list[dict[str, Any]] | None:
        """A row for each item: its answer, scored. None when asked to leave."""
        asked = [item for item in self.items if item.text is None]
        given: dict[int, str] = {}
        if asked:
            sampling = SamplingParams(
                max_new_tokens=self.body.max_new_tokens,
                temperature=0,
                stop=tuple(self.body.stop),
                stop_token_ids=loaded.stop_token_ids,
            )
            prompts = [(item.id, self._prompt(loaded, item)) for item in asked]
            answers = self._ledger(PREDICTIONS, [item.id for item in asked])
            try:
                done = predict(loaded, prompts, answers, sampling=sampling, goes_on=self._goes_on)
            finally:
                answers.close()
            if not done:
                self._found = answers.done
                return None
            written = [
                json.loads(row)
                for row in (self.folder / PREDICTIONS).read_text("utf-8").splitlines()
            ]
            given = {id(item): row["text"] for item, row in zip(asked, written, strict=True)}
        rows = []
        for item in self.items:
            answer = item.text if item.text is not None else given[id(item)]
            rows.append(
                {
                    "id": item.id,
                    "answer": answer,
                    **score_line(self.metrics, answer, item.references),
                }
            )
        return rows

    def _judged(
        self, loaded: LoadedModel, rows: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """The rows with likelihoods, written to results.jsonl in turn. None when asked to leave."""
        units = units_of(
            loaded,
            self.items,
            rows,
            window=self.window,
            stride=self.stride,
            most=self.body.max_tokens,
        )
        ledger = self._ledger(LINES, [each.row["id"] for each in units])
        through = None if loaded.rank_group is None else distributed_forward(loaded.decoder, loaded.rank_group)
        try:
            place, tokens, counted, lost_nats = ledger.done, 0, 0, 0.0
            while place < len(units) and self.control.action is None:
                some = units[place : place + 1]
                while (
                    place + len(some) < len(units)
                    and sum(each.tokens for each in some) < BATCH_TOKENS
                ):
                    some.append(units[place + len(some)])
                windows = [window for each in some for window in each.windows]
                lost = iter(losses(loaded.decoder, windows, through=through))
                for each in some:
                    judged = each.judged([next(lost) for _ in each.windows])
                    ledger.give(place, {**each.row, **judged})
                    place += 1
                    tokens, counted = tokens + each.tokens, counted + judged["tokens"]
                    lost_nats += judged["nll"]
                self._point(
                    place, tokens, last=place == len(units), loss=lost_nats / max(1, counted)
                )
            self._found = ledger.done
        finally:
            ledger.close()
        if self._found < len(units):
            return None
        return [json.loads(row) for row in (self.folder / LINES).read_text("utf-8").splitlines()]

    def _prompt(self, loaded: LoadedModel, item: Item) -> list[int]:
        assert item.asks is not None
        try:
            if loaded.tokenizer is None:
                raise ValueError(
                    "answers are compared as text, and the model came without a tokenizer"
                )
            ids = item.asks.tokens(loaded.tokenizer)
            check_prompt(ids, context=loaded.spec.max_seq_len, vocab=loaded.spec.vocab)
        except ValueError as error:
            raise UserError(
                f"evaluate.input: {self.body.input} line {item.asks.number}: {error}"
            ) from None
        return ids

    def _all(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """The metrics in the order asked for.

        Raises NumericsError for a loss that is not finite.
        """
        found: dict[str, float] = {}
        if set(self.metrics) & set(ANSWERS):
            answers = [row["answer"] for row in rows]
            found |= score_answers(self.metrics, answers, [item.references for item in self.items])
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
            found |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
            found["bits_per_byte"] = loss * tokens / math.log(2) / max(1, size)
        for name in set(self.metrics) & set(CHOICES):
            key = "right" if name == "accuracy" else "right_norm"
            found[name] = sum(row[key] for row in rows) / len(rows)
        return {name: found[name] for name in self.metrics}

    def _tell(self, metrics: dict[str, float], rows: Sequence[dict[str, Any]]) -> None:
        lines, results = self.folder / LINES, self.folder / RESULTS
        if not set(self.metrics) & {*LIKELIHOOD, *CHOICES}:
            write_atomically(lines, "".join(json.dumps(row) + "\n" for row in rows))
        model, body = self.run.spec.model, self.body
        told = Evaluated(
            metrics=metrics,
            lines=len(rows),
            tokens=sum(row.get("tokens", 0) for row in rows),
            seconds=round(time.perf_counter() - self._began, 3),
            model=name_of(model),
            quantize=body.quantize,
            input=body.input,
            window=self.window,
            stride=self.stride,
        )
        write_atomically(results, json.dumps(told.to_dict(), indent=2) + "\n")
        made = [path for path in (results, lines, self.folder / PREDICTIONS) if path.is_file()]
        files = [
            ArtifactRef(name=path.name, path=str(path), bytes=path.stat().st_size) for path in made
        ]
        self.recorder.event(EVALUATED, **told.model_copy(update={"files": files}).to_dict())

    def _ledger(self, name: str, ids: Sequence[Any]) -> Answers:
        return Answers(self.folder / name, ids, made_by=self._made_by, field="evaluate")

    def _goes_on(self, done: int, tokens: int) -> bool:
        self._point(done, tokens)
        return self.control.action is None

    def _point(self, done: int, tokens: int, *, last: bool = False, **more: float) -> None:
        now = time.perf_counter()
        if last or now - self._told >= _POINT_S:
            self._told = now
            rate = tokens / (now - self._began)
            values = {"inference/answered": float(done), "inference/tokens_per_s": rate, **more}
            self.recorder.point(step=done, tokens=tokens, values=values)


def body_of(run: InferenceRun) -> EvaluateBody:
    assert run.spec.evaluate is not None
    return run.spec.evaluate


def results_folder(directory: Path, *, env: Mapping[str, str] = os.environ) -> Path:
    """The run's own folder where attempts lie below it, so that a later attempt goes on; else the
    directory.
    """
    run = Path(env.get("ORRERY_CHECKPOINTS") or directory / "checkpoints").parent
    return run if directory.absolute().is_relative_to(run.absolute()) else directory


def name_of(model: str | ModelSpec | ModelSource) -> str:
    if isinstance(model, ModelSource):
        return model.package or str(model.path)
    return model if isinstance(model, str) else model.name


def run_evaluate(run: InferenceRun, around: Environment) -> Outcome:
    """Points and events go to the rank's folder, results to the run's. Raises what `Evaluation`
    raises, and
    ConnectionError where another rank of it is gone."""
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
                quantize=body_of(run).quantize,
                rank_group=rank_group,
                plan=run.plan,
            )
            if rank_group is not None and not rank_group.is_driver:
                return Worker(loaded, recorder, beacon).run()
            with driving(rank_group):
                return Evaluation(
                    run, results_folder(around.directory), recorder, beacon, control
                ).go(loaded)
    finally:
        if rank_group is not None:
            rank_group.close()
        beacon.close()
        recorder.close()
