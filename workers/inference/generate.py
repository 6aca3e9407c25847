"""A run of kind generate: weights, prompts and cache put together, and every line answered.

Knows files and metrics; how answers come about is the engine's.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from workers.contracts.exits import Outcome, UserError
from workers.contracts.model import ModelSpec
from workers.inference.accept import InferenceRun
from workers.inference.answers import Answers, fingerprint
from workers.inference.build import blocks_that_fit, blocks_wanted, build
from workers.inference.engine import Engine, check_prompt
from workers.inference.load import Loaded, device_here, load
from workers.inference.measure import Measure
from workers.inference.prompts import Line, read_lines
from workers.inference.request import Request
from workers.inference.sampling import Sampling
from workers.inference.scheduler import Limits
from workers.inference.stops import until_stop
from workers.inference.words import Words
from workers.metrics.recorder import Recorder, last_attempt
from workers.models.initialise import derived_seed


class Generation:
    """`go` answers what is not answered yet. Raises UserError, ArithmeticError, OSError."""

    def __init__(self, run: InferenceRun, directory: Path, recorder: Recorder) -> None:
        self.run, self.recorder = run, recorder
        self.body = run.generate
        self.lines = read_lines(Path(self.body.input))
        self.asked_to_leave = False
        self.answered = 0

    def go(self) -> Outcome:
        loaded = load(self.run.spec.model, precision=self.run.plan.precision, device=device_here(), seed=self.body.seed)
        prompts = self._prompts(loaded.words, loaded.ends, loaded.spec)
        body = self.body
        told = self.run.spec.to_dict()
        decisive = {name: value for name, value in told["generate"].items() if name not in ("input", "output")}
        given = [[line.id, tokens, asdict(asked)] for line, (tokens, asked) in zip(self.lines, prompts, strict=True)]
        made_by = fingerprint(decisive, told["model"], self.run.plan.precision, given)
        answers = Answers(Path(body.output), [line.id for line in self.lines], made_by=made_by)
        self.answered = began = answers.done
        try:
            if began < len(self.lines):
                self._answer(loaded, prompts, answers)
        finally:
            answers.close()
        self.recorder.event("generated", answers=self.answered, found=began, output=body.output)
        if self.answered < len(self.lines):
            reason = f"asked to leave after {self.answered} of {len(self.lines)} answers"
            return Outcome("preempted", reason, self.answered)
        return Outcome("ok", f"answered {len(self.lines)} lines, {began} of them before", self.answered)

    def leave(self, number: int, frame: FrameType | None) -> None:
        """A signal handler: the present step is finished, and what is answered stays."""
        self.asked_to_leave = True

    def _prompts(self, words: Words | None, ends: tuple[int, ...], spec: ModelSpec) -> list[tuple[list[int], Sampling]]:
        body = self.body
        try:
            defaults = Sampling(
                max_new_tokens=body.max_new_tokens, temperature=body.temperature, top_k=body.top_k, top_p=body.top_p,
                stop=tuple(body.stop), ends=ends, ignore_eos=body.ignore_eos,
            )  # fmt: skip
        except ValueError as error:
            raise UserError(f"generate: {error}") from None
        found = []
        for line in self.lines:
            try:
                tokens, asked = line.tokens(words), line.sampling(defaults)
                check_prompt(tokens, context=spec.max_seq_len, vocab=spec.vocab)
                if asked.stop and words is None:
                    raise ValueError("stop is text, and the model came without a tokenizer; leave it out")
            except ValueError as error:
                raise UserError(f"generate.input: {body.input} line {line.number}: {error}") from None
            # from the run's seed and the line's place alone: the same answer whatever was answered before
            seed = asked.seed if "seed" in line.own else derived_seed(body.seed, "line", line.number)
            found.append((tokens, Sampling(**{**asdict(asked), "seed": seed})))
        return found

    def _answer(self, loaded: Loaded, prompts: list[tuple[list[int], Sampling]], answers: Answers) -> None:
        limits = Limits()
        engine = self._engine(loaded, prompts[answers.done :], limits)
        measure = Measure(engine, self.recorder)
        todo = iter(range(answers.done, len(prompts)))
        places: dict[Request, int] = {}
        more = True
        while (more or engine.busy) and not self.asked_to_leave:
            while more and len(engine.scheduler.waiting) < limits.sequences:
                place = next(todo, None)
                more = place is not None
                if place is not None:
                    places[engine.add(*prompts[place])] = place
            for request in engine.step():
                if request.finish is not None:
                    place = places.pop(request)
                    answers.give(place, answer_of(self.lines[place], request, loaded.words))
                    measure.ended(request)
            self.answered = answers.done
            measure.stepped()
        measure.close()

    def _engine(self, loaded: Loaded, prompts: list[tuple[list[int], Sampling]], limits: Limits) -> Engine:
        """With as many blocks as the largest requests that may run together want, or as memory has."""
        wants = sorted(blocks_wanted(loaded, len(tokens) + asked.max_new_tokens) for tokens, asked in prompts)
        fits, each_bytes = blocks_that_fit(loaded)
        if wants[-1] > fits:
            says = f"its cache of {wants[-1] * each_bytes:,} bytes does not fit beside the weights"
            raise UserError(f"generate: the longest request wants {wants[-1]} blocks, {says}; try fewer max_new_tokens")
        # a few more, so that the watermark does not keep the last of them waiting
        blocks = min(fits, int(sum(wants[-limits.sequences :]) * (1 + 2 * limits.watermark)) + 2)
        return build(loaded, blocks=blocks, limits=limits)


def answer_of(line: Line, request: Request, words: Words | None) -> dict[str, Any]:
    """`{id, text, token_ids, finish_reason, logprobs?}`: text before a stop string, ids with it or the end token."""
    ids = list(request.new_tokens)
    text = None if words is None else until_stop(words.decode(ids), request.sampling.stop)
    told = {"id": line.id, "text": text, "token_ids": ids, "finish_reason": request.finish}
    return {**told, "logprobs": request.logprobs} if request.sampling.logprobs else told


def run_generate(run: InferenceRun, directory: Path, *, env: Mapping[str, str] = os.environ) -> Outcome:
    """Points and events go to `directory/rank-0`. Raises what `Generation` raises."""
    folder = directory / "rank-0"
    attempt = int(env.get("ORRERY_ATTEMPT") or 1 + last_attempt(folder / "events.jsonl"))
    recorder = Recorder(folder, run=env.get("ORRERY_RUN", "local"), attempt=attempt, rank=0)
    try:
        generation = Generation(run, directory, recorder)
        before = {number: signal.signal(number, generation.leave) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return generation.go()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    finally:
        recorder.close()
