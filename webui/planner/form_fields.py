"""Fields of the planner form: one table for the form, links and `planner.js`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from orchestrator.planner.model.frameworks import FRAMEWORKS
from webui.presentation.formatting import memory, quantity
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.devices import DEVICES
from workers.contracts.catalog.presets import PRESETS

OWN: Final = "own"  # the choice of a custom model or device
ANY: Final = ""  # the search chooses the value

Kind = Literal["choice", "int", "amount", "float", "json", "text"]


@dataclass(frozen=True)
class PlannerField:
    """One form field; `slide` are the slider's stops, `least` and `most` the bounds."""

    name: str
    label: str
    kind: Kind
    default: str = ""
    hint: str = ""
    unit: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    slide: tuple[int, ...] = ()
    least: float = 1
    most: float = 2**31
    wide: bool = False

    @property
    def id(self) -> str:
        """Id of the HTML element."""
        return f"p-{self.name}"


def _twos(low: int, high: int) -> tuple[int, ...]:
    return tuple(2**power for power in range(low, high + 1))


def _any(*names: str) -> tuple[tuple[str, str], ...]:
    return ((ANY, "any"), *((name, name) for name in names))


def _models() -> tuple[tuple[str, str], ...]:
    presets = (
        (name, f"{name} · {quantity(parameter_count(spec).total)}")
        for name, spec in PRESETS.items()
    )
    return (*presets, (OWN, "Custom (JSON or config.json)"))


def _devices() -> tuple[tuple[str, str], ...]:
    known = ((name, f"{name} · {memory(entry.memory_bytes)}") for name, entry in DEVICES.items())
    return (*known, (OWN, "Custom device"))


F = PlannerField
MODEL: Final = (
    F("model", "Model", "choice", "llama3-8b", choices=_models(), wide=True),
    F(
        "shape",
        "Model JSON",
        "json",
        hint="A model spec or a Hugging Face config.json.",
        wide=True,
    ),
)
CLUSTER: Final = (
    F("device", "Device", "choice", "h100-80g", choices=_devices(), wide=True),
    F("nodes", "Nodes", "int", "1", slide=_twos(0, 9), most=2**20),
    F("devices_per_node", "Devices per node", "int", "8", slide=_twos(0, 4), most=2**16),
)
OWN_DEVICE: Final = (
    F("own_memory", "Memory", "float", "80", unit="GiB", most=1e6),
    F("own_tflops", "bf16 peak", "float", "989", unit="TFLOP/s", least=1e-6, most=1e9),
    F("own_fp32", "fp32 peak", "float", "67", unit="TFLOP/s", least=1e-6, most=1e9),
    F("own_bandwidth", "Memory bandwidth", "float", "3350", unit="GB/s", least=1e-6, most=1e9),
    F("own_power", "Power", "float", "700", unit="W", most=1e6),
)
LINKS: Final = (
    F(
        "intra",
        "Intra-node link",
        "float",
        hint="Per device and direction.",
        unit="GB/s",
        least=1e-6,
        most=1e9,
    ),
    F("inter", "Inter-node link", "float", unit="GB/s", least=1e-6, most=1e9),
    F(
        "host",
        "Host memory",
        "float",
        hint="Used by offloading; empty: unknown.",
        unit="GiB/device",
        least=1e-6,
        most=1e6,
    ),
    F("price", "Price", "float", unit="$/device-hour", least=0, most=1e6),
)
BATCH: Final = (
    F("seq_len", "Sequence length", "int", "8192", slide=_twos(9, 17), most=2**24),
    F("global_batch_size", "Global batch", "int", "128", slide=_twos(0, 13), most=2**24),
    F(
        "tokens",
        "Training tokens",
        "amount",
        "1T",
        hint="For example 300G or 1.5T. Used for time and cost.",
        least=1,
        most=1e18,
        wide=True,
    ),
)
HOW: Final = (
    F(
        "framework",
        "Framework",
        "choice",
        "orrery",
        choices=tuple((name, name) for name in FRAMEWORKS),
    ),
    F(
        "objective",
        "Rank by",
        "choice",
        "time",
        choices=(("time", "step time"), ("cost", "cost"), ("memory", "memory headroom")),
    ),
)
AXES: Final = (
    F(
        "micro_batch_size",
        "Micro-batch",
        "int",
        ANY,
        "Empty: any.",
        slide=(0, *_twos(0, 6)),
        most=2**20,
        wide=True,
    ),
    F("dp", "Data (dp)", "int", ANY, most=2**20),
    F("tp", "Tensor (tp)", "int", ANY, most=2**20),
    F("pp", "Pipeline (pp)", "int", ANY, most=2**20),
    F("cp", "Context (cp)", "int", ANY, most=2**20),
    F("ep", "Expert (ep)", "int", ANY, most=2**20),
    F("zero", "ZeRO stage", "choice", ANY, choices=_any("0", "1", "2", "3")),
    F("precision", "Precision", "choice", "bf16", choices=_any("fp32", "bf16", "fp16", "fp8")),
    F("recompute", "Recompute", "choice", ANY, choices=_any("none", "selective", "full")),
    F(
        "schedule",
        "Pipeline schedule",
        "choice",
        ANY,
        choices=_any(
            "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev", "pipedream"
        ),
    ),
    F("offload", "Offload", "choice", ANY, choices=_any("none", "optimizer", "all", "nvme")),
)

FIELDS: Final = {
    field.name: field for field in (*MODEL, *CLUSTER, *OWN_DEVICE, *LINKS, *BATCH, *HOW, *AXES)
}
