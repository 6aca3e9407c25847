"""Runs of kind produce: candidates from a server, filters, JSON lines with provenance.

Units are made concurrently and decided in their order. Does not depend on torch.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.contracts.specs.finetuning.produce import FilterSpec, ProduceBody
from workers.inference.control import StopControl
from workers.metrics.recorder import Recorder, last_attempt
from workers.posttraining.produce.client import ChatClient, ServerLost
from workers.posttraining.produce.filters import Filters, Verdict
from workers.posttraining.produce.generation import GeneratedCandidates, Generator, Unit, provenance
from workers.posttraining.produce.output import OutputFiles
from workers.posttraining.produce.progress import Progress
from workers.posttraining.produce.scores import Candidate, Scorer, best_and_worst
from workers.posttraining.produce.seeds import read_seeds
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import Outcome, UserError

_UNITS_PER_LINE, _LEAST_UNITS = 20, 200  # before a run gives up
# settings that may change between attempts: they do not change what a unit is
_NOT_IN_FINGERPRINT: Any = {
    "count": True,
    "output": True,
    "concurrency": True,
    "server": {"usd_per_million_prompt_tokens", "usd_per_million_completion_tokens"},
    "judge": {"usd_per_million_prompt_tokens", "usd_per_million_completion_tokens"},
}


@dataclass(slots=True)
class _Result:
    """A unit's candidates with what the filters say about each, and the scores of best_of_n."""

    made: GeneratedCandidates
    verdicts: list[Verdict]
    scores: list[float | None]


