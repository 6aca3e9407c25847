"""Writes docs/spec.md: every field of RunSpec with type, default, bounds and a description.

Types, defaults and bounds come from the contracts. A description is the text of the new-run form;
for a field that the form does not show, the comment at its definition, the docstring of its
contract, or the entry of `spec_descriptions`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from django.conf import settings
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
if not settings.configured:
    settings.configure(USE_I18N=False)  # marks of form texts need settings

from tools.spec_descriptions import DESCRIPTIONS  # noqa: E402
from webui.forms.spec_fields import FIELDS  # noqa: E402
from workers.contracts.specs.run import RunSpec  # noqa: E402

HEAD = """\
# Fields of a spec

Written by `python tools/spec_reference.py`; a test compares the two. A spec is the JSON that
`POST runs`, `orrery submit` and the new-run form accept; `examples/` has complete ones. Fields
without a default are required. Rules between fields are checked at submission, with a hint.
"""
_UNBOUNDED = 2**31 - 1  # the largest integer that a contract accepts is not a bound of its own
_BOUNDS = (
    ("minimum", "≥ {}"),
    ("exclusiveMinimum", "> {}"),
    ("maximum", "≤ {}"),
    ("exclusiveMaximum", "< {}"),
    ("minLength", "length ≥ {}"),
    ("maxLength", "length ≤ {}"),
    ("minItems", "at least {} entries"),
    ("maxItems", "at most {} entries"),
)


def text() -> str:
    """The content of docs/spec.md."""
    schema = RunSpec.model_json_schema(by_alias=True)
    contracts = {"RunSpec": schema, **schema["$defs"]}
    classes, places = _classes(RunSpec), _places(contracts)
    parts = [HEAD]
    for name, paths in places.items():
        parts.append(_section(name, contracts[name], classes, paths))
    return "\n".join(parts)


def _classes(root: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Contracts by name: `root` and all that its fields contain."""
    result: dict[str, type[BaseModel]] = {}
    open_: list[Any] = [root]
    while open_:
        item = open_.pop()
        if isinstance(item, type) and issubclass(item, BaseModel):
            if item.__name__ not in result:
                result[item.__name__] = item
                open_ += [field.annotation for field in item.model_fields.values()]
        else:
            open_ += get_args(item)
    return result


def _places(contracts: Mapping[str, Any]) -> dict[str, list[str]]:
    """Paths in a spec at which each contract occurs, in the order of the fields."""
    places: dict[str, list[str]] = {"RunSpec": [""]}
    open_ = [("RunSpec", "")]
    while open_:
        name, prefix = open_.pop(0)
        for field, schema in contracts[name].get("properties", {}).items():
            for other in _references(schema):
                path = f"{prefix}{field}"
                if "properties" in contracts[other] and path not in places.get(other, ()):
                    places.setdefault(other, []).append(path)
                    open_.append((other, f"{path}."))
    return places


def _references(schema: Any) -> Iterator[str]:
    """Names of the contracts that a field's schema contains, each once."""
    return iter(dict.fromkeys(re.findall(r"'#/\$defs/(\w+)'", repr(schema))))


def _section(name: str, schema: Mapping[str, Any], classes: Any, paths: Any) -> str:
    comments, required = _comments(classes[name]), schema.get("required", ())
    where = ", ".join(f"`{path}`" for path in paths if path)
    lines = [f"## {name}", "", f"At {where}.\n" if where else "The whole document.\n"]
    lines += ["| field | type | default | bounds | description |", "|---|---|---|---|---|"]
    for field, item in schema["properties"].items():
        full = (f"{path}.{field}" if path else field for path in paths)
        shown = next((FIELDS_BY_PATH[path] for path in full if path in FIELDS_BY_PATH), "")
        default = "required" if field in required else _default(item)
        cells = (
            f"`{field}`",
            _type(item),
            default,
            "; ".join(_bounds(item)),
            shown
            or comments.get(field)
            or comments.get(f"{field}_")
            or DESCRIPTIONS.get(f"{name}.{field}")
            or _summary(classes, item)
            or DESCRIPTIONS.get(field, ""),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _summary(classes: Mapping[str, type[BaseModel]], schema: Any) -> str:
    """The first sentence of the docstring of the one contract that a field contains."""
    names = [name for name in _references(schema) if name in classes]
    doc = inspect.getdoc(classes[names[0]]) if len(names) == 1 else None
    first = " ".join((doc or "").split("\n\n")[0].split())
    return first.split(". ")[0].rstrip(".") + "." if first else ""


FIELDS_BY_PATH = {field.path: field.help or field.label for field in FIELDS}


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(each) for each in options))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{value}`" for value in values)
    kind = schema.get("type", "any")
    if kind == "array":
        items = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        return f"list of {_type(items)}" if items else "list"
    names = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}
    return names.get(kind, kind)


def _bounds(schema: Mapping[str, Any]) -> list[str]:
    result = [
        text.format(schema[key])
        for key, text in _BOUNDS
        if key in schema and schema[key] not in (_UNBOUNDED, 2**63 - 1)
    ]
    for each in schema.get("anyOf") or schema.get("oneOf") or ():
        result += [bound for bound in _bounds(each) if bound not in result]
    return result


def _default(schema: Mapping[str, Any]) -> str:
    if "default" not in schema:
        return "derived"
    value = schema["default"]
    if value is None:
        return "–"
    if isinstance(value, dict):
        return "the object's defaults"
    if value == []:
        return "empty"
    shown = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else str(value)
    if not shown:
        return "empty"
    return f"`{shown}`"


def _comments(contract: type[BaseModel]) -> dict[str, str]:
    """The comment before or at the end of each field's definition, also of base classes."""
    comments: dict[str, str] = {}
    for base in reversed(contract.__mro__):
        if base is BaseModel or not issubclass(base, BaseModel):
            continue
        before: list[str] = []
        current = ""
        for line in inspect.getsource(base).split("\n")[1:]:
            if match := re.match(r"    # (.*)", line):
                before.append(match[1])
                current = ""
                continue
            if match := re.match(r"    (\w+): ", line):
                current = match[1]
                comments[current] = " ".join(before)
            before = []
            end = re.search(r"  # (.*)$", line)
            if current and end and not end[1].startswith(("type:", "noqa")):
                comments[current] = f"{comments[current]} {end[1]}".strip()
            if not line.strip():
                current = ""
    return comments


if __name__ == "__main__":
    (ROOT / "docs" / "spec.md").write_text(text())
