"""Results tab of a benchmark: time and memory of each variant vs the baseline; device speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from orchestrator.runs.outputs.benchmark_table import benchmark_of
from webui.charts import links
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED
from workers.contracts.specs.benchmarks.variants import BASE

_NOISY = 0.3  # on an idle machine, quartiles of step times lie within a tenth
_EXACT = 1e-5  # relative loss difference that exact variants stay within


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    table = benchmark_of(run=facts.run)
    measured = [row for row in table["rows"] if row["state"] == "measured"]
    slowest = max((row["high_s"] for row in measured), default=0.0)
    fullest = max((row["peak_bytes"] for row in measured), default=0.0)
    collectives, products = table["collectives"], table["products"]
    base = find_base(measured)
    return {
        "groups": groups([format_row(row, base, slowest, fullest) for row in table["rows"]]),
        "summary": summary(table, measured),
        "left_out": table["left_out"],
        "links": links.chart(collectives["rows"]) if collectives else None,
        "link_summary": link_summary(collectives) if collectives else "",
        "link_rows": links.rows(collectives["rows"]) if collectives else [],
        "products": links.products(products["rows"]) if products else None,
        "waiting": facts.run.state not in ENDED,
        "usable": bool(measured) and facts.may_manage and facts.run.ended and facts.run.prediction,
        "device": (facts.run.prediction or {}).get("device") or "",
        "source": facts.source(),
    }


def groups(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group rows by technique, in order."""
    by_technique: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_technique.setdefault(row["technique"], []).append(row)
    return [{"title": name.replace("_", " "), "rows": some} for name, some in by_technique.items()]


def format_row(
    row: Mapping[str, Any], base: Mapping[str, Any] | None, slowest: float, fullest: float
) -> dict[str, Any]:
    """Return a row as text; its bars in percent of the slowest and the largest variant."""
    result: dict[str, Any] = {
        "technique": row["technique"],
        "name": row["name"],
        "state": row["state"],
        "message": row.get("message", row.get("says")) or "",
    }
    if row["state"] != "measured":
        return result
    against = row.get("against_base") or {}
    significant = base is not None and differs(row, base)
    return result | {
        "seconds": formatting.seconds(row["step_time_s"]),
        "spread": _("%(low)s to %(high)s")
        % {"low": formatting.seconds(row["low_s"]), "high": formatting.seconds(row["high_s"])},
        "time_at": at(row["step_time_s"], slowest),
        "low_at": at(row["low_s"], slowest),
        "high_left": round(100 - at(row["high_s"], slowest), 2),
        "time_by": format_ratio(against.get("step_time_s"), row["technique"]),
        "time_mood": mood(against.get("step_time_s")) if significant else "",
        "samples": formatting.quantity(row["samples_per_s"]),
        "tokens": formatting.quantity(row["tokens_per_s"]),
        "bytes": formatting.memory(row["peak_bytes"]),
        "bytes_at": at(row["peak_bytes"], fullest),
        "bytes_by": format_ratio(against.get("peak_bytes"), row["technique"]),
        "bytes_mood": mood(against.get("peak_bytes")),
        "loss": formatting.quantity(row["loss"], 5),
        **deviation(row),
    }


def at(value: float, largest: float) -> float:
    """Return percent of the largest value."""
    return round(100 * value / largest, 2) if largest else 0.0


def format_ratio(ratio: float | None, technique: str) -> str:
    """Format a ratio to the baseline: `−12%`, `×1.8`."""
    if ratio is None or technique == BASE:
        return ""
    if abs(ratio - 1) < 0.005:
        return _("same")
    if ratio >= 1.5:
        return f"×{formatting.quantity(ratio, 2)}"
    return f"{'+' if ratio > 1 else '−'}{abs(100 * (ratio - 1)):.0f}%"


def mood(ratio: float | None) -> str:
    """Return good or bad if the ratio differs by more than 10%, else empty.

    Step times of one plan vary by less between runs.
    """
    return "" if ratio is None or 0.9 <= ratio <= 1.1 else "good" if ratio < 1 else "bad"


