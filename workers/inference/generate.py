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

import torch

from workers.contracts.exits import Outcome, UserError
from workers.contracts.model import ModelSource, ModelSpec
from workers.inference.accept import GenerateRun
from workers.inference.answers import Answers, fingerprint
from workers.inference.blocks import BlockPool
from workers.inference.cache import PagedCache, block_bytes
from workers.inference.engine import Engine, check_prompt
from workers.inference.measure import Measure
from workers.inference.prompts import Line, read_lines
from workers.inference.request import Request
from workers.inference.runner import Runner
from workers.inference.sampling import Sampling
from workers.inference.scheduler import Limits, Scheduler
from workers.inference.stops import until_stop
from workers.inference.words import Words, open_words
from workers.metrics.memory import capacity_bytes, process_memory
from workers.metrics.recorder import Recorder, last_attempt
from workers.models.decoder import Decoder
from workers.models.initialise import derived_seed, initialise
from workers.models.places import place_of
from workers.models.source import open_weights
from workers.models.weights import fill_model

BLOCK_SIZE = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CACHE_SHARE = {"cpu": 0.4, "cuda": 0.85}  # of the memory that the weights leave


class Generation:
    """`go` answers what is not answered yet. Raises UserError, ArithmeticError, OSError."""

    def __init__(self, run: GenerateRun, directory: Path, recorder: Recorder) -> None:
        self.run, self.recorder = run, recorder
        self.lines = read_lines(Path(run.body.input))
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = DTYPES[run.plan.precision]
        self.asked_to_leave = False
        self.answered = 0

    def go(self) -> Outcome:
        words, ends, decoder = self._model()
        prompts = self._prompts(words, ends, decoder.spec)
        body = self.run.body
        told = self.run.spec.to_dict()
        decisive = {name: value for name, value in told["generate"].items() if name not in ("input", "output")}
        given = [[line.id, tokens, asdict(asked)] for line, (tokens, asked) in zip(self.lines, prompts, strict=True)]
        made_by = fingerprint(decisive, told["model"], self.run.plan.precision, given)
        answers = Answers(Path(body.output), [line.id for line in self.lines], made_by=made_by)
        self.answered = began = answers.done
        try:
            if began < len(self.lines):
                self._answer(decoder, words, prompts, answers)
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

    def _model(self) -> tuple[Words | None, tuple[int, ...], Decoder]:
        """On the device, in the run's precision; a shape without weights gets random ones."""
        model = self.run.spec.model
        try:
            path = place_of(model) if isinstance(model, ModelSource) else None
            words, ends = (None, ()) if path is None else open_words(path)
            weights = None if path is None else open_weights(path)
            spec = self.run.spec.shape if weights is None else weights.spec
            assert spec is not None
            with torch.device("meta"):
                decoder = Decoder(spec)
            for parameter in decoder.parameters():  # buffers stay fp32: a rounded balancing bias flips choices
                parameter.data = parameter.data.to(self.dtype)
            decoder = decoder.to_empty(device=self.device).requires_grad_(False)
            if weights is None:
                initialise(decoder, layers=spec.layers, seed=self.run.body.seed)
                print(f"model {spec.name} names no weights: random ones are used, and ids alone are known", flush=True)
            else:
                fill_model(decoder, weights)
        except (ValueError, OSError) as error:
            raise UserError(f"model: {error}") from None
        return words, ends, decoder

    def _prompts(self, words: Words | None, ends: tuple[int, ...], spec: ModelSpec) -> list[tuple[list[int], Sampling]]:
        body = self.run.body
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

    def _answer(
        self, decoder: Decoder, words: Words | None, prompts: list[tuple[list[int], Sampling]], answers: Answers
    ) -> None:
        limits = Limits()
        engine = self._engine(decoder, words, prompts[answers.done :], limits)
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
                    answers.give(place, answer_of(self.lines[place], request, words))
                    measure.ended(request)
            self.answered = answers.done
            measure.stepped()
        measure.close()

    def _engine(
        self, decoder: Decoder, words: Words | None, prompts: list[tuple[list[int], Sampling]], limits: Limits
    ) -> Engine:
        """With as many blocks as the largest requests that may run together want, or as memory has."""
        spec = decoder.spec
        wants = sorted(
            -(-min(len(tokens) + asked.max_new_tokens, spec.max_seq_len) // BLOCK_SIZE) for tokens, asked in prompts
        )
        each_bytes = block_bytes(spec, block_size=BLOCK_SIZE, dtype=self.dtype)
        free_bytes = capacity_bytes(self.device, local_world_size=1) - process_memory(self.device)[0]
        fits = int(free_bytes * CACHE_SHARE[self.device.type]) // each_bytes
        if wants[-1] > fits:
            says = f"its cache of {wants[-1] * each_bytes:,} bytes does not fit beside the weights"
            raise UserError(f"generate: the longest request wants {wants[-1]} blocks, {says}; try fewer max_new_tokens")
        # a few more, so that the watermark does not keep the last of them waiting
        blocks = min(fits, int(sum(wants[-limits.sequences :]) * (1 + 2 * limits.watermark)) + 2)
        cache = PagedCache(spec, blocks=blocks, block_size=BLOCK_SIZE, dtype=self.dtype, device=self.device)
        scheduler = Scheduler(BlockPool(blocks, BLOCK_SIZE), limits)
        try:
            runner = Runner(decoder, cache)
        except ValueError as error:
            raise UserError(f"model: {error}") from None
        return Engine(runner, scheduler, context=spec.max_seq_len, decode=None if words is None else words.decode)


def answer_of(line: Line, request: Request, words: Words | None) -> dict[str, Any]:
    """`{id, text, token_ids, finish_reason, logprobs?}`: text before a stop string, ids with it or the end token."""
    ids = list(request.new_tokens)
    text = None if words is None else until_stop(words.decode(ids), request.sampling.stop)
    told = {"id": line.id, "text": text, "token_ids": ids, "finish_reason": request.finish}
    return {**told, "logprobs": request.logprobs} if request.sampling.logprobs else told


def run_generate(run: GenerateRun, directory: Path, *, env: Mapping[str, str] = os.environ) -> Outcome:
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
