"""Parses planner request lines into requests, or into problems that name each wrong field.

Ignores `source`, keys that start with `_` and measurements; refuses any other unknown key.
Does not depend on formulas or Django.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from orchestrator.planner.model.frameworks import FRAMEWORKS, Framework, framework
from orchestrator.planner.plan_request import ParsedLine, ParseOptions, Scenario, Workload
from orchestrator.planner.search.open_settings import OPEN, settle
from orchestrator.planner.training_parsing import parse_training
from workers.contracts.base import Problem, Refused, problem, validation_problems
from workers.contracts.catalog.devices import DEVICES, Device
from workers.contracts.catalog.presets import PRESETS, preset
from workers.contracts.huggingface import UnreadableConfig, read_model
from workers.contracts.specs.cluster import ClusterSpec
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan

SCENARIO_KEYS = (
    "id",
    "model",
    "cluster",
    "workload",
    "framework",
    "train",
    "teacher",
    "source",
)
_LINE_KEYS = (*SCENARIO_KEYS, "plan", "measured")
_DTYPES = ("fp32", "bf16", "fp16")
_OPTIMIZERS = ("adamw", "adam", "adam8bit", "adamw8bit", "adafactor", "muon", "lion", "sgd")
_AUTO = "auto"
# allowed values of the framework's text fields
_FRAMEWORK_VALUES: dict[str, tuple[str, ...]] = {
    "params_dtype": _DTYPES,
    "grad_dtype": _DTYPES,
    "ring_grad_dtype": _DTYPES,
    "optimizer": _OPTIMIZERS,
    "attention_flops": ("full", "causal"),
    "fully_shard": ("rows", "flat"),
    "selective": ("core", "products", "alternate_products", "alternate_layers"),
}
# fields of the command line, and their place in a request line
_FLAT_FIELDS = {
    "device": ("cluster", "device"),
    "nodes": ("cluster", "nodes"),
    "devices_per_node": ("cluster", "devices_per_node"),
    "seq_len": ("workload", "seq_len"),
    "tokens": ("workload", "tokens"),
    "global_batch": ("workload", "global_batch_size"),
    "global_batch_size": ("workload", "global_batch_size"),
}


def parse_json_line(text: str) -> Any:
    """The JSON value of one line, or a Problem."""
    try:
        return json.loads(text)
    except RecursionError:
        return nesting_problem()
    except ValueError as error:
        return problem("", f"the line is not JSON: {error}", "Use one JSON object per line.")


def nesting_problem() -> Problem:
    """The problem of a line that is nested too deeply to parse."""
    return problem("", "the line is nested too deeply", "Use an object as in the documentation.")


def parse_line(
    line: Any,
    options: ParseOptions | None = None,
    choose_plan: Callable[[Scenario], ParallelPlan | list[Problem]] | None = None,
) -> ParsedLine:
    """Parses one request line; every wrong field becomes a problem. Does not raise for bad input.

    `choose_plan` supplies the plan if the line has none or "auto". A plan's null micro_batch_size
    or virtual_stages is open: the best legal choice is used.
    """
    if isinstance(line, Problem):
        return ParsedLine(problems=[line])
    if not isinstance(line, Mapping):
        message = f"a line is a JSON object, this is {_type_name(line)}"
        return ParsedLine(problems=[problem("", message, 'Use {"model": ...}.')])
    line = strip_comments(line)
    id_, measured = line.get("id"), line.get("measured")
    measured = dict(measured) if isinstance(measured, Mapping) else {}
    problems = unknown_key_problems(line, _LINE_KEYS)
    scenario, more = parse_scenario(line, options or ParseOptions())
    problems += more
    plan: ParallelPlan | None = None
    value = line.get("plan", _AUTO)
    open_ = [name for name in OPEN if isinstance(value, Mapping) and value.get(name, 0) is None]
    if open_:
        value = {name: item for name, item in value.items() if name not in open_}
    if "virtual_stages" in open_ and value.get("schedule") in ("interleaved_1f1b", "zb1p"):
        value = {**value, "virtual_stages": 2}
    if value is not None and value != _AUTO:
        plan, more = _parse_contract(ParallelPlan, value, "plan")
        problems += more
    elif scenario is not None and not problems:
        if choose_plan is None:
            problems.append(problem("plan", '"auto" is not supported here', "Use numbers."))
        elif isinstance(chosen := choose_plan(scenario), ParallelPlan):
            plan = chosen
        else:
            problems += chosen
    readable = not problems
    if plan is not None and scenario is not None:
        problems += _legality_problems(plan, scenario)
    elif plan is not None:
        problems += plan_problems(plan, model=None)
    if problems or plan is None or scenario is None:
        return ParsedLine(id_, None, problems, measured, illegal=readable)
    request = scenario.request(plan, str(id_ if id_ is not None else ""))
    return ParsedLine(id_, settle(request, open_, line.get("framework")), [], measured)


def nest_flat_fields(request: Mapping[str, Any]) -> dict[str, Any]:
    """Moves the command line's flat fields (`nodes`, `seq_len`, ...) to their place in a line.

    Nested values take precedence over flat ones.
    """
    line = {key: value for key, value in request.items() if key not in _FLAT_FIELDS}
    for key in (key for key in _FLAT_FIELDS if key in request):
        part, name = _FLAT_FIELDS[key]
        if line.get(part) is None:
            line[part] = {}
        if isinstance(line[part], Mapping):
            line[part] = {name: request[key], **line[part]}
    return line


def _legality_problems(plan: ParallelPlan, scenario: Scenario) -> list[Problem]:
    problems = plan_problems(
        plan,
        model=scenario.model,
        seq_len=scenario.workload.seq_len,
        devices=scenario.cluster.devices,
    )
    return [
        item.model_copy(update={"field": "workload.seq_len"}) if item.field == "seq_len" else item
        for item in problems
    ]


def parse_scenario(
    line: Mapping[str, Any], options: ParseOptions
) -> tuple[Scenario | None, list[Problem]]:
    """Model, cluster, workload, framework and training of a request line or of a search."""
    model, problems = parse_model(line.get("model"), files=options.files)
    cluster, device, more = parse_cluster(line.get("cluster"), options.devices)
    problems += more
    workload, more = _parse_contract(Workload, line.get("workload", {}), "workload")
    problems += more
    switches, more = _parse_framework(line.get("framework"))
    problems += more
    if model is None or cluster is None or workload is None or switches is None or problems:
        return None, problems
    teacher = None
    if line.get("teacher") is not None:
        teacher, more = parse_model(line["teacher"], files=options.files)
        problems += [
            item.model_copy(update={"field": f"teacher{item.field.removeprefix('model')}"})
            for item in more
        ]
    training, more = parse_training(
        line.get("train"), model=model, seq_len=workload.seq_len, teacher=teacher
    )
    problems += more
    if training is None or problems:
        return None, problems
    return Scenario(
        training.model, cluster, workload, switches, device, training.train, training.second
    ), problems


def parse_model(value: Any, *, files: bool = False) -> tuple[ModelSpec | None, list[Problem]]:
    """A preset's name, a ModelSpec, a Hugging Face config, or (if `files`) a path to either."""
    if value is None:
        hint = f"Use a preset ({', '.join(list(PRESETS)[:4])}, ...) or sizes."
        return None, [problem("model", "the model is missing", hint)]
    try:
        if isinstance(value, str):
            is_path = value not in PRESETS and ("/" in value or value.endswith(".json"))
            return read_model(value) if files and is_path else preset(value), []
        if isinstance(value, Mapping) and "model_type" in value:
            return read_model(value), []
    except UnreadableConfig as error:
        return None, [problem("model", error.message, error.hint)]
    except Refused as error:
        return None, [problem("model", error.message, error.hint)]
    return _parse_contract(ModelSpec, value, "model")