def find_base(measured: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the baseline's row, if measured."""
    return next((row for row in measured if row["technique"] == BASE), None)


def differs(row: Mapping[str, Any], base: Mapping[str, Any]) -> bool:
    """Whether the interquartile ranges do not overlap; overlapping differences may be noise."""
    return bool(row["low_s"] > base["high_s"] or row["high_s"] < base["low_s"])


def noise(measured: Sequence[Mapping[str, Any]]) -> float:
    """Return the median over variants of the interquartile range relative to the median step."""
    return float(median((row["high_s"] - row["low_s"]) / row["step_time_s"] for row in measured))


def deviation(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the largest relative loss error; bad if an exact variant differs."""
    off = formatting.number(row.get("deviation"))
    if row["technique"] == BASE or row.get("deviation") is None:
        return {"off": "", "off_mood": ""}
    if off is None:
        return {"off": _("not finite"), "off_mood": "bad"}
    plan = row.get("plan") or {}
    rounded = plan.get("precision", "fp32") != "fp32" and row["technique"] in (
        "compile",
        "fused_kernels",
    )
    approximate = row["technique"] == "precision" or plan.get("schedule") == "pipedream" or rounded
    text = _("equal") if off == 0 else f"{off:.0e}".replace("e-0", "e-")
    return {"off": text, "off_mood": "bad" if off > _EXACT and not approximate else ""}


def summary(table: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> str:
    """Summarize the results in one to four sentences."""
    waiting = sum(row["state"] == "waiting" for row in table["rows"])
    failed = sum(row["state"] == "failed" for row in table["rows"])
    base = find_base(measured)
    others = [row for row in measured if row["technique"] != BASE]
    sentences = []
    if base and others:
        sentences += _best(base, others)
    if measured and noise(measured) > _NOISY:
        sentences.append(
            _(
                "Step times of the same variant vary by %(share)s: the devices also do other work, "
                "and overlapping differences may be noise."
            )
            % {"share": f"{100 * noise(measured):.0f}%"}
        )
    if waiting:
        sentences.append(
            ngettext(
                "%(count)s of %(total)s variant is not measured yet.",
                "%(count)s of %(total)s variants are not measured yet.",
                len(table["rows"]),
            )
            % {"count": waiting, "total": len(table["rows"])}
        )
    if failed:
        sentences.append(
            ngettext("%(count)s variant failed.", "%(count)s variants failed.", failed)
            % {"count": failed}
        )
    return " ".join(sentences) if sentences else _("No measurements yet.")


def _best(base: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fastest variant and the one with the least memory."""
    fastest = min(others, key=lambda row: row["step_time_s"])
    smallest = min(others, key=lambda row: row["peak_bytes"])
    speedup = base["step_time_s"] / fastest["step_time_s"]
    saved = 1 - smallest["peak_bytes"] / base["peak_bytes"]
    sentences = [_("No variant is clearly faster than the baseline.")]
    if speedup > 1.02 and differs(fastest, base):
        sentences = [
            _("Fastest: %(name)s, %(times)s times the baseline's speed.")
            % {"name": fastest["name"], "times": formatting.quantity(speedup, 3)}
        ]
    if saved > 0.02:
        sentences.append(
            _("Least memory: %(name)s, %(share)s less than the baseline.")
            % {"name": smallest["name"], "share": f"{100 * saved:.0f}%"}
        )
    return sentences


def link_summary(collectives: Mapping[str, Any]) -> str:
    """Describe the measured link: bandwidth at large sizes, latency at small ones."""
    link, ranks = collectives.get("link"), collectives["ranks"]
    if not link:
        return _("%(ranks)s ranks over two kinds of links; the table shows both together.") % {
            "ranks": ranks
        }
    text = _("%(ranks)s ranks between nodes: %(rate)s at large sizes, latency %(latency)s.")
    if link["where"] == "intra":
        text = _("%(ranks)s ranks within the node: %(rate)s at large sizes, latency %(latency)s.")
    return text % {
        "ranks": ranks,
        "rate": links.rate(link["bytes_per_s"]),
        "latency": formatting.seconds(link["latency_s"]),
    }
