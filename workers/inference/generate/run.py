"""A run of kind generate: weights, prompts and cache put together, and every line answered.

Knows files and metrics; how answers come about is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workers.contracts.specs.model import ModelSpec
from workers.inference.constrain.guide import Guides
from workers.inference.control import StopControl
from workers.inference.engine import Engine, check_prompt
from workers.inference.engine_builder import (
    blocks_per_request,
    build_engine,
    count_available_blocks,
)
from workers.inference.generate.answer_file import Answers, fingerprint
from workers.inference.generate.prompts import Line, read_lines
from workers.inference.liveness import COMPUTES, mark_engine_layers
from workers.inference.metrics import EngineMetrics
from workers.inference.model_loading import (
    LoadedModel,
    load_model,
    rank_device,
    with_byte_tokenizer,
)
from workers.inference.parallel.groups import driving, join
from workers.inference.parallel.worker import Worker
from workers.inference.request import Request
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.inference.spec_loading import InferenceRun
from workers.inference.speculate.setup import drafting_of
from workers.inference.text.stop_strings import truncate_at_stop
from workers.inference.text.tokenizer import Tokenizer
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder, last_attempt
from workers.models.initialise import derived_seed
from workers.runtime.environment import Environment
from workers.runtime.exits import Outcome, UserError


class Generation:
    """`go` answers what is not answered yet; asked to leave, it finishes the present step, and what
    is answered stays.

    Raises UserError, NumericsError, OSError.
    """

    def __init__(
        self, run: InferenceRun, recorder: Recorder, beacon: Beacon, control: StopControl
    ) -> None:
        self.run, self.recorder, self.beacon, self.control = run, recorder, beacon, control
        self.body = run.generate
        self.lines = read_lines(Path(self.body.input))
        self.answered = 0

    def go(self, loaded: LoadedModel) -> Outcome:
        if any(line.form != "token_ids" for line in self.lines):
            loaded = with_byte_tokenizer(loaded, self.run.spec.model)
        prompts = self._prompts(loaded.tokenizer, loaded.stop_token_ids, loaded.spec)
        body = self.body
        told = self.run.spec.to_dict()
        decisive = {
            name: value
            for name, value in told["generate"].items()
            if name not in ("input", "output")
        }
        given = [
            [line.id, tokens, asked.fingerprint()]
            for line, (tokens, asked) in zip(self.lines, prompts, strict=True)
        ]
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
        return Outcome(
            "ok", f"answered {len(self.lines)} lines, {began} of them before", self.answered
        )

    def _prompts(
        self, words: Tokenizer | None, ends: tuple[int, ...], spec: ModelSpec
    ) -> list[tuple[list[int], SamplingParams]]:
        body = self.body
        try:
            defaults = SamplingParams(
                max_new_tokens=body.max_new_tokens,
                temperature=body.temperature,
                top_k=body.top_k,
                top_p=body.top_p,
                stop=tuple(body.stop),
                stop_token_ids=ends,
                ignore_eos=body.ignore_eos,
            )
        except ValueError as error:
            raise UserError(f"generate: {error}") from None
        guides = Guides(words, ends, vocab=spec.vocab)
        found = []
        for line in self.lines:
            try:
                tokens, asked = line.tokens(words), line.sampling(defaults)
                check_prompt(tokens, context=spec.max_seq_len, vocab=spec.vocab)
                if asked.num_sequences > Limits().sequences:
                    raise ValueError(
                        f"{asked.num_sequences} answers or beams; at most {Limits().sequences} run at "
                        "a time"
                    )
                if asked.constrained:
                    guides.open(asked)
                if asked.stop and words is None:
                    raise ValueError(
                        "stop is text, and the model came without a tokenizer; leave it out"
                    )
            except ValueError as error:
                raise UserError(
                    f"generate.input: {body.input} line {line.number}: {error}"
                ) from None
            # from the run's seed and the line's place alone: the same answer whatever was answered
            # before
            seed = (
                asked.seed if "seed" in line.own else derived_seed(body.seed, "line", line.number)
            )
            found.append((tokens, SamplingParams(**{**asdict(asked), "seed": seed})))
        return found

    def _answer(
        self, loaded: LoadedModel, prompts: list[tuple[list[int], SamplingParams]], answers: Answers
    ) -> None:
        limits = Limits()
        engine = self._engine(loaded, prompts[answers.done :], limits)
        measure = EngineMetrics(
            engine, self.recorder, more=lambda: {"inference/answered": float(answers.done)}
        )
        mark_engine_layers(engine, self.beacon)
        todo = iter(range(answers.done, len(prompts)))
        places: dict[int, int] = {}  # of a request's number in the input
        ended: dict[int, list[Request]] = {}
        more = True
        while (more or engine.busy) and self.control.action is None:
            while more and len(engine.scheduler.waiting) < limits.sequences:
                place = next(todo, None)
                more = place is not None
                if place is not None:
                    places[engine.add(*prompts[place]).number] = place
            self.beacon.mark(COMPUTES, step=engine.counts.steps)
            for request in engine.step():
                if request.finish is not None:
                    measure.request_finished(request)
                    among = ended.setdefault(request.parent, [])
                    among.append(request)
                    if len(among) == request.sampling.n:
                        place = places.pop(request.parent)
                        among.sort(key=lambda each: each.answer)
                        answers.give(
                            place,
                            answer_of(self.lines[place], ended.pop(request.parent), loaded.tokenizer),
                        )
            self.answered = answers.done
            measure.step_finished()
        measure.close()

    def _engine(
        self, loaded: LoadedModel, prompts: list[tuple[list[int], SamplingParams]], limits: Limits
    ) -> Engine:
        """With as many blocks as the largest requests that may run together want, or as memory has."""
        wants = sorted(
            asked.num_sequences * blocks_per_request(loaded, len(tokens) + asked.max_new_tokens)
            for tokens, asked in prompts
        )
        weight = next(loaded.decoder.parameters())
        drafting = drafting_of(
            self.body,
            loaded,
            kind="generate",
            precision=self.run.plan.precision,
            device=weight.device,
            seed=self.body.seed,
        )
        fits, each_bytes = count_available_blocks(loaded, drafting)
        if wants[-1] > fits:
            message = (
                f"its cache of {wants[-1] * each_bytes:,} bytes does not fit beside the weights"
            )
            raise UserError(
                f"generate: the longest request wants {wants[-1]} blocks, {message}; try fewer "
                "max_new_tokens"
            )
        # a few more, so that the watermark does not keep the last of them waiting
        blocks = min(fits, int(sum(wants[-limits.sequences :]) * (1 + 2 * limits.watermark)) + 2)
        return build_engine(loaded, blocks=blocks, limits=limits, drafting=drafting)


def answer_of(line: Line, requests: Sequence[Request], words: Tokenizer | None) -> dict[str, Any]:
    """`{id, text, token_ids, finish_reason, logprobs?, top_logprobs?, answers?}`: text before a
    stop string, ids with
    it or the end token. Of `n` answers the first stands there, and all of them, likewise, in
    `answers`.
    """
    told = [_told(each, words) for each in requests]
    return {"id": line.id, **told[0], **({"answers": told} if len(told) > 1 else {})}


def _told(request: Request, words: Tokenizer | None) -> dict[str, Any]:
    ids = list(request.output_tokens)
    text = None if words is None else truncate_at_stop(words.decode(ids), request.sampling.stop)
    told: dict[str, Any] = {"text": text, "token_ids": ids, "finish_reason": request.finish}
    if request.sampling.wants_logprobs:
        told["logprobs"] = request.logprobs
    if request.sampling.top_logprobs:
        told["top_logprobs"] = request.top_logprobs
    return told


def run_generate(run: InferenceRun, around: Environment) -> Outcome:
    """Points and events go to the rank's folder. Raises what `Generation` raises, and
    ConnectionError where another
    rank of it is gone."""
    attempt = around.attempt or 1 + last_attempt(around.rank_directory / "events.jsonl")
    recorder = Recorder(around.rank_directory, run=around.run, attempt=attempt, rank=around.rank)
    beacon = Beacon(around.rank_directory)
    device = rank_device(around)
    rank_group = None
    try:
        # rank 0's to answer: the others end when it does
        with StopControl(around.directory, around.rank_directory) as control:
            rank_group = join(run.plan, around, device)
            body = run.generate
            loaded = load_model(
                run.spec.model,
                precision=run.plan.precision,
                device=device,
                seed=body.seed,
                quantize=body.quantize,
                rank_group=rank_group,
                plan=run.plan,
            ).with_cache_dtype(body.kv_cache_dtype)
            if rank_group is not None and not rank_group.is_driver:
                return Worker(loaded, recorder, beacon).run()
            with driving(rank_group):
                return Generation(run, recorder, beacon, control).go(loaded)
    finally:
        if rank_group is not None:
            rank_group.close()
        beacon.close()
        recorder.close()