def unknown_key_problems(
    values: Mapping[str, Any], known: Iterable[str], prefix: str = ""
) -> list[Problem]:
    """A problem for each unknown key, with the most similar known one as hint."""
    known = tuple(known)
    return [
        problem(
            f"{prefix}{key}"[:120],
            f"{str(key)[:60]!r} is not a known field",
            f"Use {' or '.join(difflib.get_close_matches(str(key), known, n=1) or known)}.",
        )
        for key in values
        if key not in known
    ]


def _parse_contract(contract: type[Any], value: Any, name: str) -> tuple[Any, list[Problem]]:
    if not isinstance(value, Mapping):
        return None, [
            problem(
                name, f"{name} is an object, this is {_type_name(value)}", "Use an object {...}."
            )
        ]
    try:
        return contract.from_dict(value), []
    except ValidationError as error:
        return None, validation_problems(error, prefix=name)


def parse_cluster(
    value: Any, devices: Mapping[str, Device]
) -> tuple[ClusterSpec | None, Device | None, list[Problem]]:
    """The cluster, and its device if that is not from the catalogue.

    A device is a catalogue name, a name in `devices`, or an entry written out as an object.
    """
    device: Device | None = None
    problems: list[Problem] = []
    if isinstance(value, Mapping):
        device, problems = _parse_own_device(value.get("device"), devices)
        if problems:
            return None, None, problems
        if device is not None:
            # ClusterSpec accepts catalogue names only; `device` is what counts
            value = {**value, "device": "cpu"}
    cluster, problems = _parse_contract(ClusterSpec, {} if value is None else value, "cluster")
    return cluster, device, problems


