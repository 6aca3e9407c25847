"""What every export shares: the result, the refusal, the facts of one plan, and text without a
library.

Writes TOML, YAML and comments; does not know any engine's option names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.contracts import ClusterSpec, ModelSpec, ParallelPlan, plan_problems

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_PLAIN_YAML = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
# plain words that YAML 1.1 reads as something else
_YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


class Inexpressible(ValueError):
    """A plan or model that an engine cannot run: what, why, and which engine or change can."""


@dataclass(frozen=True, slots=True)
class Exported:
    """One engine's configuration: its text, a fitting file name, and what the file does not say or
    says otherwise.

    `notes` stand in the text as comments too, where the format has comments (JSON has none).
    """

    text: str
    filename: str
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class Job:
    """One export in the making: a legal plan for a model on a cluster, and the notes gathered on
    the way.

    `steps` is the number of optimizer steps and `lr` the learning rate, both left to the engine's
    default where None.
    """

    model: ModelSpec
    plan: ParallelPlan
    cluster: ClusterSpec
    seq_len: int
    steps: int | None = None
    lr: float | None = None
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises Inexpressible for a plan that is not legal for the model, the sequence or the
        cluster.
        """
        problems = plan_problems(
            self.plan, model=self.model, seq_len=self.seq_len, devices=self.cluster.devices
        )
        if problems:
            raise Inexpressible("; ".join(str(item) for item in problems))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def headline(self) -> str:
        """The plan in one line, `llama3-8b on 8 x h100-80g: dp 4, tp 2, ...`."""
        plan, cluster = self.plan, self.cluster
        degrees = ", ".join(
            f"{name} {getattr(plan, name)}" for name in ("dp", "tp", "pp", "cp", "ep", "zero")
        )
        batch = (
            f"micro-batch {plan.micro_batch_size} x {plan.accumulation}, global batch "
            f"{plan.global_batch_size}"
        )
        devices = f"{cluster.nodes} x {cluster.devices_per_node} x {cluster.device}"
        return f"{self.model.name} on {devices}: {degrees}, {batch}, {self.seq_len} tokens"

    def comments(self) -> list[str]:
        """The headline and every note as lines that open with `#`."""
        lines = [f"Written by Orrery: {self.headline}", *self.notes]
        return ["# " + " ".join(_printable(line).split()) for line in lines]


def refuse(engine: str, message: str, hint: str) -> Inexpressible:
    return Inexpressible(f"{engine} {message}; {hint}")


def note_cpu(job: Job, engine: str) -> None:
    if job.cluster.entry.kind == "cpu":
        job.note(
            f"{engine} trains on accelerators, the cluster's devices are CPUs: there only "
            "Orrery's own engine runs this"
        )


def note_gathering(job: Job, engine: str) -> None:
    """Limits on gathered ZeRO-3 weights, which most engines do not take."""
    for name in ("prefetch_layers", "max_live_params"):
        value = getattr(job.plan, name)
        if value is not None:
            job.note(f"{name} {value} has no counterpart in {engine}")


def torchrun(job: Job) -> str:
    """How each node starts its ranks; the address is of the first node."""
    nodes = f"--nnodes {job.cluster.nodes} --nproc-per-node {job.cluster.devices_per_node}"
    meeting = " --rdzv-backend c10d --rdzv-endpoint HOST:29500" if job.cluster.nodes > 1 else ""
    return f"torchrun {nodes}{meeting}"


def toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """TOML 1.0 of tables (dots in their names nest) of whole numbers, numbers, flags, text and
    nested lists of them.
    """
    blocks = []
    for name, values in tables.items():
        head = ".".join(_toml_key(part) for part in name.split("."))
        blocks.append(
            "\n".join(
                [
                    f"[{head}]",
                    *(f"{_toml_key(key)} = {_toml(value)}" for key, value in values.items()),
                ]
            )
        )
    return "\n\n".join(blocks) + "\n"


def yaml(values: Mapping[str, Any], indent: int = 0) -> str:
    """YAML of nested mappings of whole numbers, numbers, flags, text and None, in block style."""
    pad, lines = " " * indent, []
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines.append(f"{pad}{_yaml_text(key)}:" + ("" if value else " {}"))
            if value:
                lines.append(yaml(value, indent + 2).rstrip("\n"))
        else:
            lines.append(f"{pad}{_yaml_text(key)}: {_yaml(value)}")
    return "\n".join(lines) + "\n"


def commented(comments: Iterable[str], body: str) -> str:
    return "\n".join(comments) + "\n\n" + body


def _toml_key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _quoted(key)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        if value and isinstance(value[0], list):
            return "[\n" + "".join(f"    {_toml(item)},\n" for item in value) + "]"
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return _number(value) if isinstance(value, int | float) else _quoted(value)


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _number(value) if isinstance(value, int | float) else _yaml_text(value)


def _yaml_text(text: str) -> str:
    return (
        text if _PLAIN_YAML.fullmatch(text) and text.lower() not in _YAML_WORDS else _quoted(text)
    )


def _number(value: float) -> str:
    """As both formats read it back: YAML 1.1 wants a dot before an exponent, TOML a digit after the
    dot.
    """
    text = repr(value)
    if isinstance(value, float) and "e" in text:
        digits, _, power = text.partition("e")
        text = f"{digits if '.' in digits else digits + '.0'}e{int(power):+d}"
    return text


def _quoted(text: str) -> str:
    # a JSON string of ASCII is a basic string of TOML and a double-quoted one of YAML; DEL alone
    # needs an escape
    return json.dumps(_printable(text), ensure_ascii=False).replace("\x7f", "\\u007f")


def _printable(text: str) -> str:
    """Without lone surrogates and control characters, which neither format carries."""
    return "".join(c if c.isprintable() or c == " " else " " for c in text)
