"""Converts form values to a spec and back, like `static/webui/js/spec_form.js` (a test compares).

A value that cannot be parsed stays as typed, so the contract reports it. Spec keys that the form
does not show are preserved.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from webui.forms.spec_fields import (
    ANSWERS,
    BODIES,
    CUSTOM_MODEL,
    DATA_SET,
    FIELDS,
    MODEL_OF_WEIGHTS,
    OWN_FILE,
    OWN_JSON,
    OWN_PATH,
    SECTIONS,
    SMOLLM2,
    TRAINS,
    SpecField,
    exists,
)
from workers.contracts.catalog.presets import PRESETS
from workers.contracts.specs.inference_support import PACKAGES

_SPECIAL = {"model", "model.custom", "weights", "model.path", "data.preset", "plan"}
_NO_FILTERS = "none"
_FILTER_NUMBERS = {"threshold", "min_chars", "max_chars", "tolerance", "n"}
_BY_FORM = (*TRAINS, *ANSWERS, "script", "external")


def spec_of(values: Mapping[str, str], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the spec of the field values, laid over `base`."""
    kind = values.get("kind", "train")
    spec: dict[str, Any] = {"kind": kind} | deepcopy(dict(base or {})) | {"kind": kind}
    for body in BODIES:
        if body != kind:
            spec.pop(body, None)
    if kind in (*TRAINS, *ANSWERS):
        spec.setdefault(kind, {})
    own = {
        key
        for section in SECTIONS
        if not section.kinds or kind in section.kinds
        for key in section.owns
    }
    for section in SECTIONS:
        if section.kinds and kind not in section.kinds:
            if kind in _BY_FORM:  # other kinds are edited as JSON
                for key in set(section.owns) - own:
                    spec.pop(key, None)
            continue
        if section.key == "model":
            _model(spec, values)
        if section.key == "weights":
            _weights(spec, values)
        if section.key == "data":
            _data(spec, values)
        if section.key == "plan" and values.get("plan") == "auto" and kind in TRAINS:
            spec["plan"] = "auto"
            continue
        for field in (*section.fields, *section.more):
            if not field.applies_to(kind):
                continue
            if not exists(field, values):
                _put(spec, field, None)
            elif field.path not in _SPECIAL and not (
                field.path.startswith("data.") and _preset_chosen(values)
            ):
                _put(spec, field, parse(field, values.get(field.path, "")))
    for field in FIELDS:
        if field.gates and (not values.get(field.path, "").strip() or not exists(field, values)):
            _remove(spec, field.parent)
    return _tidy(spec)


def values_of(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return the field values of a spec; a missing key is empty, or its choice's default."""
    values = {"kind": str(spec.get("kind", "train"))}
    for field in FIELDS:
        if field.path not in _SPECIAL:
            values[field.path] = format_value(field, _at(spec, field.path))
        if field.kind == "choice" and not values.get(field.path):
            values[field.path] = field.default
    of_weights = _at(spec, "train.init_from") is not None
    model = spec.get("model", MODEL_OF_WEIGHTS if of_weights else "llama-tiny")
    values["model"] = model if isinstance(model, str) else CUSTOM_MODEL
    values["model.custom"] = "" if isinstance(model, str) else json.dumps(model, indent=2)
    values |= _weights_choice(spec)
    values["data.preset"] = _data_choice(spec)
    if values["data.preset"] == OWN_JSON:
        values["data.tokenizer"] = ""
    values["plan"] = "auto" if spec.get("plan") == "auto" else "hand"
    return values


def parse(field: SpecField, text: str) -> Any:
    """Parse a field's text; None if empty, the text itself if it cannot be parsed."""
    text = text.strip()
    if field.kind == "flag":
        return True if text in ("on", "true", "1") else None
    if not text:
        return None
    try:
        match field.kind:
            case "int":
                return int(text)
            case "float":
                return int(text) if text.lstrip("-").isdigit() else float(text)
            case "floats":
                return [float(part) for part in text.replace(",", " ").split()]
            case "ints":
                return [int(part) for part in text.replace(",", " ").split()]
            case "words":
                return [word.strip() for word in text.split(",") if word.strip()]
            case "weighted":
                return [_task(word.strip()) for word in text.split(",") if word.strip()]
            case "filters":
                return _filters(text)
            case "argv":
                return shlex.split(text)
            case "pairs":
                lines = [line.strip() for line in text.splitlines() if line.strip()]
                return {
                    name.strip(): value
                    for name, _, value in (line.partition("=") for line in lines)
                }
            case "json":
                return json.loads(text)
            case "model":
                return _reference(text)
            case "choice" if field.path == "plan.zero":
                return int(text)
            case "choice" if text in ("true", "false"):
                return text == "true"
    except ValueError:
        return text
    return text


def format_value(field: SpecField, value: Any) -> str:
    """Format a value as its field's text."""
    if field.kind == "choice" and isinstance(value, bool):
        return str(value).lower()
    if field.kind == "json" and isinstance(value, list | dict):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)  # as browsers do
    if field.kind == "filters" and isinstance(value, list):
        return "\n".join(map(_filter_text, value)) or _NO_FILTERS
    if value is None or value is False:
        return ""
    if value is True:
        return "on"
    if field.kind in ("words", "floats", "ints") and isinstance(value, list):
        return ", ".join(str(item) for item in value)
    if field.kind == "weighted" and isinstance(value, list):
        return ", ".join(map(_task_text, value))
    if field.kind == "model":
        return _named(value)
    if field.kind == "argv" and isinstance(value, list):
        return shlex.join(str(item) for item in value)
    if field.kind == "pairs" and isinstance(value, Mapping):
        return "\n".join(f"{name}={item}" for name, item in value.items())
    return _number_text(value)


