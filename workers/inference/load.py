"""A run's model made ready for inference: weights on the device in the run's precision, with what
reads its text.

Knows files and tensors; knows no requests. Generate, serve, evaluate and drafts are loaded alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from workers.contracts.catalog.presets import resolve_model
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.wire.exits import UserError
from workers.inference.env import Surroundings
from workers.inference.parallel.groups import Team
from workers.inference.parallel.sharding import Parts, cut, part_of
from workers.inference.quantize.on_load import taken_out
from workers.inference.tokenizer import ByteWords, Words, open_words
from workers.models.decoder import Decoder
from workers.models.initialise import initialise
from workers.models.weights.locations import place_of
from workers.models.weights.open import open_weights
from workers.models.weights.reader import fill_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CACHE_DTYPES = {"int8": torch.int8}
_BYTES = 256  # the vocabulary of presets made for raw bytes, as the data preset shakespeare is


@dataclass(frozen=True, slots=True)
class Loaded:
    """`words` is None where ids alone are known; `ends` are the ids that end an answer.
    `cache_dtype` is what keys and
    values are kept in, by default the weights'. With a `team` the decoder is this rank's part of
    the model.
    """

    decoder: Decoder
    words: Words | None
    ends: tuple[int, ...]
    cache_dtype: torch.dtype | None = None
    team: Team | None = None

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec

    @property
    def shares(self) -> int:
        """Ranks that share each layer."""
        return 1 if self.team is None else self.team.place.shares

    def kept_in(self, kv_cache_dtype: str | None) -> Loaded:
        """With the cache in int8, where that is asked for.

        Raises UserError for a model whose cache cannot be.
        """
        if kv_cache_dtype is None:
            return self
        if self.spec.mla is not None:
            raise UserError(
                "kv_cache_dtype: latent attention keeps latents, which are not quantised; leave "
                "it out"
            )
        return replace(self, cache_dtype=CACHE_DTYPES[kv_cache_dtype])


def load(
    model: str | ModelSpec | ModelSource,
    *,
    precision: str,
    device: torch.device,
    seed: int = 0,
    field: str = "model",
    quantize: str | None = None,
    team: Team | None = None,
    plan: ParallelPlan | None = None,
) -> Loaded:
    """A shape without weights gets random ones, from `seed`. Linears are kept in few bits where
    `quantize` says so
    (int8, int4, fp8), or where the weights lie so. Of a `team` by `plan` this rank's part is
    loaded, and no more.
    Raises UserError, which names `field`."""
    dtype = DTYPES[precision]
    try:
        path = place_of(model) if isinstance(model, ModelSource) else None
        words, ends = (None, ()) if path is None else open_words(path)
        weights = None if path is None else open_weights(path)
        spec = resolve_model(model) if weights is None else weights.spec
        assert spec is not None
        with torch.device("meta"):
            decoder = Decoder(
                spec, part_of(plan, team.place, spec.layers) if team is not None and plan else None
            )
        # buffers stay fp32: a rounded balancing bias flips choices
        for parameter in decoder.parameters():
            parameter.data = parameter.data.to(dtype)
        if team is not None:
            weights = Parts(spec, weights, cut(decoder, team), seed)
        linears = taken_out(decoder, weights, quantize)
        decoder = decoder.to_empty(device=device).requires_grad_(False)
        if weights is None:
            initialise(decoder, layers=spec.layers, seed=seed)
        else:
            fill_model(decoder, weights)
        if path is None:
            print(
                f"{field} {spec.name} names no weights: random ones are used, and ids alone are "
                "known",
                flush=True,
            )
        linears.put_back(dtype, device, seed)
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(f"{field}: {error}") from None
    return Loaded(decoder, words, ends, team=team)


def read_as_bytes(loaded: Loaded, model: str | ModelSpec | ModelSource) -> Loaded:
    """Where text is asked of a preset made for raw bytes, text is bytes; any other model as it was
    loaded.
    """
    if isinstance(model, str) and loaded.words is None and loaded.spec.vocab == _BYTES:
        return replace(loaded, words=ByteWords())
    return loaded


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_of(around: Surroundings) -> torch.device:
    """This rank's own."""
    if device_here().type == "cpu":
        return device_here()
    torch.cuda.set_device(around.local_rank)
    return torch.device("cuda", around.local_rank)
