"""Completes ninja's OpenAPI 3.1 document: problem responses, headers, contract schemas."""

from __future__ import annotations

from typing import Any

from orchestrator.api.http.problems import MEDIA_TYPE, ProblemDetails
from workers.contracts.base import Contract
from workers.contracts.catalog.devices import Device
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec

_CONTRACTS: dict[str, type[Contract]] = {
    "RunSpec": RunSpec,
    "ParallelPlan": ParallelPlan,
    "ProblemAnswer": ProblemDetails,
    "Device": Device,
}
_PROBLEM = {"$ref": "#/components/schemas/ProblemAnswer"}


def complete_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The document, completed in place."""
    components = schema["components"]["schemas"]
    for name, model in _CONTRACTS.items():
        model_schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        components.update(model_schema.pop("$defs", {}))
        components[name] = model_schema
    _drop_object_defaults(components)
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


def _drop_object_defaults(components: dict[str, Any]) -> None:
    """Remove defaults that are objects: client generators refuse them and drop the schema."""
    for schema in components.values():
        for field in schema.get("properties", {}).values():
            if isinstance(field, dict) and isinstance(field.get("default"), dict):
                del field["default"]


def _name_headers(path: str, method: str, operation: dict[str, Any]) -> None:
    """Document the headers that views read and write themselves."""
    created = operation["responses"].get("201")
    if created is not None:
        operation["parameters"].append(
            _header("Idempotency-Key", "a repeat with the same key and body creates nothing")
        )
        created["headers"] = {
            "Location": {"schema": {"type": "string"}, "description": "the new object's path"}
        }
    if path.endswith(("/runs/{id}", "/calibrations/{id}")) and method != "delete":
        precondition = (
            ("If-Match", "412 if it was edited since")
            if method == "patch"
            else ("If-None-Match", "304 if unchanged")
        )
        operation["parameters"].append(_header(*precondition))
        operation["responses"]["200"]["headers"] = {"ETag": {"schema": {"type": "string"}}}


def _header(name: str, description: str) -> dict[str, Any]:
    return {
        "in": "header",
        "name": name,
        "required": False,
        "schema": {"type": "string"},
        "description": description,
    }


def _name_contracts(node: Any) -> None:
    """Make fields with a contract as plain JSON refer to its schema."""
    for child in node.values() if isinstance(node, dict) else node:
        if isinstance(child, dict) and (name := child.pop("x-contract", None)):
            described = {key: child[key] for key in ("description", "title") if key in child}
            child.clear()
            child.update(described, **{"$ref": f"#/components/schemas/{name}"})
        if isinstance(child, dict | list):
            _name_contracts(child)
