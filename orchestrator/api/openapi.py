"""Completes the OpenAPI document: problem answers, paths as clients write them, and a valid 3.1 whatever ninja leaves.

Knows the document's form; does not know the operations.
"""

from __future__ import annotations

from typing import Any

from orchestrator.api.problems import MEDIA_TYPE, ProblemAnswer
from workers.contracts.base import Contract
from workers.contracts.plan import ParallelPlan
from workers.contracts.run import RunSpec

_CONTRACTS: dict[str, type[Contract]] = {
    "RunSpec": RunSpec,
    "ParallelPlan": ParallelPlan,
    "ProblemAnswer": ProblemAnswer,
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
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"] = {str(status): answer for status, answer in operation["responses"].items()}
            operation["responses"]["default"] = {
                "description": "What is wrong, with which field, and what to do next",
                "content": {MEDIA_TYPE: {"schema": _PROBLEM}},
            }
    return schema


def _name_contracts(node: Any) -> None:
    """Fields that carry a contract as plain JSON point to its schema."""
    for child in node.values() if isinstance(node, dict) else node:
        if isinstance(child, dict) and (name := child.pop("x-contract", None)):
            described = {key: child[key] for key in ("description", "title") if key in child}
            child.clear()
            child.update(described, **{"$ref": f"#/components/schemas/{name}"})
        if isinstance(child, dict | list):
            _name_contracts(child)