class Producer:
    """`run` writes accepted lines until there are `count`, or all seed prompts are answered.

    On a stop request it finishes the requests in progress; written lines stay. Raises UserError
    and ServerLost.
    """

    def __init__(
        self,
        body: ProduceBody,
        client: ChatClient,
        judge: ChatClient,
        recorder: Recorder,
        control: StopControl,
    ) -> None:
        """`judge` may be `client`."""
        self.body, self.client, self.control = body, client, control
        seeds = (
            read_seeds(Path(body.seeds), needs_answer=body.needs_answers)
            if body.seeds is not None
            else []
        )
        self.generator = Generator(body, client, seeds)
        self.scorer = Scorer(judge)
        self.filters = Filters(
            body.filters,
            score=self._filter_score,
            compare_prompts=not self.generator.answers_seeds,
        )
        self.recorder = recorder
        clients = [client] if judge is client else [client, judge]
        self.progress = Progress(recorder, clients)

    def run(self, output: Path) -> Outcome:
        """Produce the remaining lines into `output`."""
        body = self.body
        settings = body.model_dump(mode="json", exclude=_NOT_IN_FINGERPRINT, exclude_defaults=True)
        text = json.dumps(settings, sort_keys=True)
        fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        files = OutputFiles(output, fingerprint=fingerprint, existing=self._known)
        existing = files.accepted
        self.progress.restore(files, output)
        try:
            self._produce(files)
        finally:
            files.close()
            self.progress.write(files)
        self.recorder.event(
            "produced",
            accepted=files.accepted,
            existing=existing,
            rejected=dict(files.reasons),
            output=str(output),
        )
        if self.control.action is not None and files.accepted < body.count:
            return Outcome(
                "preempted", f"stopped on request after {files.accepted} lines", files.accepted
            )
        listed = ", ".join(f"{name} {count}" for name, count in files.reasons.items()) or "none"
        short = "" if files.accepted >= body.count else f" of {body.count}: the seeds are used up"
        return Outcome("ok", f"{files.accepted} lines{short}; rejected: {listed}", files.accepted)

    def _known(self, line: dict[str, Any]) -> None:
        """An accepted line of an earlier attempt."""
        unit = int(line["provenance"]["unit"])
        candidate = Candidate(tuple(_messages_of(line)))
        self.filters.add(candidate, f"unit {unit}")
        self.generator.accepted(unit, candidate.prompt)

    def _produce(self, files: OutputFiles) -> None:
        units = (unit for unit in self.generator.units() if unit.number not in files.done)
        flight: deque[tuple[Unit, Future[_Result]]] = deque()
        with ThreadPoolExecutor(self.body.concurrency) as pool:
            try:
                while True:
                    self._submit(files, units, flight, pool)
                    if not flight:
                        return
                    unit, future = flight.popleft()
                    self._decide(files, unit, future.result())
                    self.progress.step(files)
                    self._refuse_hopeless(files)
            finally:
                for _, future in flight:  # after an error: those that wait are not started
                    future.cancel()

    def _submit(
        self,
        files: OutputFiles,
        units: Iterator[Unit],
        flight: deque[tuple[Unit, Future[_Result]]],
        pool: ThreadPoolExecutor,
    ) -> None:
        """Keep requests in progress, no more than lines are missing."""
        if self.control.action is not None:
            waiting = [item for item in flight if not item[1].cancel()]
            flight.clear()
            flight.extend(waiting)
            return
        missing = self.body.count - files.accepted
        # twice as many as run: a slow answer does not stop the others
        while len(flight) < min(2 * self.body.concurrency, missing):
            unit = next(units, None)
            if unit is None:
                return
            flight.append((unit, pool.submit(self._result, unit)))

    def _result(self, unit: Unit) -> _Result:
        """Candidates of a unit with verdicts and scores; runs in a thread."""
        made = self.generator.make(unit)
        verdicts, scores = list[Verdict](), list[float | None]()
        for candidate in made.candidates:
            if made.problem or not all(each["content"] for each in candidate.messages):
                verdicts.append(Verdict(made.problem or "empty"))
                scores.append(None)
                continue
            verdict = self.filters.verdict(candidate)
            score = None
            if self.body.method == "best_of_n" and verdict.rejected_by is None:
                score = self._best_of_n_score(candidate, verdict)
            verdicts.append(verdict)
            scores.append(score)
        return _Result(made, verdicts, scores)

    def _best_of_n_score(self, candidate: Candidate, verdict: Verdict) -> float | None:
        """The score; a candidate without one is rejected."""
        spec = self.body.score
        known = verdict.scores.get(spec.kind) if spec.kind in ("judge", "reward") else None
        score = (
            known
            if known is not None
            else self.scorer.score(
                spec.kind, candidate, pattern=spec.pattern, tolerance=spec.tolerance
            )
        )
        if score is None:
            verdict.rejected_by, verdict.detail = spec.kind, "the judge gave no score"
        return score

    def _filter_score(self, spec: FilterSpec, candidate: Candidate) -> float | None:
        kind: Any = spec.kind
        return self.scorer.score(kind, candidate, pattern=spec.pattern, tolerance=spec.tolerance)

    def _decide(self, files: OutputFiles, unit: Unit, result: _Result) -> None:
        """Write the unit's line: what all filters accept, or why nothing was accepted."""
        made = result.made
        for place, candidate in enumerate(made.candidates):
            if result.verdicts[place].rejected_by is None:
                again = self.filters.repeated(candidate)
                if again.rejected_by is not None:
                    again.scores = {**result.verdicts[place].scores, **again.scores}
                    result.verdicts[place] = again
        self.progress.count(result.verdicts)
        places = [
            place for place, verdict in enumerate(result.verdicts) if verdict.rejected_by is None
        ]
        origin = provenance(unit, self.body, self.client, made)
        if self.body.method == "best_of_n":
            origin["candidates"] = len(made.candidates)
            origin["candidate_scores"] = result.scores
        if not places:
            shown = len(made.candidates) - 1
            self._reject(files, unit, origin, made.candidates[shown], result.verdicts[shown])
            return
        chosen = rejected = places[0]
        if self.body.method == "best_of_n":
            best, worst = best_and_worst([result.scores[place] or 0.0 for place in places])
            chosen, rejected = places[best], places[worst]
            origin["score"] = result.scores[chosen]
            origin["scored_by"] = self.body.score.kind
        origin["scores"] = result.verdicts[chosen].scores
        if self.body.writes == "preference":
            self._write_pair(files, unit, origin, result, chosen, rejected)
            return
        self._accept(
            files,
            unit,
            made.candidates[chosen],
            {"messages": _plain(made.candidates[chosen])},
            origin,
        )

    def _write_pair(
        self,
        files: OutputFiles,
        unit: Unit,
        origin: dict[str, Any],
        result: _Result,
        chosen: int,
        rejected: int,
    ) -> None:
        """The best and the worst answer as a pair; equal scores or texts make none."""
        best, worst = result.made.candidates[chosen], result.made.candidates[rejected]
        high, low = result.scores[chosen] or 0.0, result.scores[rejected] or 0.0
        if high <= low or best.answer == worst.answer:
            detail = f"all accepted answers have the score {high:g}"
            self._reject(files, unit, origin, best, Verdict("tie", detail, origin["scores"]))
            return
        origin["rejected_score"] = low
        line = {
            "prompt": _plain(best)[:-1],
            "chosen": _plain(best)[-1:],
            "rejected": _plain(worst)[-1:],
        }
        self._accept(files, unit, best, line, origin)

    def _accept(
        self,
        files: OutputFiles,
        unit: Unit,
        candidate: Candidate,
        content: dict[str, Any],
        origin: dict[str, Any],
    ) -> None:
        line = {**content, "task_type": unit.task, "provenance": origin}
        files.write(line, accepted=True)
        self.filters.add(candidate, f"unit {unit.number}")
        self.generator.accepted(unit.number, candidate.prompt)

    def _reject(
        self,
        files: OutputFiles,
        unit: Unit,
        origin: dict[str, Any],
        candidate: Candidate,
        verdict: Verdict,
    ) -> None:
        origin |= {
            "rejected_by": verdict.rejected_by,
            "detail": verdict.detail,
            "scores": verdict.scores,
        }
        line = {"messages": _plain(candidate), "task_type": unit.task, "provenance": origin}
        files.write(line, accepted=False)

    def _refuse_hopeless(self, files: OutputFiles) -> None:
        """Raises UserError if filters reject nearly everything."""
        most = max(_LEAST_UNITS, _UNITS_PER_LINE * (files.accepted + 1))
        if len(files.done) >= most:
            listed = ", ".join(f"{name} {count}" for name, count in files.reasons.items())
            raise UserError(
                f"produce.filters: {files.accepted} of {len(files.done)} candidates were "
                f"accepted (rejected by {listed}). Use weaker filters or another model."
            )


