"""`orrery plan`: the best parallel plans for a model on a cluster."""

from __future__ import annotations

from typing import Annotated, Any, Optional

import typer

from orrery_cli import spec_input
from orrery_cli.errors import USAGE, CliError
from orrery_cli.options import AsJson
from orrery_cli.output import duration, number, print_json, print_table, short_plan

OptionalText = Optional[str]  # noqa: UP045  (Python 3.10 with older releases of typer)
GIB = 2**30


def plan(
    model: Annotated[
        str, typer.Option(help="A preset, or a file with a ModelSpec or config.json.")
    ],
    device: Annotated[str, typer.Option(help="Device type, such as h100-80g.")] = "cpu",
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    devices_per_node: Annotated[int, typer.Option(min=1)] = 8,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 2048,
    global_batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 64,
    fix: Annotated[OptionalText, typer.Option(help="Fixed fields, as tp=8,zero=1.")] = None,
    objective: Annotated[OptionalText, typer.Option(help="time, cost, memory or devices.")] = None,
    calibration: Annotated[OptionalText, typer.Option(help="Id or name; `none`.")] = None,
    top: Annotated[int, typer.Option(min=1, max=200, help="Number of plans.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Search all legal plans, and list the best with predicted memory and speed."""
    from orrery_cli.client import Client

    body: dict[str, Any] = {
        "model": spec_input.read_document(model) if model.endswith(".json") else model,
        "cluster": {"device": device, "nodes": nodes, "devices_per_node": devices_per_node},
        "workload": {"seq_len": seq_len, "global_batch_size": global_batch},
        "top": top,
    }
    if fix:
        body["fix"] = _fixed(fix)
    body |= {"objective": objective} if objective else {}
    body |= {"calibration": calibration} if calibration else {}
    with Client() as client:
        answer = client.post("plans/search", body)
    if as_json:
        print_json(answer)
        return
    print(f"{answer['enumerated']:,} legal plans, {answer['fit']:,} fit")
    if not answer["fit"]:
        for item in answer.get("advice") or ():
            print(f"would fit: {item['message']}")
    print_table(
        ("plan", "micro-batch", "memory GiB", "step", "tokens/s per device", "MFU %", "bubble %"),
        (_row(entry, front=at in answer["pareto"]) for at, entry in enumerate(answer["plans"])),
        empty="No plan fits.",
        right=("micro-batch", "memory GiB", "step", "tokens/s per device", "MFU %", "bubble %"),
    )
    if answer["plans"]:
        print("* on the Pareto front of time and memory")
    for note in answer.get("notes") or ():
        print(note)


def _row(entry: dict[str, Any], *, front: bool) -> tuple[str, ...]:
    chosen, step_s = entry["plan"], entry["step_time_s"]
    more = f" {chosen['recompute']}" if chosen.get("recompute", "none") != "none" else ""
    return (
        f"{short_plan(chosen)}{more}{' *' if front else ''}",
        str(chosen["micro_batch_size"]),
        f"{entry['memory']['total_bytes'] / GIB:.1f}",
        f"{1000 * step_s:.3g} ms"
        if step_s < 1
        else f"{step_s:.3g} s"
        if step_s < 60
        else duration(step_s),
        number(entry["tokens_per_s_per_device"]),
        f"{100 * entry['mfu']:.1f}",
        f"{100 * (entry.get('bubble_fraction') or 0):.1f}",
    )


def _fixed(text: str) -> dict[str, Any]:
    fixed = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise CliError(f"--fix {part!r} has no value", "Write tp=8,zero=1.", code=USAGE)
        fixed[name] = spec_input.parse_value(value)
    return fixed