def _number_text(value: Any) -> str:
    return (
        str(int(value))
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15
        else str(value)
    )


def _number(text: str) -> int | float:
    """Raises ValueError."""
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def _task(word: str) -> Any:
    """A task type, or one with its weight after a colon."""
    name, colon, weight = word.partition(":")
    if not colon:
        return word
    return {"task_type": name.strip(), "weight": _number(weight.strip())}


def _task_text(task: Any) -> str:
    if isinstance(task, Mapping) and "task_type" in task:
        weight = task.get("weight")
        return f"{task['task_type']}" + (f":{_number_text(weight)}" if weight is not None else "")
    return str(task)


def _filters(text: str) -> Any:
    """Filters by line: `kind name=value …`, quoted like a shell's words."""
    if text == _NO_FILTERS:
        return []
    filters = []
    for line in text.splitlines():
        if not line.strip():
            continue
        kind, *options = shlex.split(line)
        item: dict[str, Any] = {"kind": kind}
        for option in options:
            name, _, value = option.partition("=")
            item[name] = _option(name, value)
        filters.append(item)
    return filters


def _option(name: str, value: str) -> Any:
    try:
        return _number(value) if name in _FILTER_NUMBERS else value
    except ValueError:
        return value


def _filter_text(item: Any) -> str:
    if not isinstance(item, Mapping):
        return str(item)
    options = [f"{name}={_number_text(value)}" for name, value in item.items() if name != "kind"]
    return shlex.join([str(item.get("kind", "")), *options])


def _reference(text: str) -> Any:
    """A preset, a package of weights, a ModelSpec as JSON, or else a path."""
    if text in PRESETS:
        return text
    if text.startswith("{"):
        return json.loads(text)
    return {"package": text} if text in PACKAGES else {"path": text}


def _named(value: Any) -> str:
    """The text that `_reference` parses to this value."""
    if isinstance(value, Mapping) and len(value) == 1:
        for name, known in (("path", True), ("package", value.get("package") in PACKAGES)):
            if known and isinstance(value.get(name), str):
                return str(value[name])
    return value if isinstance(value, str) else json.dumps(value)


def _preset_chosen(values: Mapping[str, str]) -> bool:
    return values.get("data.preset", "shakespeare") != OWN_FILE


def _model(spec: dict[str, Any], values: Mapping[str, str]) -> None:
    chosen = values.get("model", "").strip() or "llama-tiny"
    if chosen == MODEL_OF_WEIGHTS:
        spec.pop("model", None)
        return
    if chosen != CUSTOM_MODEL:
        spec["model"] = chosen
        return
    text = values.get("model.custom", "").strip()
    try:
        spec["model"] = json.loads(text) if text else {}
    except ValueError:
        spec["model"] = text