def _parse_own_device(
    value: Any, devices: Mapping[str, Device]
) -> tuple[Device | None, list[Problem]]:
    device: Device | None = None
    if isinstance(value, Mapping):
        entry = {"name": "custom", "source": "given with the request", **value}
        device, problems = _parse_contract(Device, entry, "cluster.device")
        if problems:
            return None, problems
    elif isinstance(value, str) and value in devices:
        device = devices[value]
    elif isinstance(value, str) and value not in DEVICES and devices:
        names = [*devices, *DEVICES]
        near = difflib.get_close_matches(value, names, n=3, cutoff=0.3) or names
        message = f"{value!r} is neither in the device catalogue nor one of your own devices"
        return None, [problem("cluster.device", message, f"Use {' or '.join(near)}.")]
    if device is not None and not set(device.peak_tflops) & {"fp32", "bf16", "fp16", "fp8"}:
        message = "peak_tflops has no known precision"
        hint = 'Use {"fp32": 19.5, "bf16": 312}.'
        return None, [problem("cluster.device.peak_tflops", message, hint)]
    return device, []


def _parse_framework(value: Any) -> tuple[Framework | None, list[Problem]]:
    if value is not None and not isinstance(value, str | Mapping):
        message = f"a framework is a name or an object, this is {_type_name(value)}"
        return None, [problem("framework", message, 'Use "orrery".')]
    if isinstance(value, Mapping):
        value = {key: item for key, item in value.items() if item is not None}
        problems = _framework_problems(value)
        if problems:
            return None, problems
    try:
        return framework(value), []
    except Refused as error:
        return None, [problem(error.field or "framework.name", error.message, error.hint)]


def _framework_problems(values: Mapping[str, Any]) -> list[Problem]:
    """A problem for each field with a value of the wrong type. Unknown fields are ignored."""
    problems = []
    for key, value in values.items():
        default = getattr(FRAMEWORKS["orrery"], key, None)
        hint = ""
        if key == "name":
            hint = "" if isinstance(value, str) else f"Use one of {', '.join(sorted(FRAMEWORKS))}."
        elif key in _FRAMEWORK_VALUES:
            hint = (
                ""
                if value in _FRAMEWORK_VALUES[key]
                else f"Use one of {', '.join(_FRAMEWORK_VALUES[key])}."
            )
        elif isinstance(default, bool):
            hint = "" if isinstance(value, bool) else "Use true or false."
        elif isinstance(default, int):
            hint = (
                ""
                if type(value) is int and 1 <= value <= 2**20
                else "Use an integer of at least 1."
            )
        elif isinstance(default, float):
            hint = (
                ""
                if type(value) in (int, float) and 0 <= value <= 2**40
                else "Use a number of at least 0."
            )
        if hint:
            message = f"{_shortened(value)} is not a valid {key}"
            problems.append(problem(f"framework.{key}", message, hint))
    return problems


def strip_comments(value: Any) -> Any:
    """The value without keys that start with `_`, at every depth of objects."""
    if not isinstance(value, Mapping):
        return value
    return {
        str(key): strip_comments(item)
        for key, item in value.items()
        if not str(key).startswith("_")
    }


def _type_name(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "nothing")


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
