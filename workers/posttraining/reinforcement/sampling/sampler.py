"""Answers sampled by the inference engine, whose weights are replaced during training.

The engine lives as long as the run. Keys and values of earlier weights are never used: their
version is part of the prefix cache's key. Does not depend on where weights come from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from workers.contracts.catalog.rollout_limits import MAX_SEQUENCES
from workers.contracts.specs.finetuning.reinforcement import RolloutSpec
from workers.inference.cpu.matmul import update_onednn_layout
from workers.inference.engine import Engine
from workers.inference.engine_builder import (
    blocks_per_request,
    build_engine,
    count_available_blocks,
)
from workers.inference.kv_cache.paged_cache import PagedCache
from workers.inference.model_loading import LoadedModel
from workers.inference.request import Request
from workers.inference.runner import Runner
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.scheduling.policy import Limits
from workers.models.decoder import Decoder
from workers.models.weights.parameter_shapes import named_weights
from workers.posttraining.reinforcement.sampling.weight_copies import empty_decoder, full_weights
from workers.runtime.exit_codes import UserError
from workers.training.loop.step_context import StepContext

_STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Answer:
    """Sampled ids with the stop token, if one ended the answer, their log-probabilities, and the
    version of the weights that sampled each of them.

    `generation_s` is its share of the engine's steps, each divided by the answers that got tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    generation_s: float = 0.0


