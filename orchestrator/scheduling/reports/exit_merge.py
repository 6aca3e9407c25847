"""Merges several nodes' exit reports into one exit: the root cause wins. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# lowest first: own error, loss of a node, loss of a peer, ended on request, success
_PRECEDENCE: dict[str, float] = {
    "user_error": 0,
    "numerics": 0,
    "out_of_memory": 0,
    "hang": 0,
    "infrastructure": 2,
    "lost": 1.5,  # the ranks of other nodes then lost their peers
    "preempted": 3,
    "cancelled": 4,
    "ok": 5,
}


def first_cause(reports: Mapping[str, Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    """`(exit class, exit)` of an attempt from `{node: exit report}`; all must be ok for ok."""
    node, report = min(reports.items(), key=_key)
    exit_class = str(report.get("class", "infrastructure"))
    exit = {
        key: value
        for key, value in report.items()
        if key in ("reason", "rank", "step", "code", "signal", "cause")
    }
    if len(reports) > 1 and exit_class != "ok":
        exit["node"] = node
    return exit_class, exit


def _key(item: tuple[str, Mapping[str, Any]]) -> tuple[float, float, str]:
    node, report = item
    precedence = float(_PRECEDENCE.get(str(report.get("class")), 2))
    if report.get("class") == "hang" and report.get("rank") is None:
        precedence = 0.5  # its ranks only waited for those of another node
    if report.get("class") == "infrastructure" and report.get("signal") not in (None, "SIGTERM"):
        precedence = 1.0  # a killed rank precedes the ranks that then lost it
    return precedence, float(report.get("time") or float("inf")), node
