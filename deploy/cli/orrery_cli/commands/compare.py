"""`orrery compare`: runs next to each other; only what differs."""

from __future__ import annotations

from typing import Any

from orrery_cli.options import AsJson, RunIds
from orrery_cli.output import age, number, print_json, print_table, sparkline

_METRICS = ("loss", "tokens_per_s", "mfu")


def compare(ids: RunIds, as_json: AsJson = False) -> None:
    """Compare runs: the fields in which their specs differ, their newest numbers and losses."""
    from orrery_cli.client import Client

    with Client() as client:
        runs = [client.get(f"runs/{run}") for run in ids]
        losses = [client.get(f"runs/{run}/series", name="loss", points=64)["y"] for run in ids]
    fields = differences([{"spec": run["spec"], "plan": run["plan"]} for run in runs])
    if as_json:
        print_json({"runs": runs, "differences": fields, "losses": losses})
        return
    rows: list[tuple[Any, ...]] = [
        ("name", *(run["name"] for run in runs)),
        ("state", *(run["state"] for run in runs)),
        ("step", *(run["summary"].get("step") for run in runs)),
        *((name, *(number(run["summary"].get(name)) for run in runs)) for name in _METRICS),
        ("time", *(age(run["started"], run["ended"]) for run in runs)),
        ("loss over time", *(sparkline(values, 16) for values in losses)),
        *((path, *(_text(value) for value in values)) for path, values in fields.items()),
    ]
    print_table(("", *(f"run {run['id']}" for run in runs)), rows, empty="")


def differences(documents: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Paths of fields with different values, each with the value of every document."""
    flat = [dict(_leaves(document, "")) for document in documents]
    paths = dict.fromkeys(path for fields in flat for path in fields)
    columns = {path: [fields.get(path) for fields in flat] for path in paths}
    return {
        path: values
        for path, values in columns.items()
        if any(value != values[0] for value in values)
    }


def _leaves(node: Any, path: str) -> list[tuple[str, Any]]:
    if not isinstance(node, dict):
        return [(path, node)]
    return [
        leaf
        for name, child in node.items()
        for leaf in _leaves(child, f"{path}.{name}" if path else name)
    ]


def _text(value: Any) -> str:
    return "" if value is None else number(value, 6) if isinstance(value, float) else str(value)
