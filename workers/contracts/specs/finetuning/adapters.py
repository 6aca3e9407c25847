"""AdapterSpec: a parameter-efficient fine-tuning method and its options.

Fields, defaults and what a method excludes; does not depend on a model's shape or on torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, Field, model_validator

from workers.contracts.base import Contract, Refused
from workers.contracts.specs.model import Positive

AdapterMethod = Literal[
    "lora",
    "rslora",
    "dora",
    "qlora",
    "adapter",
    "prefix",
    "prompt",
    "p_tuning",
    "p_tuning_v2",
    "ia3",
    "bitfit",
]
AdapterTarget = Literal["q", "k", "v", "o", "gate", "up", "down"]
LOW_RANK: tuple[AdapterMethod, ...] = ("lora", "rslora", "dora", "qlora")
VIRTUAL_TOKENS: tuple[AdapterMethod, ...] = ("prefix", "prompt", "p_tuning", "p_tuning_v2")
ALL_TARGETS: tuple[AdapterTarget, ...] = ("q", "k", "v", "o", "gate", "up", "down")
_RANKED = (*LOW_RANK, *VIRTUAL_TOKENS, "adapter")


class AdapterSpec(Contract):
    """A method that trains few parameters next to frozen weights.

    lora, rslora, dora, qlora: low-rank updates of `rank` on the projections `targets`, scaled by
    `alpha` over the rank (rslora: over its square root). adapter: bottleneck layers of `rank`
    units after attention and MLP. prefix, prompt, p_tuning, p_tuning_v2: `rank` virtual tokens.
    ia3 scales keys, values and MLP units; bitfit trains biases. `modules_to_save` are modules
    trained and stored in full, such as the head. `quantize` stores frozen linear weights in 4 bits
    (NF4; qlora's default), with `double_quant` their scales in 8 bits. `init` is where virtual
    tokens start: a text, `random`, or None for evenly spaced tokens of the vocabulary.
    """

    method: AdapterMethod = Field(
        default="lora", validation_alias=AliasChoices("method", "name")
    )  # specs of version 0.1 have the key `name`
    rank: Positive | None = None
    alpha: Annotated[float, Field(gt=0)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[list[AdapterTarget], Field(min_length=1)] | None = None
    modules_to_save: list[Annotated[str, Field(min_length=1, max_length=200)]] = []
    quantize: Literal["nf4"] | None = None
    double_quant: bool | None = None
    init: Annotated[str, Field(min_length=1, max_length=4000)] | None = None

    @model_validator(mode="after")
    def _fits_method(self) -> AdapterSpec:
        if self.rank is not None and self.method not in _RANKED:
            raise Refused(f"{self.method} has no rank", "Omit rank.", field="rank")
        for field in ("alpha", "targets"):
            if getattr(self, field) is not None and self.method not in LOW_RANK:
                raise Refused(
                    f"{self.method} has no {field}",
                    f"Omit {field}, or use method lora.",
                    field=field,
                )
        if self.init is not None and self.method not in VIRTUAL_TOKENS:
            raise Refused(f"{self.method} has no virtual tokens", "Omit init.", field="init")
        if self.double_quant and self.storage is None:
            raise Refused(
                "double_quant needs weights in 4 bits",
                'Set quantize to "nf4".',
                field="double_quant",
            )
        return self

    @property
    def is_removable(self) -> bool:
        """Whether the model's own weights stay as they were, so the adapter can be left out."""
        return self.method != "bitfit" and not self.modules_to_save

    @property
    def storage(self) -> Literal["nf4"] | None:
        """How frozen linear weights are stored; None: in the plan's compute type."""
        return "nf4" if self.method == "qlora" else self.quantize

    @property
    def double_quantized(self) -> bool:
        """Whether the scales of 4-bit weights are stored in 8 bits (qlora's default)."""
        return self.storage is not None and self.double_quant is not False

    @property
    def size(self) -> int:
        """The rank, the bottleneck's units, or the number of virtual tokens; 0 without one."""
        if self.method not in _RANKED:
            return 0
        return self.rank or (16 if self.method in LOW_RANK else 20)

    @property
    def scale(self) -> float:
        """The factor of updates: alpha / rank; rslora: alpha / sqrt(rank) (arXiv 2312.03732)."""
        alpha = self.alpha if self.alpha is not None else 2.0 * self.size
        return alpha / (self.size**0.5 if self.method == "rslora" else self.size)

    @property
    def projections(self) -> tuple[AdapterTarget, ...]:
        """The projections with low-rank updates; all linear layers by default."""
        return tuple(self.targets) if self.targets is not None else ALL_TARGETS
