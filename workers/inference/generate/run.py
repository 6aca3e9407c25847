"""Runs of kind generate: loads the model, answers every input line, writes metrics.

Does not depend on how the engine produces answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from workers.contracts.specs.model import ModelSpec
from workers.inference.constrain.guide import Guides
from workers.inference.control import StopControl
from workers.inference.engine import Engine
from workers.inference.engine_builder import (
    blocks_per_request,
    build_engine,
    count_available_blocks,
)
from workers.inference.generate.answer_file import AnswerFile, compute_fingerprint
from workers.inference.generate.prompts import PromptLine, read_prompts
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
from workers.inference.request import Request, check_prompt
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.inference.spec_loading import InferenceRun
from workers.inference.speculate.setup import build_drafting
from workers.inference.text.stop_strings import truncate_at_stop
from workers.inference.text.tokenizer import Tokenizer
from workers.metrics.beacon import Beacon
from workers.metrics.recorder import Recorder, last_attempt
from workers.models.initialize import derived_seed
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import Outcome, UserError


class Generation:
    """`run` answers all lines that are not answered yet.

    On a stop request it finishes the current step; written answers stay. Raises UserError,
    NumericsError, OSError.
    """

    def __init__(
        self, run: InferenceRun, recorder: Recorder, beacon: Beacon, control: StopControl
    ) -> None:
        self.spec, self.plan = run.spec, run.plan
        self.recorder, self.beacon, self.control = recorder, beacon, control
        self.body = run.generate
        self.lines = read_prompts(Path(self.body.input))
        self.answered = 0

    def run(self, loaded: LoadedModel) -> Outcome:
        """Answer the remaining lines."""
        if any(line.form != "token_ids" for line in self.lines):
            loaded = with_byte_tokenizer(loaded, self.spec.model)
        prompts = self._prompts(loaded.tokenizer, loaded.stop_token_ids, loaded.spec)
        body = self.body
        spec = self.spec.to_dict()
        options = {
            name: value
            for name, value in spec["generate"].items()
            if name not in ("input", "output")
        }
        inputs = [
            [line.id, tokens, params.fingerprint()]
            for line, (tokens, params) in zip(self.lines, prompts, strict=True)
        ]
        fingerprint = compute_fingerprint(options, spec["model"], self.plan.precision, inputs)
        ids = [line.id for line in self.lines]
        answers = AnswerFile(Path(body.output), ids, fingerprint=fingerprint)
        self.answered = earlier = answers.done
        try:
            if earlier < len(self.lines):
                self._answer(loaded, prompts, answers)
        finally:
            answers.close()
        self.recorder.event(
            "generated", answers=self.answered, existing=earlier, output=body.output
        )
        if self.answered < len(self.lines):
            reason = f"stopped on request after {self.answered} of {len(self.lines)} answers"
            return Outcome("preempted", reason, self.answered)
        return Outcome(
            "ok", f"answered {len(self.lines)} lines, {earlier} of them before", self.answered
        )

    def _prompts(
        self, tokenizer: Tokenizer | None, stop_token_ids: tuple[int, ...], spec: ModelSpec
    ) -> list[tuple[list[int], SamplingParams]]:
        body = self.body
        try:
            defaults = SamplingParams(
                max_new_tokens=body.max_new_tokens,
                temperature=body.temperature,
                top_k=body.top_k,
                top_p=body.top_p,
                stop=tuple(body.stop),
                stop_token_ids=stop_token_ids,
                ignore_eos=body.ignore_eos,
            )
        except ValueError as error:
            raise UserError(f"generate: {error}") from None
        guides = Guides(tokenizer, stop_token_ids, vocab=spec.vocab)
        prompts = []
        for line in self.lines:
            try:
                tokens, params = line.tokens(tokenizer), line.sampling(defaults)
                check_prompt(tokens, context=spec.max_seq_len, vocab=spec.vocab)
                if params.num_sequences > Limits().sequences:
                    raise ValueError(
                        f"{params.num_sequences} answers or beams; at most {Limits().sequences} "
                        "run at a time"
                    )
                if params.constrained:
                    guides.open(params)
                if params.stop and tokenizer is None:
                    raise ValueError(
                        "stop strings require a tokenizer and the model has none; leave stop out"
                    )
            except ValueError as error:
                raise UserError(
                    f"generate.input: {body.input} line {line.number}: {error}"
                ) from None
            # depends on the run's seed and the line number only: a restarted run gives the same
            # answers
            seed = params.seed
            if "seed" not in line.overrides:
                seed = derived_seed(body.seed, "line", line.number)
            prompts.append((tokens, SamplingParams(**{**asdict(params), "seed": seed})))
        return prompts

    def _answer(
        self,
        loaded: LoadedModel,
        prompts: list[tuple[list[int], SamplingParams]],
        answers: AnswerFile,
    ) -> None:
        limits = Limits()
        engine = self._engine(loaded, prompts[answers.done :], limits)
        metrics = EngineMetrics(
            engine, self.recorder, more=lambda: {"inference/answered": float(answers.done)}
        )
        mark_engine_layers(engine, self.beacon)
        pending = iter(range(answers.done, len(prompts)))
        indices: dict[int, int] = {}  # request number → line index
        finished: dict[int, list[Request]] = {}
        more = True
        while (more or engine.busy) and self.control.action is None:
            while more and len(engine.scheduler.waiting) < limits.sequences:
                index = next(pending, None)
                more = index is not None
                if index is not None:
                    indices[engine.add(*prompts[index]).number] = index
            self.beacon.mark(COMPUTES, step=engine.counts.steps)
            for request in engine.step():
                if request.finish is not None:
                    metrics.request_finished(request)
                    siblings = finished.setdefault(request.parent, [])
                    siblings.append(request)
                    if len(siblings) == request.sampling.n:
                        index = indices.pop(request.parent)
                        siblings.sort(key=lambda sibling: sibling.answer)
                        del finished[request.parent]
                        answer = format_answer(self.lines[index], siblings, loaded.tokenizer)
                        answers.write(index, answer)
            self.answered = answers.done
            metrics.step_finished()
        metrics.close()

    def _engine(
        self, loaded: LoadedModel, prompts: list[tuple[list[int], SamplingParams]], limits: Limits
    ) -> Engine:
        """An engine with blocks for the largest concurrent requests, if memory allows."""
        needed = sorted(
            params.num_sequences * blocks_per_request(loaded, len(tokens) + params.max_new_tokens)
            for tokens, params in prompts
        )
        weight = next(loaded.decoder.parameters())
        drafting = build_drafting(
            self.body,
            loaded,
            kind="generate",
            precision=self.plan.precision,
            device=weight.device,
            seed=self.body.seed,
        )
        available, block_bytes = count_available_blocks(loaded, drafting)
        if needed[-1] > available:
            raise UserError(
                f"generate: the longest request needs {needed[-1]} blocks, its cache of "
                f"{needed[-1] * block_bytes:,} bytes does not fit next to the weights. Use fewer "
                "max_new_tokens."
            )
        # some more, so that the watermark does not delay the last requests
        total = int(sum(needed[-limits.sequences :]) * (1 + 2 * limits.watermark)) + 2
        blocks = min(available, total)
        return build_engine(
            loaded,
            blocks=blocks,
            limits=limits,
            drafting=drafting,
            decode_graphs=self.body.decode_graphs,
        )


def format_answer(
    line: PromptLine, requests: Sequence[Request], tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """`{id, text, token_ids, finish_reason, logprobs?, top_logprobs?, answers?}`.

    `text` ends before a stop string; `token_ids` includes it or the end token. With several answers
    the first is at the top level and all are in `answers`.
    """
    answers = [_format_request(request, tokenizer) for request in requests]
    return {"id": line.id, **answers[0], **({"answers": answers} if len(answers) > 1 else {})}


def _format_request(request: Request, tokenizer: Tokenizer | None) -> dict[str, Any]:
    ids = list(request.output_tokens)
    text = None
    if tokenizer is not None:
        text = truncate_at_stop(tokenizer.decode(ids), request.sampling.stop)
    answer: dict[str, Any] = {"text": text, "token_ids": ids, "finish_reason": request.finish}
    if request.sampling.wants_logprobs:
        answer["logprobs"] = request.logprobs
    if request.sampling.top_logprobs:
        answer["top_logprobs"] = request.top_logprobs
    return answer


def run_generate(run: InferenceRun, around: Environment) -> Outcome:
    """Points and events go to the rank's folder.

    Raises what `Generation` raises, and ConnectionError if another rank disconnects.
    """
    attempt = around.attempt or 1 + last_attempt(around.rank_directory / "events.jsonl")
    recorder = Recorder(around.rank_directory, run=around.run, attempt=attempt, rank=around.rank)
    beacon = Beacon(around.rank_directory)
    device = rank_device(around)
    rank_group = None
    try:
        # rank 0 answers; the other ranks exit when it does
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
                return Generation(run, recorder, beacon, control).run(loaded)
    finally:
        if rank_group is not None:
            rank_group.close()
        beacon.close()
        recorder.close()
