"""A run's model made ready for inference: weights on the device in the run's precision, with what reads its text.

Knows files and tensors; knows no requests. Generate, serve, evaluate and drafts are loaded alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.contracts.exits import UserError
from workers.contracts.model import ModelSource, ModelSpec
from workers.contracts.presets import resolve_model
from workers.inference.words import Words, open_words
from workers.models.decoder import Decoder
from workers.models.initialise import initialise
from workers.models.places import place_of
from workers.models.source import open_weights
from workers.models.weights import fill_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """`words` is None where ids alone are known; `ends` are the ids that end an answer."""

    decoder: Decoder
    words: Words | None
    ends: tuple[int, ...]

    @property
    def spec(self) -> ModelSpec:
        return self.decoder.spec


def load(
    model: str | ModelSpec | ModelSource, *, precision: str, device: torch.device, seed: int = 0, field: str = "model"
) -> Loaded:
    """A shape without weights gets random ones, from `seed`. Raises UserError, which names `field`."""
    dtype = DTYPES[precision]
    try:
        path = place_of(model) if isinstance(model, ModelSource) else None
        words, ends = (None, ()) if path is None else open_words(path)
        weights = None if path is None else open_weights(path)
        spec = resolve_model(model) if weights is None else weights.spec
        assert spec is not None
        with torch.device("meta"):
            decoder = Decoder(spec)
        for parameter in decoder.parameters():  # buffers stay fp32: a rounded balancing bias flips choices
            parameter.data = parameter.data.to(dtype)
        decoder = decoder.to_empty(device=device).requires_grad_(False)
        if weights is None:
            initialise(decoder, layers=spec.layers, seed=seed)
            print(f"{field} {spec.name} names no weights: random ones are used, and ids alone are known", flush=True)
        else:
            fill_model(decoder, weights)
    except (ValueError, OSError) as error:
        raise UserError(f"{field}: {error}") from None
    return Loaded(decoder, words, ends)


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
