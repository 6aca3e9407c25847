"""Fields of the planner form: one table for the form, links and `planner.js`.

Labels, hints and choices are marked here and translated when shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from django.utils.translation import gettext_noop as _

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
    return ((ANY, _("any")), *((name, name) for name in names))


def _models() -> tuple[tuple[str, str], ...]:
    presets = (
        (name, f"{name} · {quantity(parameter_count(spec).total)}")
        for name, spec in PRESETS.items()
    )
    return (*presets, (OWN, _("Custom (JSON or config.json)")))


def _devices() -> tuple[tuple[str, str], ...]:
    known = ((name, f"{name} · {memory(entry.memory_bytes)}") for name, entry in DEVICES.items())
    return (*known, (OWN, _("Custom device")))


F = PlannerField
MODEL: Final = (
    F("model", _("Model"), "choice", "llama3-8b", choices=_models(), wide=True),
    F(
        "shape",
        _("Model JSON"),
        "json",
        hint=_("Paste a model spec or a Hugging Face config.json."),
        wide=True,
    ),
)
CLUSTER: Final = (
    F("device", _("Device"), "choice", "h100-80g", choices=_devices(), wide=True),
    F("nodes", _("Nodes"), "int", "1", slide=_twos(0, 9), most=2**20),
    F("devices_per_node", _("Devices per node"), "int", "8", slide=_twos(0, 4), most=2**16),
)
OWN_DEVICE: Final = (
    F("own_memory", _("Memory"), "float", "80", unit="GiB", most=1e6),
    F("own_tflops", _("bf16 peak"), "float", "989", unit="TFLOP/s", least=1e-6, most=1e9),
    F("own_fp32", _("fp32 peak"), "float", "67", unit="TFLOP/s", least=1e-6, most=1e9),
    F("own_bandwidth", _("Memory bandwidth"), "float", "3350", unit="GB/s", least=1e-6, most=1e9),
    F("own_power", _("Power"), "float", "700", unit="W", most=1e6),
)
LINKS: Final = (
    F(
        "intra",
        _("Intra-node link"),
        "float",
        hint=_("Per device and direction."),
        unit="GB/s",
        least=1e-6,
        most=1e9,
    ),
    F("inter", _("Inter-node link"), "float", unit="GB/s", least=1e-6, most=1e9),
    F(
        "host",
        _("Host memory"),
        "float",
        hint=_("Offloading uses it. Leave empty if unknown."),
        unit=_("GiB/device"),
        least=1e-6,
        most=1e6,
    ),
    F("price", _("Price"), "float", unit=_("$/device-hour"), least=0, most=1e6),
)
BATCH: Final = (
    F("seq_len", _("Sequence length"), "int", "8192", slide=_twos(9, 17), most=2**24),
    F("global_batch_size", _("Global batch"), "int", "128", slide=_twos(0, 13), most=2**24),
    F(
        "tokens",
        _("Training tokens"),
        "amount",
        "1T",
        hint=_("For example 300G or 1.5T; used for time and cost."),
        least=1,
        most=1e18,
        wide=True,
    ),
)
HOW: Final = (
    F(
        "framework",
        _("Framework"),
        "choice",
        "orrery",
        choices=tuple((name, name) for name in FRAMEWORKS),
    ),
    F(
        "objective",
        _("Rank by"),
        "choice",
        "time",
        choices=(("time", _("step time")), ("cost", _("cost")), ("memory", _("memory headroom"))),
    ),
)
TRAINED: Final = (
    F(
        "task",
        _("Objective"),
        "choice",
        "pretrain",
        choices=(
            ("pretrain", _("pre-training")),
            ("sft", _("supervised fine-tuning")),
            ("dpo", _("preferences (DPO, with a reference)")),
            ("reward", _("reward model")),
            ("distill", _("distillation from a teacher")),
        ),
        wide=True,
    ),
    F(
        "method",
        _("Trained weights"),
        "choice",
        "full",
        choices=(
            ("full", _("all weights")),
            ("lora", "LoRA"),
            ("qlora", "QLoRA (NF4)"),
            ("dora", "DoRA"),
            ("adapter", _("bottleneck adapters")),
            ("prefix", _("prefix tuning")),
            ("ia3", "IA3"),
            ("bitfit", "BitFit"),
        ),
    ),
    F("rank", _("Rank"), "int", "16", hint=_("Units or virtual tokens."), most=2**14),
    F(
        "teacher",
        _("Teacher"),
        "choice",
        ANY,
        hint=_("For distillation: its memory and time count."),
        choices=((ANY, _("none")), *((name, name) for name in PRESETS)),
        wide=True,
    ),
)
AXES: Final = (
    F(
        "micro_batch_size",
        _("Micro-batch"),
        "int",
        ANY,
        _("Leave empty for any."),
        slide=(0, *_twos(0, 6)),
        most=2**20,
        wide=True,
    ),
    F("dp", _("Data (dp)"), "int", ANY, most=2**20),
    F("tp", _("Tensor (tp)"), "int", ANY, most=2**20),
    F("pp", _("Pipeline (pp)"), "int", ANY, most=2**20),
    F("cp", _("Context (cp)"), "int", ANY, most=2**20),
    F("ep", _("Expert (ep)"), "int", ANY, most=2**20),
    F("zero", _("ZeRO stage"), "choice", ANY, choices=_any("0", "1", "2", "3")),
    F("precision", _("Precision"), "choice", "bf16", choices=_any("fp32", "bf16", "fp16", "fp8")),
    F("recompute", _("Recompute"), "choice", ANY, choices=_any("none", "selective", "full")),
    F(
        "schedule",
        _("Pipeline schedule"),
        "choice",
        ANY,
        choices=_any(
            "naive", "gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev", "pipedream"
        ),
    ),
    F("offload", _("Offload"), "choice", ANY, choices=_any("none", "optimizer", "all", "nvme")),
)

FIELDS: Final = {
    field.name: field
    for field in (*MODEL, *CLUSTER, *OWN_DEVICE, *LINKS, *BATCH, *TRAINED, *HOW, *AXES)
}
