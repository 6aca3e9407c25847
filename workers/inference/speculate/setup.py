"""Loads and checks the draft of a run, and builds its speculator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.contracts.specs.inference import GenerateBody, ServeBody, SpeculateSpec
from workers.inference.kv_cache.block_pool import BlockPool
from workers.inference.kv_cache.paged_cache import PagedCache
from workers.inference.model_loading import LoadedModel, load_model
from workers.inference.runner import Runner
from workers.inference.speculate.draft import ModelDraft
from workers.inference.speculate.ngram import NgramDraft
from workers.inference.speculate.speculator import Speculator
from workers.models.text.tokenizer import TextTokenizer
from workers.runtime.exit_codes import UserError


@dataclass(frozen=True, slots=True)
class Drafting:
    """The configuration, and the draft model if there is one."""

    config: SpeculateSpec
    model: LoadedModel | None

    def speculator(self, pool: BlockPool) -> Speculator:
        """The speculator of an engine over this pool.

        Raises UserError for a draft model that the paged cache does not support.
        """
        config = self.config
        if self.model is None:
            ngram = NgramDraft(config.ngram or 1)
            return Speculator(ngram, tokens=config.tokens, adaptive=config.adaptive)
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
        return Speculator(draft, tokens=config.tokens, adaptive=config.adaptive)


def build_drafting(
    body: GenerateBody | ServeBody,
    loaded: LoadedModel,
    *,
    kind: str,
    precision: str,
    device: torch.device,
    seed: int = 0,
) -> Drafting | None:
    """The drafting of a run, or None.

    Raises UserError for a draft model with another vocabulary.
    """
    config = body.speculate or SpeculateSpec()
    if body.draft is None:
        return Drafting(config, None) if config.ngram is not None else None
    field = f"{kind}.draft"
    model = load_model(body.draft, precision=precision, device=device, seed=seed, field=field)
    if model.spec.vocab != loaded.spec.vocab:
        message = (
            f"{model.spec.name} has {model.spec.vocab} tokens, {loaded.spec.name} "
            f"{loaded.spec.vocab}"
        )
        raise UserError(
            f"{field}: {message}. Use a draft of the same family, which shares its vocabulary."
        )
    if not _same_tokenizer(model, loaded):
        message = (
            f"the tokenizer of {model.spec.name} gives other ids than that of {loaded.spec.name}"
        )
        raise UserError(
            f"{field}: {message}. Use a draft of the same family, which shares its tokenizer."
        )
    return Drafting(config, model)


def _same_tokenizer(draft: LoadedModel, target: LoadedModel) -> bool:
    """Whether both use the same ids; a model without a tokenizer matches any."""
    a, b = draft.tokenizer, target.tokenizer
    if isinstance(a, TextTokenizer) and isinstance(b, TextTokenizer):
        return a.ids() == b.ids()
    return a is None or b is None or type(a) is type(b)
