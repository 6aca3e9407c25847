"""From a planner line, as people and programs write it, to a request or to sentences that say what
is wrong.

Lenient where lines carry more than is asked (`source`, `_keys`, measurements), strict where a word
would otherwise be
silently misread. Knows no formula.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, ValidationError

from orchestrator.planner.model.frameworks import FRAMEWORKS, Framework, framework
from orchestrator.planner.model.inputs import Request
from workers.contracts.base import Contract, Problem, Refused, problem, problems_of
from workers.contracts.catalog.devices import DEVICES, Device
from workers.contracts.catalog.presets import PRESETS, preset
from workers.contracts.huggingface import UnreadableConfig, read_model
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.model import ModelSpec, Positive
from workers.contracts.specs.plan import ParallelPlan

SCENE_KEYS = ("id", "model", "cluster", "workload", "framework", "source")
LINE_KEYS = ("id", "model", "plan", "cluster", "workload", "framework", "measured", "source")
_DTYPES = ("fp32", "bf16", "fp16")
_OPTIMIZERS = ("adamw", "adam", "adam8bit", "adamw8bit", "adafactor", "muon", "lion", "sgd")
_AUTO = "auto"


# the command's words for a search, and where a line has them
_FLAT = {
    "device": ("cluster", "device"),
    "nodes": ("cluster", "nodes"),
    "devices_per_node": ("cluster", "devices_per_node"),
    "seq_len": ("workload", "seq_len"),
    "tokens": ("workload", "tokens"),
    "global_batch": ("workload", "global_batch_size"),
    "global_batch_size": ("workload", "global_batch_size"),
}


class BadRequest(ValueError):
    """A search or another question that cannot be answered; `problems` say what is wrong, field by
    field.
    """

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("; ".join(str(item) for item in problems))


class Workload(Contract):
    """What is trained: sequences of `seq_len`, `tokens` in all, `global_batch_size` where a plan is
    to be chosen.
    """

    seq_len: Positive
    global_batch_size: Positive | None = None
    tokens: Annotated[float, Field(gt=0)] | None = None


@dataclass(frozen=True)
class Scene:
    """A request without its plan: what search and "auto" choose one for."""

    model: ModelSpec
    cluster: ClusterSpec
    workload: Workload
    framework: Framework
    device: Device | None = None

    def request(self, plan: ParallelPlan, id: str = "") -> Request:
        return Request(
            self.model,
            plan,
            self.cluster,
            self.workload.seq_len,
            self.framework,
            self.workload.tokens,
            id,
            self.device,
        )


@dataclass(frozen=True)
class Asked:
    """One line, read. `request` is None where there are `problems`; `id` is given back as it came.

    `illegal` tells a plan that can be read but not run from a line that cannot be read.
    """

    id: Any = None
    request: Request | None = None
    problems: list[Problem] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    illegal: bool = False


class Choices:
    """What lines may name besides the catalogue: a person's own `devices` by name, and files where
    `files` allows.
    """

    def __init__(self, devices: Mapping[str, Device] | None = None, *, files: bool = False) -> None:
        self.devices, self.files = devices or {}, files


def parse(text: str) -> Any:
    """The JSON of one line, or a Problem."""
    try:
        return json.loads(text)
    except RecursionError:
        return problem("", "the line is nested beyond reason", "an object as in the documentation")
    except ValueError as error:
        return problem("", f"the line is not JSON: {error}", "one JSON object a line")


def read(
    line: Any,
    choices: Choices | None = None,
    choose: Callable[[Scene], ParallelPlan | list[Problem]] | None = None,
) -> Asked:
    """One line. Never raises for bad input: every wrong field is a problem `{field, message, try}`.

    `choose` finds the plan where it is "auto" or left out.
    """
    if isinstance(line, Problem):
        return Asked(problems=[line])
    if not isinstance(line, Mapping):
        return Asked(
            problems=[
                problem("", f"a line is a JSON object, this is {_kind(line)}", '{"model": ...}')
            ]
        )
    line = without_comments(line)
    id_, measured = line.get("id"), line.get("measured")
    measured = dict(measured) if isinstance(measured, Mapping) else {}
    problems = unknown_keys(line, LINE_KEYS)
    scene, more = read_scene(line, choices or Choices())
    problems += more
    plan: ParallelPlan | None = None
    given = line.get("plan", _AUTO)
    if given is None or given == _AUTO:
        if scene is not None and not problems:
            found = (
                choose(scene)
                if choose
                else [problem("plan", '"auto" is not chosen here', "numbers")]
            )
            problems += found if isinstance(found, list) else []
            plan = None if isinstance(found, list) else found
    else:
        plan, more = _contract(ParallelPlan, given, "plan")
        problems += more
    readable = not problems
    if plan is not None and scene is not None:
        problems += legality(plan, scene)
    elif plan is not None:
        problems += plan_problems(plan, model=None)
    if problems or plan is None or scene is None:
        return Asked(id_, None, problems, measured, illegal=readable)
    return Asked(id_, scene.request(plan, str(id_ if id_ is not None else "")), [], measured)


def folded(asked: Mapping[str, Any]) -> dict[str, Any]:
    """A search in the command's words (`nodes`, `seq_len`, `global_batch`) as one in a line's,
    which win over them.
    """
    line = {key: value for key, value in asked.items() if key not in _FLAT}
    for key in (key for key in _FLAT if key in asked):
        part, name = _FLAT[key]
        if line.get(part) is None:
            line[part] = {}
        if isinstance(line[part], Mapping):
            line[part] = {name: asked[key], **line[part]}
    return line


def legality(plan: ParallelPlan, scene: Scene) -> list[Problem]:
    """What makes the plan illegal for this model, sequence and number of devices."""
    found = plan_problems(
        plan, model=scene.model, seq_len=scene.workload.seq_len, devices=scene.cluster.devices
    )
    return [
        item.model_copy(update={"field": "workload.seq_len"}) if item.field == "seq_len" else item
        for item in found
    ]


def read_scene(line: Mapping[str, Any], choices: Choices) -> tuple[Scene | None, list[Problem]]:
    """Model, cluster, workload and framework of a line or of a search."""
    model, problems = read_shape(line.get("model"), files=choices.files)
    cluster, device, more = read_cluster(line.get("cluster"), choices.devices)
    problems += more
    workload, more = _contract(Workload, line.get("workload", {}), "workload")
    problems += more
    switches, more = _framework(line.get("framework"))
    problems += more
    if model is None or cluster is None or workload is None or switches is None or problems:
        return None, problems
    return Scene(model, cluster, workload, switches, device), problems


def read_shape(given: Any, *, files: bool = False) -> tuple[ModelSpec | None, list[Problem]]:
    """A preset's name, a ModelSpec's fields, a Hugging Face config's content, or (with `files`) a
    path to either.
    """
    if given is None:
        return None, [
            problem(
                "model",
                "there is no model",
                f"a preset ({', '.join(list(PRESETS)[:4])}, ...) or sizes",
            )
        ]
    try:
        if (
            isinstance(given, str)
            and given not in PRESETS
            and files
            and ("/" in given or given.endswith(".json"))
        ):
            return read_model(given), []
        if isinstance(given, str):
            return preset(given), []
        if isinstance(given, Mapping) and "model_type" in given:
            return read_model(given), []
    except UnreadableConfig as error:
        message, _, next_ = str(error).rpartition("; ")
        return None, [problem("model", message or next_, next_ if message else "")]
    except Refused as error:
        return None, [problem("model", error.message, error.hint)]
    return _contract(ModelSpec, given, "model")


def unknown_keys(given: Mapping[str, Any], known: Iterable[str], prefix: str = "") -> list[Problem]:
    """A problem for each key that is not known, with the nearest that is."""
    known = tuple(known)
    found = []
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            found.append(
                problem(
                    f"{prefix}{key}"[:120],
                    f"{str(key)[:60]!r} is not known here",
                    ", ".join(near or known),
                )
            )
    return found


def _contract(contract: type[Any], given: Any, name: str) -> tuple[Any, list[Problem]]:
    if not isinstance(given, Mapping):
        return None, [problem(name, f"{name} is an object, this is {_kind(given)}", "{...}")]
    try:
        return contract.from_dict(given), []
    except ValidationError as error:
        return None, problems_of(error, prefix=name)


def read_cluster(
    given: Any, devices: Mapping[str, Device]
) -> tuple[ClusterSpec | None, Device | None, list[Problem]]:
    """A device may be a catalogue entry, one of a person's own by name, or an entry written out in
    its place.
    """
    device: Device | None = None
    if isinstance(given, Mapping):
        named = given.get("device")
        if isinstance(named, Mapping):
            device, problems = _contract(
                Device,
                {"name": "custom", "source": "given with the request", **named},
                "cluster.device",
            )
            if problems:
                return None, None, problems
        elif isinstance(named, str) and named in devices:
            device = devices[named]
        elif isinstance(named, str) and named not in DEVICES and devices:
            near = difflib.get_close_matches(named, [*devices, *DEVICES], n=3, cutoff=0.3) or [
                *devices,
                *DEVICES,
            ]
            message = f"{named!r} is neither in the device catalogue nor one of your own"
            return None, None, [problem("cluster.device", message, ", ".join(near))]
        if device is not None and not set(device.peak_tflops) & {"fp32", "bf16", "fp16", "fp8"}:
            message = "peak_tflops names no precision that is known"
            return (
                None,
                None,
                [problem("cluster.device.peak_tflops", message, '{"fp32": 19.5, "bf16": 312}')],
            )
        if device is not None:
            # a name that the contract knows; `device` is what counts
            given = {**given, "device": "cpu"}
    cluster, problems = _contract(ClusterSpec, {} if given is None else given, "cluster")
    return cluster, device, problems


def _framework(given: Any) -> tuple[Framework | None, list[Problem]]:
    if given is not None and not isinstance(given, str | Mapping):
        return None, [
            problem(
                "framework",
                f"a framework is a name or an object, this is {_kind(given)}",
                '"orrery"',
            )
        ]
    if isinstance(given, Mapping):
        given = {key: value for key, value in given.items() if value is not None}
        problems = _switch_problems(given)
        if problems:
            return None, problems
    try:
        return framework(given), []
    except Refused as error:
        return None, [problem(error.field or "framework.name", error.message, error.hint)]


_WORDS: dict[str, tuple[str, ...]] = {
    "params_dtype": _DTYPES,
    "grad_dtype": _DTYPES,
    "ring_grad_dtype": _DTYPES,
    "optimizer": _OPTIMIZERS,
    "attention_flops": ("full", "causal"),
    "fully_shard": ("rows", "flat"),
    "selective": ("core", "products"),
}


def _switch_problems(given: Mapping[str, Any]) -> list[Problem]:
    """Each switch has a type: what is of another would be misread as a number.

    Unknown switches are ignored.
    """
    found = []
    for key, value in given.items():
        usual = getattr(FRAMEWORKS["orrery"], key, None)
        hint = ""
        if key == "name":
            hint = "" if isinstance(value, str) else ", ".join(sorted(FRAMEWORKS))
        elif key in _WORDS:
            hint = "" if value in _WORDS[key] else ", ".join(_WORDS[key])
        elif isinstance(usual, bool):
            hint = "" if isinstance(value, bool) else "true or false"
        elif isinstance(usual, int):
            hint = "" if type(value) is int and 1 <= value <= 2**20 else "a whole number from 1"
        elif isinstance(usual, float):
            hint = "" if type(value) in (int, float) and 0 <= value <= 2**40 else "a number from 0"
        if hint:
            found.append(
                problem(f"framework.{key}", f"{_shown(value)} is not what {key} can be", hint)
            )
    return found


def without_comments(given: Any) -> Any:
    """The same without keys that start with `_`, at every depth of objects."""
    if not isinstance(given, Mapping):
        return given
    return {
        str(key): without_comments(value)
        for key, value in given.items()
        if not str(key).startswith("_")
    }


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "nothing")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
