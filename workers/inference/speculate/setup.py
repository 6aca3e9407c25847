"""A run's way of drafting, loaded and found to fit its model, and the speculator made of it.

Knows specs and memory; how drafts come about is `draft`'s and `ngram`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.contracts.specs.run_bodies import GenerateBody, ServeBody, SpeculateSpec
from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.kv_cache.paged_cache import PagedCache
from workers.inference.model_loading import LoadedModel, load_model
from workers.inference.runner import Runner
from workers.inference.speculate.draft import ModelDraft
from workers.inference.speculate.ngram import NgramDraft
from workers.inference.speculate.speculator import Speculator
from workers.models.text.tokenizer import TextTokenizer
from workers.runtime.exits import UserError


@dataclass(frozen=True, slots=True)
class Drafting:
    """What is asked for, and the draft model where one drafts."""

    asked: SpeculateSpec
    model: LoadedModel | None

    def speculator(self, pool: BlockPool) -> Speculator:
        """For an engine over this pool.

        Raises UserError for a draft that the paged cache cannot serve.
        """
        asked = self.asked
        if self.model is None:
            return Speculator(
                NgramDraft(asked.ngram or 1), tokens=asked.tokens, adaptive=asked.adaptive
            )
        weight, spec = next(self.model.decoder.parameters()), self.model.spec
        cache = PagedCache(
            spec,
            blocks=pool.blocks,
            block_size=pool.block_size,
            dtype=weight.dtype,
            device=weight.device,
        )
        try:
            draft = ModelDraft(Runner(self.model.decoder, cache), pool, context=spec.max_seq_len)
        except ValueError as error:
            raise UserError(f"draft: {error}") from None
        return Speculator(draft, tokens=asked.tokens, adaptive=asked.adaptive)


def drafting_of(
    body: GenerateBody | ServeBody,
    loaded: LoadedModel,
    *,
    kind: str,
    precision: str,
    device: torch.device,
    seed: int = 0,
) -> Drafting | None:
    """None where nothing is drafted.

    Raises UserError for a draft of other tokens than the model's.
    """
    asked = body.speculate or SpeculateSpec()
    if body.draft is None:
        return Drafting(asked, None) if asked.ngram is not None else None
    field = f"{kind}.draft"
    model = load_model(body.draft, precision=precision, device=device, seed=seed, field=field)
    if model.spec.vocab != loaded.spec.vocab:
        message = (
            f"{model.spec.name} knows {model.spec.vocab} tokens, {loaded.spec.name} "
            f"{loaded.spec.vocab}"
        )
        raise UserError(
            f"{field}: {message}; try a draft of the same family, which shares its vocabulary"
        )
    if not _same(model, loaded):
        message = (
            f"the tokenizer of {model.spec.name} gives other ids than that of {loaded.spec.name}"
        )
        raise UserError(
            f"{field}: {message}; try a draft of the same family, which shares its tokenizer"
        )
    return Drafting(asked, model)


def _same(draft: LoadedModel, target: LoadedModel) -> bool:
    """Ids alone go with anything."""
    one, other = draft.tokenizer, target.tokenizer
    if isinstance(one, TextTokenizer) and isinstance(other, TextTokenizer):
        return one.ids() == other.ids()
    return one is None or other is None or type(one) is type(other)
