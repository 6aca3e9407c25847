"""Completes the OpenAPI document: problem answers, paths as clients write them, and a valid 3.1
whatever ninja leaves.

Knows the document's form; does not know the operations.
"""

from __future__ import annotations

from typing import Any

from orchestrator.api.http.problems import MEDIA_TYPE, ProblemAnswer
from workers.contracts.base import Contract
from workers.contracts.catalog.devices import Device
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec

_CONTRACTS: dict[str, type[Contract]] = {
    "RunSpec": RunSpec,
    "ParallelPlan": ParallelPlan,
    "ProblemAnswer": ProblemAnswer,
    "Device": Device,
}
_PROBLEM = {"$ref": "#/components/schemas/ProblemAnswer"}


def completed(schema: dict[str, Any]) -> dict[str, Any]:
    """The same document, changed in place."""
    components = schema["components"]["schemas"]
    for name, model in _CONTRACTS.items():
        found = model.model_json_schema(ref_template="#/components/schemas/{model}")
        components.update(found.pop("$defs", {}))
        components[name] = found
    _name_contracts(schema)
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            operation["responses"] = {
                str(status): answer for status, answer in operation["responses"].items()
            }
            _name_headers(path, method, operation)
            operation["responses"]["default"] = {
                "description": "What is wrong, with which field, and what to do next",
                "content": {MEDIA_TYPE: {"schema": _PROBLEM}},
            }
    return schema


def _name_headers(path: str, method: str, operation: dict[str, Any]) -> None:
    """Headers that views read and write by themselves."""
    created = operation["responses"].get("201")
    if created is not None:
        operation["parameters"].append(
            _header("Idempotency-Key", "the same key and body make one thing, not two")
        )
        created["headers"] = {
            "Location": {"schema": {"type": "string"}, "description": "its address, if it has one"}
        }
    if path.endswith(("/runs/{id}", "/calibrations/{id}")) and method != "delete":
        given = (
            ("If-Match", "412 if somebody edited it since")
            if method == "patch"
            else ("If-None-Match", "304 if equal")
        )
        operation["parameters"].append(_header(*given))
        operation["responses"]["200"]["headers"] = {"ETag": {"schema": {"type": "string"}}}


def _header(name: str, message: str) -> dict[str, Any]:
    return {
        "in": "header",
        "name": name,
        "required": False,
        "schema": {"type": "string"},
        "description": message,
    }


def _name_contracts(node: Any) -> None:
    """Fields that carry a contract as plain JSON point to its schema."""
    for child in node.values() if isinstance(node, dict) else node:
        if isinstance(child, dict) and (name := child.pop("x-contract", None)):
            described = {key: child[key] for key in ("description", "title") if key in child}
            child.clear()
            child.update(described, **{"$ref": f"#/components/schemas/{name}"})
        if isinstance(child, dict | list):
            _name_contracts(child)
