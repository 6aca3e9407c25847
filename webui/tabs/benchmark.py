"""Results of a benchmark: every variant's seconds and bytes beside the base's, and what the devices
reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from django.http import HttpRequest

from orchestrator.runs.outputs.benchmark_table import benchmark_of
from webui.charts import links
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED
from workers.contracts.specs.benchmark_variants import BASE

_UNREST = 0.3  # quartiles of an idle machine's steps lie within a tenth
_EXACT = 1e-5  # of the loss: variants that only lay the same numbers out differently stay within it


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    table = benchmark_of(run=facts.run)
    measured = [row for row in table["rows"] if row["state"] == "measured"]
    slowest = max((row["high_s"] for row in measured), default=0.0)
    fullest = max((row["peak_bytes"] for row in measured), default=0.0)
    collectives, products = table["collectives"], table["products"]
    base = base_of(measured)
    return {
        "groups": groups([shown(row, base, slowest, fullest) for row in table["rows"]]),
        "says": summary(table, measured),
        "left_out": table["left_out"],
        "links": links.chart(collectives["rows"]) if collectives else None,
        "link_says": link_says(collectives) if collectives else "",
        "link_rows": links.rows(collectives["rows"]) if collectives else [],
        "products": links.products(products["rows"]) if products else None,
        "waits": facts.run.state not in ENDED,
        "usable": bool(measured) and facts.may_manage and facts.run.ended and facts.run.prediction,
        "device": (facts.run.prediction or {}).get("device") or "",
        "source": facts.source(),
    }


def groups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by technique, in their order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["technique"], []).append(row)
    return [{"title": name.replace("_", " "), "rows": some} for name, some in found.items()]


def shown(
    row: Mapping[str, Any], base: Mapping[str, Any] | None, slowest: float, fullest: float
) -> dict[str, Any]:
    """A row in words; places of its bars in per cent of the slowest and the fullest variant."""
    found: dict[str, Any] = {
        "technique": row["technique"],
        "name": row["name"],
        "state": row["state"],
        "says": row.get("says") or "",
    }
    if row["state"] != "measured":
        return found
    against = row.get("against_base") or {}
    tells = base is not None and apart(row, base)
    return found | {
        "seconds": formatting.seconds(row["step_time_s"]),
        "spread": f"{formatting.seconds(row['low_s'])} to {formatting.seconds(row['high_s'])}",
        "time_at": at(row["step_time_s"], slowest),
        "low_at": at(row["low_s"], slowest),
        "high_left": round(100 - at(row["high_s"], slowest), 2),
        "time_by": by(against.get("step_time_s"), row["technique"]),
        "time_mood": mood(against.get("step_time_s")) if tells else "",
        "samples": formatting.quantity(row["samples_per_s"]),
        "tokens": formatting.quantity(row["tokens_per_s"]),
        "bytes": formatting.memory(row["peak_bytes"]),
        "bytes_at": at(row["peak_bytes"], fullest),
        "bytes_by": by(against.get("peak_bytes"), row["technique"]),
        "bytes_mood": mood(against.get("peak_bytes")),
        "loss": formatting.quantity(row["loss"], 5),
        **deviation(row),
    }


def at(value: float, most: float) -> float:
    return round(100 * value / most, 2) if most else 0.0


def by(ratio: float | None, technique: str) -> str:
    """`-12%`, `×1.8` of the base."""
    if ratio is None or technique == BASE:
        return ""
    if abs(ratio - 1) < 0.005:
        return "same"
    if ratio >= 1.5:
        return f"×{formatting.quantity(ratio, 2)}"
    return f"{'+' if ratio > 1 else '−'}{abs(100 * (ratio - 1)):.0f}%"


def mood(ratio: float | None) -> str:
    """Only what is more than a tenth off the base is coloured: steps of one plan differ by less
    from run to run.
    """
    return "" if ratio is None or 0.9 <= ratio <= 1.1 else "good" if ratio < 1 else "bad"


def base_of(measured: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return next((row for row in measured if row["technique"] == BASE), None)


def apart(row: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Whether the middle halves of both's steps lie beside each other: what overlaps may be chance."""
    return bool(row["low_s"] > base["high_s"] or row["high_s"] < base["low_s"])


def unrest(measured: Sequence[Mapping[str, Any]]) -> float:
    """How far quartiles of a variant's steps lie from each other, by its median: the middle one of
    all variants.
    """
    return float(median((row["high_s"] - row["low_s"]) / row["step_time_s"] for row in measured))


def deviation(row: Mapping[str, Any]) -> dict[str, str]:
    """The largest difference of a step's loss to the base's, and whether the variant was meant to
    be exact.
    """
    off = formatting.number(row.get("deviation"))
    if row["technique"] == BASE or row.get("deviation") is None:
        return {"off": "", "off_mood": ""}
    if off is None:
        return {"off": "no number", "off_mood": "bad"}
    plan = row.get("plan") or {}
    rounded = plan.get("precision", "fp32") != "fp32" and row["technique"] in (
        "compile",
        "fused_kernels",
    )
    approximate = row["technique"] == "precision" or plan.get("schedule") == "pipedream" or rounded
    text = "equal" if off == 0 else f"{off:.0e}".replace("e-0", "e-")
    return {"off": text, "off_mood": "bad" if off > _EXACT and not approximate else ""}


def summary(table: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> str:
    """What came out, in a sentence or two."""
    waiting = sum(row["state"] == "waiting" for row in table["rows"])
    failed = sum(row["state"] == "failed" for row in table["rows"])
    base = base_of(measured)
    others = [row for row in measured if row["technique"] != BASE]
    told = []
    if base and others:
        fast = min(others, key=lambda row: row["step_time_s"])
        small = min(others, key=lambda row: row["peak_bytes"])
        quicker, less = (
            base["step_time_s"] / fast["step_time_s"],
            1 - small["peak_bytes"] / base["peak_bytes"],
        )
        told.append(
            f"{fast['name']} is fastest, {formatting.quantity(quicker, 3)} times as fast as the base"
            if quicker > 1.02 and apart(fast, base)
            else "No variant is clearly faster than the base"
        )
        if less > 0.02:
            told.append(f"{small['name']} needs least memory, {100 * less:.0f}% less than the base")
    if measured and unrest(measured) > _UNREST:
        told.append(
            f"Steps of one and the same variant differ by {100 * unrest(measured):.0f}%: the "
            "devices do other work as "
            "well, and differences whose lines overlap may be chance"
        )
    if waiting:
        told.append(
            f"{formatting.count(waiting, 'variant')} of {len(table['rows'])} still to be measured"
        )
    if failed:
        told.append(f"{formatting.count(failed, 'variant')} could not be measured")
    return (
        " ".join(f"{text[:1].upper()}{text[1:]}." for text in told)
        if told
        else "Nothing is measured yet."
    )


def link_says(collectives: Mapping[str, Any]) -> str:
    link, ranks = collectives.get("link"), collectives["ranks"]
    if not link:
        return f"{ranks} ranks over two kinds of links: the table tells both together."
    where = "inside the node" if link["where"] == "intra" else "between nodes"
    rate = links.rate(link["bytes_per_s"])
    return (
        f"{ranks} ranks {where}: {rate} at large sizes, {formatting.seconds(link['latency_s'])} a "
        "pass at small ones."
    )