def run_produce(body: ProduceBody, around: Environment) -> Outcome:
    """Points and events go to the rank's folder; a relative output to the run's folder.

    If a run's server is lost after it has answered, the outcome is `preempted`: the next attempt
    waits until the run serves again.
    """
    attempt = around.attempt or 1 + last_attempt(around.rank_directory / "events.jsonl")
    recorder = Recorder(around.rank_directory, run=around.run, attempt=attempt, rank=around.rank)
    clients = {
        name: ChatClient(server, field=f"produce.{name}") for name, server in body.servers.items()
    }
    client = clients["server"]
    try:
        with StopControl(around.directory, around.rank_directory) as control:
            producer = Producer(body, client, clients.get("judge", client), recorder, control)
            return producer.run(Path(body.output))
    except ServerLost as error:
        lost = [each for each in clients.values() if each.lost]
        if lost and all(each.server.run is not None and each.answered for each in lost):
            recorder.event("server_lost", message=str(error))
            return Outcome("preempted", f"the server was lost: {error}")
        raise
    finally:
        for each in clients.values():
            each.close()
        recorder.close()


def _plain(candidate: Candidate) -> list[dict[str, str]]:
    return [dict(each) for each in candidate.messages]


def _messages_of(line: Mapping[str, Any]) -> list[dict[str, str]]:
    if "messages" in line:
        return list(line["messages"])
    return [*line["prompt"], *line["chosen"]]
