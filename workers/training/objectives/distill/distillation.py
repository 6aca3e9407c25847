"""Distillation: the mean divergence from a teacher over a step's trained tokens.

Does not hold the formulas (`divergences`). Shapes: B batch, S positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from workers.contracts.specs.finetuning.objectives import DistillBody
from workers.models.initialize import derived_seed
from workers.training.data.rows import Row, RowSource
from workers.training.objectives.distill.divergences import divergence, top_divergence, top_tokens
from workers.training.objectives.distill.on_policy import OnPolicyRows, answered_row, prompt_of
from workers.training.objectives.objective import Objective, Passes
from workers.training.parallel.batch_sharding import IGNORED, Batch, Reference, TopTokens

_DRAWS = 2.0**63


class Distillation(Objective):
    """`loss` is the sum of weighted divergences over the sum of weights.

    In the share `on_policy` of steps the student writes the answers before the step's passes
    (GKD, arXiv 2306.13649, algorithm 1); which steps follows from the seed.
    """

    def __init__(self, options: DistillBody, *, seed: int = 0, fused: bool = True) -> None:
        super().__init__(fused=fused)
        self.options, self.seed = options, seed
        self._written: list[int] | None = None  # tokens of each answer of the student

    def count(self, row: Row) -> float:
        """The sum of the row's weights."""
        return float(row.weights.sum(dtype="float64"))

    def prepare(self, passes: Passes, samples: RowSource, first: int, count: int) -> None:
        """Let the student answer the batch's prompts, if it is an on-policy step."""
        self._written = None
        if not isinstance(samples, OnPolicyRows) or not self._is_on_policy(first):
            return
        prompts = [prompt_of(samples.given(first + index)) for index in range(count)]
        answers = passes.answers(
            prompts,
            first,
            max_tokens=self.options.max_new_tokens,
            temperature=self.options.sampling_temperature,
        )
        samples.replace(
            {
                first + index: answered_row(prompt, answer, samples.seq_len)
                for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
            }
        )
        self._written = [len(each) for each in answers]

    def reference_of(self, logits_BSV: Tensor, batch: Batch) -> Reference:
        """The teacher's logits, or its `top_k` tokens."""
        if self.options.top_k is None:
            return logits_BSV
        return top_tokens(logits_BSV, self.options.top_k)

    def from_logits(self, logits_BSV: Tensor, batch: Batch) -> Tensor:
        """Weighted divergences, `[B, S]`."""
        teacher = batch.reference
        if isinstance(teacher, TopTokens):
            if self.options.top_k is not None:
                teacher = replace(
                    teacher,
                    tokens=teacher.tokens[..., : self.options.top_k],
                    logprobs=teacher.logprobs[..., : self.options.top_k],
                )
            losses_BS = top_divergence(logits_BSV, teacher, self.options.temperature)
        else:
            assert teacher is not None
            losses_BS = divergence(logits_BSV, teacher, self.options)
        losses_BS = losses_BS.masked_fill(batch.targets == IGNORED, 0.0)
        return losses_BS if batch.weights is None else losses_BS * batch.weights

    def values(self, sums: list[float], *, count: float) -> dict[str, float]:
        """The step's trained tokens, and of an on-policy step the answers' mean length."""
        values = {"trained_tokens": count}
        if self.options.on_policy:
            values["on_policy"] = float(self._written is not None)
        if self._written:
            values["response_tokens"] = sum(self._written) / len(self._written)
        return values

    def validation_values(
        self, loss: float, sums: list[float], *, count: float
    ) -> dict[str, float]:
        """`val_loss` on given answers."""
        return {"val_loss": loss, "val_trained_tokens": count}

    def _is_on_policy(self, first: int) -> bool:
        return derived_seed(self.seed, "on_policy", first) / _DRAWS < self.options.on_policy
