"""Validates objects against the published schemas, as strictly as an API server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

FILES = ("kubernetes-1.34.json", "jobset.json", "kueue.json")


def problems(item: Mapping[str, Any]) -> list[str]:
    """What is wrong with an object, with the place of each fault; empty if it is valid."""
    kind = f"{item.get('apiVersion')}/{item.get('kind')}"
    if kind not in _schemas()[0]:
        return [f"no schema of {kind}"]
    validator = _validator(kind)
    return [
        f"{'/'.join(str(part) for part in error.absolute_path)}: {error.message[:300]}"
        for error in validator.iter_errors(dict(item))
    ]


@cache
def _validator(kind: str) -> Any:
    schemas, definitions = _schemas()
    return jsonschema.Draft7Validator({**schemas[kind], "definitions": definitions})


@cache
def _schemas() -> tuple[dict[str, Any], dict[str, Any]]:
    kinds: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for name in FILES:
        content = json.loads((Path(__file__).parent / name).read_text())
        kinds |= content["kinds"]
        definitions |= content["definitions"]
    for part in (*kinds.values(), *definitions.values()):
        _forbid_unknown(part)
    for kind in kinds.values():
        # custom resources describe metadata as any object
        if kind.get("properties", {}).get("metadata") == {"type": "object"}:
            name = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
            kind["properties"]["metadata"] = {"$ref": f"#/definitions/{name}"}
    return kinds, definitions


def _forbid_unknown(schema: Any) -> None:
    """Unknown fields are errors; a number or a text is an int-or-string."""
    if isinstance(schema, list):
        for one in schema:
            _forbid_unknown(one)
    if not isinstance(schema, dict):
        return
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        schema.setdefault("additionalProperties", False)
    for name, one in schema.items():
        if name == "properties":
            for field in one.values():
                _forbid_unknown(field)
        else:
            _forbid_unknown(one)