def _weights(spec: dict[str, Any], values: Mapping[str, str]) -> None:
    chosen = values.get("weights", "").strip() or SMOLLM2
    if chosen != OWN_JSON:
        path = values.get("model.path", "").strip()
        spec["model"] = {"path": path} if chosen == OWN_PATH else {"package": chosen}


def _weights_choice(spec: Mapping[str, Any]) -> dict[str, str]:
    """Other models stay in the JSON; non-inference kinds preselect the first package."""
    model = spec.get("model")
    reference = model if isinstance(model, Mapping) else {}
    path, package = reference.get("path"), reference.get("package")
    if isinstance(path, str) and len(reference) == 1:
        return {"weights": OWN_PATH, "model.path": path}
    if spec.get("kind") not in ANSWERS or (package == SMOLLM2 and len(reference) == 1):
        return {"weights": SMOLLM2, "model.path": ""}
    return {"weights": OWN_JSON, "model.path": ""}


def _data_choice(spec: Mapping[str, Any]) -> str:
    if _at(spec, "data.sources") is not None or isinstance(_at(spec, "data.tokenizer"), Mapping):
        return OWN_JSON
    if isinstance(name := _at(spec, "data.dataset"), str):
        return DATA_SET + name
    return OWN_FILE if _at(spec, "data.path") is not None else "shakespeare"


def _data(spec: dict[str, Any], values: Mapping[str, str]) -> None:
    chosen = values.get("data.preset") or "shakespeare"
    if chosen == OWN_JSON:
        return
    if chosen.startswith(DATA_SET):
        if chosen != _data_choice(spec):  # else its options stay
            spec["data"] = {"dataset": chosen.removeprefix(DATA_SET)}
        return
    if _preset_chosen(values):
        spec["data"] = {"preset": chosen}
        return
    data = spec["data"] if isinstance(spec.get("data"), dict) else {}
    for other in ("preset", "sources", "dataset", "fingerprint"):
        data.pop(other, None)
    # keep an empty path: without it the spec would mean the preset again
    spec["data"] = {**data, "path": values.get("data.path", "").strip()}


def _put(spec: dict[str, Any], field: SpecField, value: Any) -> None:
    *parents, name = field.path.split(".")
    # omit choices that equal the default unless present: a short spec reads better
    place: Any = spec
    for parent in parents:
        inner = place.get(parent)
        if not isinstance(inner, dict):
            if value is None:
                return
            inner = place[parent] = {}
        place = inner
    if value is None:
        if field.path != "data.path":
            place.pop(name, None)
    elif name in place or field.kind != "choice" or str(value) != field.default:
        place[name] = value


def _remove(spec: dict[str, Any], path: str) -> None:
    *parents, name = path.split(".")
    place = _at(spec, ".".join(parents)) if parents else spec
    if isinstance(place, dict):
        place.pop(name, None)


def _at(spec: Mapping[str, Any], path: str) -> Any:
    place: Any = spec
    for name in path.split("."):
        if not isinstance(place, Mapping):
            return None
        place = place.get(name)
    return place


def _tidy(spec: dict[str, Any]) -> dict[str, Any]:
    """Remove objects that the form emptied, except `data` and the body."""
    plan = spec.get("plan")
    if isinstance(plan, dict) and plan.get("loss_scale") == {}:
        del plan["loss_scale"]
    for key in ("plan", "resources", "retries"):
        if spec.get(key) == {}:
            del spec[key]
    for kind in ("serve", "generate"):
        body = spec.get(kind)
        if isinstance(body, dict) and body.get("speculate") == {}:
            del body["speculate"]
    body = spec.get("produce")
    if isinstance(body, dict):
        for key in ("judge", "score"):
            if body.get(key) == {}:
                del body[key]
    train = spec.get("train")
    for judged in (
        spec.get("evaluate"),
        train.get("evaluate") if isinstance(train, dict) else None,
    ):
        if isinstance(judged, dict) and judged.get("judge") == {}:
            del judged["judge"]
    if isinstance(train, dict):
        for policy in (train.get("grpo"), train.get("ppo")):
            if isinstance(policy, dict):
                for key in ("kl", "clip", "rollout", "staleness", "gae", "value"):
                    if policy.get(key) == {}:
                        del policy[key]
        for key in ("optimizer", "lr_schedule", "sft", "dpo", "reward", "distill", "grpo", "ppo"):
            if train.get(key) == {}:
                del train[key]
    return spec
