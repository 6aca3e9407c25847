"""ParallelPlan: how a model and its batch are distributed over devices.

`legality` checks a plan for a model, a sequence length and a number of devices.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from workers.contracts.base import Contract, derived, parse_integer
from workers.contracts.catalog.devices import Precision
from workers.contracts.specs.model import Count, Degree, Positive

Offload = Literal["none", "optimizer", "all", "nvme"]
Recompute = Literal["none", "selective", "full", "auto"]
Schedule = Literal[
    "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev", "pipedream"
]
Dtype = Literal["fp32", "bf16", "fp16"]
# scales of fp8: per block of 128 (DeepSeek-V3), per tensor or per row (torchao)
Fp8Recipe = Literal["block", "tensorwise", "rowwise"]

SCHEDULE_CODES: dict[str, int] = {name: code for code, name in enumerate(get_args(Schedule))}
# schedules that split the backward pass into input and weight gradients
SPLIT_BACKWARD = frozenset({"zb1p", "zbv", "dualpipev"})
V_SHAPED = frozenset({"zbv", "dualpipev"})
INTERLEAVED = frozenset({"interleaved_1f1b", "zb1p"})


class LossScale(Contract):
    """Dynamic loss scaling for fp16 (arXiv 1710.03740).

    The scale grows after an interval without overflow and backs off on an overflow.
    """

    initial: Annotated[float, Field(gt=0)] = 65536.0
    growth_interval: Positive = 2000
    growth: Annotated[float, Field(gt=1)] = 2.0
    backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5


class ParallelPlan(Contract):
    """Degrees of parallelism, sharding, memory savings, precision, pipeline schedule and batch.

    `global_batch_size` counts sequences (default: one micro-batch per data-parallel rank).
    `virtual_stages` defaults to 1, and to 2 for schedules that need several stages per device.
    `dp_replicate` is the number of replicas within `dp`. `params_dtype` and `grad_dtype` are those
    of stored weights and gradients (default fp32, gradients as weights).

    ZeRO 3: `prefetch_layers` layers are gathered ahead (default 1); the last layers stay gathered
    from forward to backward pass as long as a rank has at most `max_live_params` gathered
    parameters (default: none do); layers and tables with fewer than `param_persistence_threshold`
    parameters stay gathered until the update.
    """

    dp: Degree = 1
    tp: Degree = 1
    pp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1
    zero: Annotated[int, Field(ge=0, le=3)] = 0
    sequence_parallel: bool = False
    offload: Offload = "none"
    recompute: Recompute = "none"
    precision: Precision = "fp32"
    schedule: Schedule = "1f1b"
    virtual_stages: int = derived(le=2**16)
    micro_batch_size: Positive = 1
    global_batch_size: int = derived()
    dp_replicate: Degree | None = None
    recompute_budget_bytes: Count | None = None
    stage_layers: list[Count] | None = None
    weight_stashing: bool | None = None
    vertical_sync: bool | None = None
    prefetch_layers: Count | None = None
    max_live_params: Count | None = None
    param_persistence_threshold: Count | None = None
    reduce_dtype: Dtype | None = None
    grad_dtype: Dtype | None = None
    params_dtype: Dtype | None = None
    loss_scale: LossScale | None = None
    fp8_recipe: Fp8Recipe | None = None

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if data.get("virtual_stages") is None:
            data["virtual_stages"] = 2 if str(data.get("schedule")) in V_SHAPED | INTERLEAVED else 1
        if data.get("global_batch_size") is None:
            # parse as the fields do, so that {"dp": "8"} is not a batch of 1; invalid values are
            # refused later
            micro, dp = (
                parse_integer(data.get("micro_batch_size", 1)),
                parse_integer(data.get("dp", 1)),
            )
            data["global_batch_size"] = (
                max(1, micro * dp) if micro is not None and dp is not None else 1
            )
        return data

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def accumulation(self) -> int:
        """Micro-batches per data-parallel rank and step, rounded down."""
        return self.global_batch_size // (self.micro_batch_size * self.dp)

    @property
    def offloads_weights(self) -> bool:
        """Whether weights are stored on the host (nvme: if sharded) and loaded block by block."""
        return self.offload == "all" or (self.offload == "nvme" and self.zero == 3)

    @property
    def weights_dtype(self) -> Dtype:
        """The dtype in which the engine stores trained weights and their gradients."""
        return self.params_dtype or "fp32"

    @property
    def narrow_weights(self) -> bool:
        """Whether trained weights are stored in 16 bits, without an fp32 copy."""
        return self.weights_dtype != "fp32"

    def chosen_fp8_recipe(self, *, compiled: bool) -> Fp8Recipe:
        """`fp8_recipe`, by default the block recipe, and for compiled blocks one that compiles."""
        return self.fp8_recipe or ("tensorwise" if compiled else "block")

    @property
    def fully_shards(self) -> bool:
        """Whether `fully_shard` holds the weights (ZeRO 2 and 3, offloaded weights).

        Also on a single rank, where it gathers copies of its own weights and sends nothing.
        """
        return self.zero >= 2 or self.offloads_weights

    @property
    def stages(self) -> int:
        """Pipeline stages over all devices."""
        return self.pp * self.virtual_stages

    @property
    def dp_shard(self) -> int:
        """Data-parallel ranks that share one replica of what ZeRO shards."""
        return self.dp // (self.dp_replicate or 1)

    def layers_of_stages(self, layers: int) -> list[int]:
        """Layers of each stage: `stage_layers`, or even with the remainder on the first stages."""
        if self.stage_layers is not None:
            return list(self.stage_layers)
        quotient, remainder = divmod(layers, self.stages)
        return [quotient + (stage < remainder) for stage in range(self.stages)]
