"""Runs of kind evaluate: a result line per item, then the metrics over all items.

A restarted run continues after the lines already written.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workers.contracts.specs.inference import EvaluateBody
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.contracts.wire.serving_reports import EVALUATED, ArtifactRef, Evaluated, Wins
from workers.inference.control import StopControl
from workers.inference.evaluate.compare import compare, intervals, win_rate
from workers.inference.evaluate.items import EvaluationItem
from workers.inference.evaluate.judge import open_judge
from workers.inference.evaluate.likelihood import BATCH_TOKENS, losses
from workers.inference.evaluate.lines import read_items
from workers.inference.evaluate.metrics import ANSWERS, CHOICES, LIKELIHOOD, read_metrics
from workers.inference.evaluate.predict import predict
from workers.inference.evaluate.scores import score_answers, score_line
from workers.inference.evaluate.units import build_units
from workers.inference.generate.answer_file import AnswerFile, compute_fingerprint
from workers.inference.liveness import mark_layers
from workers.inference.model_loading import (
    LoadedModel,
)
from workers.inference.parallel.driver import distributed_forward
from workers.inference.request import check_prompt
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.spec_loading import InferenceRun
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder
from workers.runtime.exit_codes import NumericsError, Outcome, UserError, write_atomically

RESULTS, LINES, PREDICTIONS = "results.json", "results.jsonl", "predictions.jsonl"
JUDGED, BASELINE = "judged.jsonl", "baseline"
WINDOW = 1024  # tokens, at most the model's context
_POINT_S = 0.5
_SHOWN_PROMPT = 20_000  # characters in results.jsonl
_JUDGED_TOGETHER = 32


@dataclass(frozen=True, slots=True)
class BaselineResult:
    """The baseline's metrics and rows."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]]


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
        self._completed = self._earlier = 0

    def run(self, loaded: LoadedModel, *, before: BaselineResult | None = None) -> Outcome:
        """Evaluate the remaining items and write the results, compared with `before`."""
        if before is not None:
            self._earlier = len(before.rows)
        rows = self.score(loaded)
        if rows is None:
            return self.stopped()
        results = self.compute_metrics(rows)
        evaluated = self._describe(results, rows, before)
        if before is not None and self.body.judge is not None:
            judged = self._judge(before.rows, rows)
            evaluated = evaluated.model_copy(update={"judged": judged})
        self._write_results(evaluated, rows)
        message = ", ".join(f"{name} {value:.6g}" for name, value in results.items())
        return Outcome("ok", f"{message} over {len(rows)} lines", len(rows))

    def stopped(self) -> Outcome:
        """The outcome of a stop request."""
        reason = f"stopped on request after {self._completed} lines"
        return Outcome("preempted", reason, self._completed)

    def score(self, loaded: LoadedModel) -> list[dict[str, Any]] | None:
        """A scored row per item; None after a stop request."""
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
        return rows

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
                    **self._prompt_of(item),
                    "answer": answer,
                    **score_line(self.metrics, answer, item.references),
                }
            )
        return rows

    def _prompt_of(self, item: EvaluationItem) -> dict[str, str]:
        """With a baseline, the prompt: people compare both answers to it."""
        if self.body.baseline is None or item.prompt is None:
            return {}
        return {"prompt": prompt_text(item)[:_SHOWN_PROMPT]}

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

    def _tokenize(self, loaded: LoadedModel, item: EvaluationItem) -> list[int]:
        assert item.prompt is not None
        try:
            if loaded.tokenizer is None:
                raise ValueError(
                    "comparing answers as text requires a tokenizer, but the model does not have "
                    "one"
                )
            ids = item.prompt.tokens(loaded.tokenizer)
            check_prompt(ids, context=loaded.spec.max_seq_len, vocab=loaded.spec.vocab)
        except ValueError as error:
            raise UserError(
                f"evaluate.input: {self.body.input} line {item.prompt.number}: {error}"
            ) from None
        return ids

    def compute_metrics(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
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
                    "evaluate.input: no text has two tokens, so no token is predicted; give longer "
                    "texts"
                )
            loss = math.fsum(row["nll"] for row in rows) / tokens
            if not math.isfinite(loss):
                raise NumericsError(
                    f"the loss of {self.body.input or 'the data'} is {loss}. Use precision fp32."
                )
            results |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
            results["bits_per_byte"] = loss * tokens / math.log(2) / max(1, size)
        for name in set(self.metrics) & set(CHOICES):
            key = "right" if name == "accuracy" else "right_norm"
            results[name] = sum(row[key] for row in rows) / len(rows)
        return {name: results[name] for name in self.metrics}

    def _describe(
        self,
        metrics: dict[str, float],
        rows: Sequence[dict[str, Any]],
        before: BaselineResult | None,
    ) -> Evaluated:
        body = self.body
        references = [item.references for item in self.items]
        evaluated = Evaluated(
            metrics=metrics,
            lines=len(rows),
            tokens=sum(row.get("tokens", 0) for row in rows),
            seconds=round(time.perf_counter() - self._began, 3),
            model=model_name(self.spec.model),
            quantize=body.quantize,
            input=body.input,
            window=self.window,
            stride=self.stride,
            intervals=intervals(self.metrics, rows, references),
        )
        if before is None or body.baseline is None:
            return evaluated
        pairs = {name: (before.metrics[name], metrics[name]) for name in self.metrics}
        return evaluated.model_copy(
            update={
                "baseline": model_name(body.baseline),
                "before": before.metrics,
                "before_intervals": intervals(self.metrics, before.rows, references),
                "compared": compare(pairs, before.rows, rows, references),
            }
        )

    def _judge(
        self, before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]
    ) -> Wins | None:
        """The judge's choices, written to judged.jsonl; a restarted run continues after them."""
        assert self.body.judge is not None
        judged_items = [index for index, item in enumerate(self.items) if item.prompt is not None]
        file = self._open_file(JUDGED, [self.items[index].id for index in judged_items])
        judge = open_judge(self.body.judge, self.body.judge_by)
        try:
            while file.done < len(judged_items):
                batch = judged_items[file.done : file.done + _JUDGED_TOGETHER]
                pairs = [
                    (
                        prompt_text(self.items[index]),
                        str(before[index]["answer"]),
                        str(after[index]["answer"]),
                    )
                    for index in batch
                ]
                first = file.done
                for place, outcome in enumerate(judge.choose(pairs)):
                    id = self.items[batch[place]].id
                    file.write(first + place, {"id": id, "outcome": outcome})
        finally:
            judge.close()
            file.close()
        rows = (self.folder / JUDGED).read_text("utf-8").splitlines()
        return win_rate([json.loads(row)["outcome"] for row in rows]) if rows else None

    def _write_results(self, evaluated: Evaluated, rows: Sequence[dict[str, Any]]) -> None:
        lines, results = self.folder / LINES, self.folder / RESULTS
        if not set(self.metrics) & {*LIKELIHOOD, *CHOICES}:
            write_atomically(lines, "".join(json.dumps(row) + "\n" for row in rows))
        write_atomically(results, json.dumps(evaluated.to_dict(), indent=2) + "\n")
        names = (results, lines, self.folder / PREDICTIONS, self.folder / JUDGED)
        before = self.folder / BASELINE
        paths = [path for path in (*names, before / LINES) if path.is_file()]
        files = [
            ArtifactRef(
                name="baseline.jsonl" if path.parent == before else path.name,
                path=str(path),
                bytes=path.stat().st_size,
            )
            for path in paths
        ]
        self.recorder.event(EVALUATED, **evaluated.model_copy(update={"files": files}).to_dict())

    def write_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the rows of a baseline, which has no results of its own."""
        write_atomically(self.folder / LINES, "".join(json.dumps(row) + "\n" for row in rows))

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
            done += self._earlier
            values = {"inference/answered": float(done), "inference/tokens_per_s": rate, **more}
            self.recorder.point(step=done, tokens=tokens, values=values)


def evaluate_body(run: InferenceRun) -> EvaluateBody:
    """The body of kind evaluate."""
    assert run.spec.evaluate is not None
    return run.spec.evaluate


def _fingerprint_data(item: EvaluationItem) -> dict[str, Any]:
    """Keys as written by version 0.1, so that its unfinished runs can be continued."""
    data = asdict(item)
    prompt = data.pop("prompt")
    if prompt is not None:
        prompt["given"], prompt["own"] = prompt.pop("value"), prompt.pop("overrides")
    return {**data, "asks": prompt}


def model_name(model: str | ModelSpec | ModelSource) -> str:
    """The package, path, preset or name of a model."""
    if isinstance(model, ModelSource):
        return model.package or str(model.path)
    return model if isinstance(model, str) else model.name


def prompt_text(item: EvaluationItem) -> str:
    """An item's prompt as a judge reads it."""
    assert item.prompt is not None
    if item.prompt.form == "messages":
        return "\n\n".join(f"{each['role']}: {each['content']}" for each in item.prompt.value)
    return str(item.prompt.value)
