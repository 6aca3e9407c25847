"""Bodies of runs of the inference engine: generate, serve, evaluate.

Fields and defaults only; `run` checks how bodies, model, plan and resources fit together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from workers.contracts.base import Contract, Refused
from workers.contracts.catalog.presets import check_preset
from workers.contracts.specs.finetuning.chat_servers import ServerSpec
from workers.contracts.specs.model import Count, ModelSource, ModelSpec, Positive

Rate = Annotated[float, Field(ge=0)]
Quantize = Literal["int8", "int4", "fp8"]
CacheDtype = Literal["int8"]  # of keys and values; default: the weights' dtype


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


# a string or a list of strings, as OpenAI's `stop`
Stops = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=list[str] | str)]


def _model_tag(value: Any) -> str:
    if isinstance(value, str):
        return "@preset"
    if isinstance(value, ModelSource) or (
        isinstance(value, dict) and ("path" in value or "package" in value)
    ):
        return "@source"
    return "@spec"


ModelRef = Annotated[
    Annotated[str, AfterValidator(check_preset), Tag("@preset")]
    | Annotated[ModelSpec, Tag("@spec")]
    | Annotated[ModelSource, Tag("@source")],
    Discriminator(_model_tag),
]


class EvaluateBody(Contract):
    """Metrics over `input` (default: the last tenth of the run's data).

    `references` are the expected answers of metrics that compare answers. Likelihoods are computed
    in windows of `window` tokens (default: the model's context, at most 1,024) with stride `stride`
    (default: half a window), over at most the first `max_tokens`. Answers are greedy, of at most
    `max_new_tokens`. With `baseline` both models are evaluated on the same items and compared; the
    server `judge` then chooses between their answers, or a reward model there scores them.
    """

    input: str | None = None
    metrics: list[str] = ["loss", "perplexity"]
    references: str | None = None
    window: Annotated[int, Field(ge=2)] | None = None
    stride: Positive | None = None
    max_tokens: Positive | None = None
    max_new_tokens: Positive = 64
    stop: Stops = []
    quantize: Quantize | None = None
    baseline: ModelRef | None = None
    judge: ServerSpec | None = None
    judge_by: Literal["choice", "reward"] = "choice"


class SpeculateSpec(Contract):
    """Speculative decoding: at most `tokens` are drafted per answer and step.

    Drafts come from the run's draft model or, with `ngram`, from what followed the last `ngram`
    tokens earlier in the text. `adaptive` chooses the number by measured times, possibly 0.
    """

    ngram: Annotated[int, Field(ge=1, le=8)] | None = None
    tokens: Annotated[int, Field(ge=1, le=16)] = 4
    adaptive: bool = True


class GenerateBody(Contract):
    """Answers to a JSONL of prompts.

    Temperature 0 is greedy; top_k 0 and top_p 1 disable these filters.
    """

    input: str
    output: str
    max_new_tokens: Positive = 64
    temperature: Rate = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Count = 0
    stop: Stops = []
    ignore_eos: bool = False
    draft: ModelRef | None = None
    speculate: SpeculateSpec | None = None
    quantize: Quantize | None = None
    kv_cache_dtype: CacheDtype | None = None
    decode_graphs: bool = True


DEFAULT_ADAPTER_SLOTS, DEFAULT_ADAPTER_RANK = 8, 16
# names that clients send as `model`
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}$")]
AdapterPath = Annotated[str, Field(min_length=1, max_length=4000)]


class ServeBody(Contract):
    """A server of OpenAI's API with `max_seqs` concurrent requests.

    `max_waiting` more may wait; further ones get 429. Without `api_key` only the control plane and,
    on a loopback address, this machine have access. From the submit on `api_key` is the hash of the
    key (`api_key_hash.hash_key`), never the key itself.

    On one GPU, `decode_graphs` replays decode steps as CUDA graphs.

    `adapters` are LoRA adapters over the model by the names that clients send as `model`, each the
    path of its folder or of a run's checkpoints. `adapter_slots` of them, of rank `adapter_rank` at
    most, are in the model's memory at a time (default: 8 if `adapters` names any, else none; rank
    16, or what the named ones need). With slots, more can be loaded while the server runs.
    """

    max_batch_tokens: Positive = 2048
    max_seqs: Positive = 16
    max_waiting: Count = 256
    kv_blocks: Positive | None = None
    quantize: Quantize | None = None
    kv_cache_dtype: CacheDtype | None = None
    decode_graphs: bool = True
    draft: ModelRef | None = None
    speculate: SpeculateSpec | None = None
    api_key: Annotated[str, Field(min_length=1, max_length=400)] | None = None
    backend: Literal["orrery", "vllm"] = "orrery"
    adapters: Annotated[dict[AdapterName, AdapterPath], Field(max_length=1000)] = {}
    adapter_slots: Annotated[int, Field(ge=0, le=256)] | None = None
    adapter_rank: Annotated[int, Field(ge=1, le=512)] | None = None

    @model_validator(mode="after")
    def _holds_adapters(self) -> ServeBody:
        if self.adapters and self.adapter_slots == 0:
            raise Refused(
                "adapters are given but there is no slot for any",
                "Use adapter_slots 8, or omit the field.",
                field="adapter_slots",
            )
        if self.backend == "vllm" and (self.adapters or self.adapter_slots):
            raise Refused(
                "adapters are served by Orrery's own engine only",
                'Use backend "orrery".',
                field="adapters",
            )
        return self

    @property
    def slots(self) -> int:
        """Adapters in the model's memory at a time."""
        if self.adapter_slots is not None:
            return self.adapter_slots
        return DEFAULT_ADAPTER_SLOTS if self.adapters else 0
