"""Loads a run's model for inference: weights on the device in the run's precision, and a tokenizer.

Generate, serve, evaluate and draft models use it alike. Does not depend on requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from workers.contracts.catalog.presets import resolve_model
from workers.contracts.specs.model import ModelSource, ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.inference.adapters.low_rank_slots import SlotSpec
from workers.inference.parallel.groups import RankGroup
from workers.inference.parallel.sharding import ShardedWeights, shard_decoder, stage_part
from workers.inference.quantize.on_load import remove_linears
from workers.inference.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from workers.models.decoder import Decoder
from workers.models.initialize import initialize
from workers.models.weights.locations import locate_weights
from workers.models.weights.open import open_weights
from workers.models.weights.reader import fill_model
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import UserError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CACHE_DTYPES = {"int8": torch.int8}
_BYTES = 256  # the vocabulary of presets for raw bytes (the data preset shakespeare)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device; with a `rank_group` the decoder is this rank's part of it.

    `tokenizer` is None if only token ids are possible. `cache_dtype` is the KV cache's dtype, by
    default that of the weights. `path` is where the weights are, None for random ones;
    `adapter_slots` the slots to hold for adapters.
    """

    decoder: Decoder
    tokenizer: Tokenizer | None
    stop_token_ids: tuple[int, ...]
    cache_dtype: torch.dtype | None = None
    rank_group: RankGroup | None = None
    path: Path | None = None
    adapter_slots: SlotSpec | None = None

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return self.decoder.spec

    @property
    def shares(self) -> int:
        """Ranks that share each layer."""
        return 1 if self.rank_group is None else self.rank_group.place.shares

    def with_cache_dtype(self, kv_cache_dtype: str | None) -> LoadedModel:
        """The same model with this cache dtype (None: unchanged).

        Raises UserError for a model whose cache cannot be quantized.
        """
        if kv_cache_dtype is None:
            return self
        if self.spec.mla is not None:
            raise UserError(
                "kv_cache_dtype: the cache of latent attention cannot be quantized; leave it out"
            )
        return replace(self, cache_dtype=CACHE_DTYPES[kv_cache_dtype])


def load_model(
    model: str | ModelSpec | ModelSource,
    *,
    precision: str,
    device: torch.device,
    seed: int = 0,
    field: str = "model",
    quantize: str | None = None,
    rank_group: RankGroup | None = None,
    plan: ParallelPlan | None = None,
    scores: bool = False,
) -> LoadedModel:
    """Load weights, or initialize random ones from `seed` for a model that is only a shape.

    A reward model is refused unless `scores`. Linears are quantized if `quantize` (int8, int4, fp8)
    or the weights' format says so. With a `rank_group` only this rank's part by `plan` is loaded.
    Raises UserError, which names `field`.
    """
    dtype = DTYPES[precision]
    try:
        path = locate_weights(model) if isinstance(model, ModelSource) else None
        tokenizer, ends = (None, ()) if path is None else load_tokenizer(path)
        weights = None if path is None else open_weights(path)
        spec = resolve_model(model) if weights is None else weights.spec
        assert spec is not None
        if spec.scalar_head and not scores:
            raise UserError(
                f"{field}: {spec.name} is a reward model, which scores texts and writes none. "
                "Use a language model, or a run of kind serve, which scores at /pooling."
            )
        with torch.device("meta"):
            decoder = Decoder(
                spec,
                stage_part(plan, rank_group.place, spec.layers)
                if rank_group is not None and plan
                else None,
            )
        # buffers stay fp32: rounding a balancing bias would change expert choices
        for parameter in decoder.parameters():
            parameter.data = parameter.data.to(dtype)
        if rank_group is not None:
            weights = ShardedWeights(spec, weights, shard_decoder(decoder, rank_group), seed)
        linears = remove_linears(decoder, weights, quantize)
        decoder = decoder.to_empty(device=device).requires_grad_(False)
        if weights is None:
            initialize(decoder, layers=spec.layers, seed=seed)
        else:
            fill_model(decoder, weights)
        if path is None:
            print(
                f"{field} {spec.name} names no weights: using random weights and no tokenizer",
                flush=True,
            )
        linears.restore(dtype, device, seed)
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(f"{field}: {error}") from None
    return LoadedModel(decoder, tokenizer, ends, rank_group=rank_group, path=path)


def with_byte_tokenizer(loaded: LoadedModel, model: str | ModelSpec | ModelSource) -> LoadedModel:
    """With a byte tokenizer if it is a preset for raw bytes; otherwise unchanged."""
    if isinstance(model, str) and loaded.tokenizer is None and loaded.spec.vocab == _BYTES:
        return replace(loaded, tokenizer=ByteTokenizer())
    return loaded


def with_model_tokenizer(loaded: LoadedModel, model: str | ModelSpec | ModelSource) -> LoadedModel:
    """With the tokenizer of `model` if that has a chat template and the loaded one has none.

    Unchanged if their vocabularies differ. Raises UserError for a tokenizer that cannot be read.
    """
    if not isinstance(model, ModelSource) or has_chat_template(loaded.tokenizer):
        return loaded
    try:
        path = locate_weights(model)
        tokenizer, ends = load_tokenizer(path)
        vocab = open_weights(path).spec.vocab
    except (ValueError, OSError) as error:
        raise UserError(f"model: {error}") from None
    if not has_chat_template(tokenizer) or vocab != loaded.spec.vocab:
        return loaded
    return replace(loaded, tokenizer=tokenizer, stop_token_ids=ends)


def has_chat_template(tokenizer: Tokenizer | None) -> bool:
    """Whether the tokenizer formats messages."""
    return getattr(tokenizer, "chat_template", None) is not None


def default_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rank_device(environment: Environment) -> torch.device:
    """This rank's device."""
    if default_device().type == "cpu":
        return default_device()
    torch.cuda.set_device(environment.local_rank)
    return torch.device("cuda", environment.local_rank)
