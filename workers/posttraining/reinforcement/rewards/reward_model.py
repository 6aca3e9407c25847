"""A reward model's score of prompt and answer: its scalar head's output at the last token.

Each rank holds a full copy in the compute dtype. Does not depend on how the model was trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from workers.contracts.specs.finetuning.rewards import ModelReward
from workers.contracts.specs.model import ModelSource
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.weights.locations import locate_weights
from workers.models.weights.open import open_weights
from workers.models.weights.reader import fill_model
from workers.posttraining.reinforcement.rewards.reward import AnswerToScore, Reward, Score, checked
from workers.runtime.exit_codes import UserError
from workers.training.data.tokenizer import NAME, check_same

_TOKENS = 16_384  # of a batch, padding included


class ScoredReward(Reward):
    """Scores batches of equal padded length."""

    def __init__(
        self,
        spec: ModelReward,
        name: str,
        *,
        device: torch.device,
        dtype: torch.dtype,
        checkpoints: Path,
    ) -> None:
        """Raises UserError for weights without a scalar head or with another tokenizer."""
        super().__init__(name, spec.weight)
        where = name
        assert spec.path is not None
        try:
            path = locate_weights(ModelSource(path=spec.path))
            weights = open_weights(path)
        except (WeightsError, ValueError, OSError) as error:
            raise UserError(f"{where}: {error}") from None
        if not weights.spec.scalar_head:
            raise UserError(
                f"{where}: {spec.path} predicts tokens. Use a model of objective reward, whose "
                "head gives one number."
            )
        if (checkpoints / NAME).is_file():
            try:
                check_same(checkpoints, path)
            except UserError as error:
                message = str(error).removeprefix("data.tokenizer: ").split(". ")[0]
                raise UserError(
                    f"{where}: {message}. Use a reward model with the policy's tokenizer."
                ) from None
        with torch.device("meta"):
            decoder = Decoder(weights.spec)
        for parameter in decoder.parameters():
            parameter.data = parameter.data.to(dtype)
        self.decoder = decoder.to_empty(device=device).requires_grad_(False).eval()
        try:
            fill_model(self.decoder, weights)
        except (WeightsError, ValueError) as error:
            raise UserError(f"{where}: {error}") from None
        self.device, self.context = device, weights.spec.max_seq_len

    @torch.no_grad()
    def score(self, answers: Sequence[AnswerToScore]) -> list[Score]:
        """One score per answer; a failure for one that is longer than the model's context."""
        scores = [
            Score()
            if len(each.ids) <= self.context
            else Score(failure=f"{len(each.ids)} tokens exceed its context of {self.context}")
            for each in answers
        ]
        order = sorted(
            (number for number, score in enumerate(scores) if not score.failure),
            key=lambda number: len(answers[number].ids),
        )
        while order:
            longest = len(answers[order[-1]].ids)
            count = max(1, _TOKENS // longest)
            batch, order = order[-count:], order[:-count]
            ids_BS = torch.zeros(len(batch), longest, dtype=torch.int64)
            for row, number in enumerate(batch):
                ids_BS[row, : len(answers[number].ids)] = torch.tensor(answers[number].ids)
            out_BS = self.decoder(ids_BS.to(self.device)).squeeze(-1)
            ends = torch.tensor([len(answers[number].ids) - 1 for number in batch])
            values = out_BS.gather(1, ends.to(self.device).unsqueeze(1)).squeeze(1).float().tolist()
            for number, value in zip(batch, values, strict=True):
                scores[number] = checked(value)
        return scores