@dataclass
class AnswerEngine:
    """`take_weights` after the decoder's weights were replaced; `add` prompts and `step`, or
    `sample`.

    `longest`: tokens of a prompt with its answer, at most. `node_ranks` share the memory of this
    node. `body` names the options in messages.
    """

    decoder: Decoder
    options: RolloutSpec
    stops: Sequence[int]
    longest: int
    node_ranks: int = 1
    body: str = "train.grpo"
    version: int = -1
    _engine: Engine | None = None
    _holds_cache: bool = False
    _may_grow: bool = True
    _unfinished: dict[int, dict[int, Request]] = field(default_factory=dict)
    _generation_s: dict[Request, float] = field(default_factory=dict)

    @property
    def busy(self) -> bool:
        """Whether answers are unfinished."""
        return self._engine is not None and self._engine.busy

    @property
    def unfinished(self) -> int:
        """Prompts with unfinished answers."""
        return len(self._unfinished)

    @property
    def output_tokens(self) -> int:
        """Tokens sampled since the engine was built."""
        return 0 if self._engine is None else self._engine.counts.output_tokens

    def take_weights(self, version: int) -> None:
        """Sample with the decoder's new weights from now on; unfinished answers continue."""
        update_onednn_layout(self.decoder)
        self.version = version
        if self._engine is not None:
            self._engine.take_weights(version)

    def reserve(self, prompts: int, answers: int) -> int:
        """Prepare for `answers` answers to each of `prompts` prompts at the same time; how many
        prompts fit. Raises UserError if the cache does not hold one group.
        """
        wanted = max(answers, min(MAX_SEQUENCES, prompts * answers))
        engine = self._engine
        if engine is None or (
            engine.scheduler.limits.sequences < wanted and not engine.busy and self._may_grow
        ):
            self._engine = engine = self._build(wanted, answers)
            self._may_grow = engine.scheduler.limits.sequences >= wanted
            engine.take_weights(max(0, self.version))
            self._holds_cache = True
        elif not self._holds_cache:
            _cache(engine).acquire()
            self._holds_cache = True
        return max(1, engine.scheduler.limits.sequences // answers)

    def release(self) -> None:
        """Free the memory of keys and values until answers are sampled again."""
        if self._engine is not None and self._holds_cache and not self._engine.busy:
            self._engine.take_weights(max(0, self.version))  # forgets the cached prefixes
            _cache(self._engine).release()
            self._holds_cache = False

    def add(self, ids: Sequence[int], seed: int, *, answers: int) -> int:
        """Queue a prompt; its number, by which `step` returns its answers. `reserve` first."""
        assert self._engine is not None
        request = self._engine.add(
            ids,
            SamplingParams(
                max_new_tokens=self.options.max_new_tokens,
                temperature=self.options.temperature,
                top_p=self.options.top_p,
                seed=seed,
                n=answers,
                stop_token_ids=tuple(self.stops),
                logprobs=True,
                scaled_logprobs=True,
            ),
        )
        self._unfinished[request.number] = {}
        return request.number

    @torch.no_grad()
    def step(self) -> dict[int, list[Answer]]:
        """Sample one token of each running answer; all answers of prompts that are finished."""
        assert self._engine is not None
        done: dict[int, list[Answer]] = {}
        began = time.perf_counter()
        advanced = self._engine.step()
        share = (time.perf_counter() - began) / max(1, len(advanced))
        for request in advanced:
            self._generation_s[request] = self._generation_s.get(request, 0.0) + share
            if request.finish is None:
                continue
            group = self._unfinished[request.parent]
            group[request.answer] = request
            if len(group) == request.sampling.n:
                del self._unfinished[request.parent]
                done[request.parent] = [self._answer(each) for _, each in sorted(group.items())]
        return done

    def sample(
        self,
        prompts: Sequence[tuple[Sequence[int], int]],
        *,
        answers: int,
        on_step: Callable[[], None],
    ) -> list[list[Answer]]:
        """`answers` answers to each prompt, given as ids and seed; `on_step` is called often."""
        if not prompts:
            return []
        self.reserve(len(prompts), answers)
        numbers = [self.add(ids, seed, answers=answers) for ids, seed in prompts]
        done: dict[int, list[Answer]] = {}
        while len(done) < len(numbers):
            done |= self.step()
            on_step()
        return [done[number] for number in numbers]

    def _answer(self, request: Request) -> Answer:
        return Answer(
            list(request.output_tokens),
            list(request.logprobs),
            list(request.token_versions),
            self._generation_s.pop(request),
        )

    def _build(self, wanted: int, answers: int) -> Engine:
        loaded = LoadedModel(self.decoder, None, tuple(self.stops))
        available, _ = count_available_blocks(loaded)
        if next(self.decoder.parameters()).device.type == "cpu":
            available //= self.node_ranks
        each = blocks_per_request(loaded, self.longest + 1)
        if available < each * answers + 1:
            raise UserError(
                f"{self.body}: memory holds the keys and values of {available // each} "
                f"answers, a group has {answers}. Use a smaller group_size or max_new_tokens."
            )
        sequences = max(answers, min(wanted, (available - 1) // each))
        limits = Limits(step_tokens=max(_STEP_TOKENS, sequences), sequences=sequences)
        blocks = min(each * sequences + 1, available)
        # every answer has its blocks, so none is preempted; updates may move weights, which graphs
        # read by address
        return build_engine(loaded, blocks=blocks, limits=limits, swaps=False, decode_graphs=False)


class Sampler(AnswerEngine):
    """Samples on a training rank: `sync` after updates, then `sample`. Every rank calls both."""

    def __init__(
        self,
        context: StepContext,
        options: RolloutSpec,
        stops: Sequence[int],
        *,
        longest: int,
        node_ranks: int = 1,
    ) -> None:
        """As `AnswerEngine`, of the model that is trained."""
        super().__init__(
            empty_decoder(context.run, context.world.device),
            options,
            stops,
            longest,
            node_ranks,
            f"train.{context.run.train.objective}",
        )
        self.context = context

    @torch.no_grad()
    def sync(self, version: int) -> None:
        """Copy the trained weights, gathered from all ranks. Collective."""
        targets = named_weights(self.decoder)
        for name, full in full_weights(self.context, targets):
            targets[name].copy_(full)
        self.take_weights(version)


def _cache(engine: Engine) -> PagedCache:
    assert isinstance(engine.runner, Runner)
    return engine.runner.cache
