"""`manage.py simulate`: its JSON, and clear errors for bad traces and arguments."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

HEADER = "submit_s,user,team,devices,duration_s,priority\n"
FIGURES = {
    "mean_wait_s",
    "p95_wait_s",
    "mean_completion_s",
    "utilization",
    "fragmentation",
    "fairness",
    "starved",
}


def run(trace: str, *, nodes: int = 2, per_node: int = 8, policy: str = "fifo,orrery") -> Any:
    out = io.StringIO()
    call_command(
        "simulate",
        trace=trace,
        nodes=nodes,
        devices_per_node=per_node,
        policy=policy,
        json=True,
        stdout=out,
    )
    return json.loads(out.getvalue())


def test_json_of_a_synthetic_trace() -> None:
    answer = run("philly:200:1", policy="fifo,shortest_first,fair_share,orrery")
    assert set(answer) == {"runs", "seconds", "policies"}
    assert answer["runs"] == 200
    assert list(answer["policies"]) == ["fifo", "shortest_first", "fair_share", "orrery"]
    assert all(set(figures) == FIGURES for figures in answer["policies"].values())


def test_text_output_names_each_policy() -> None:
    out = io.StringIO()
    call_command("simulate", trace="helios:50:1", nodes=2, devices_per_node=8, stdout=out)
    assert "fifo" in out.getvalue() and "orrery" in out.getvalue()


def test_a_csv_trace_in_any_order_of_columns_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "team,extra,submit_s,user,devices,duration_s,priority\n"
        "x,?,1001,ann,8,50,0\n\nx,?,1000,ann,16,100,\n"
    )
    figures = run(str(path))["policies"]["fifo"]
    assert figures["mean_wait_s"] == pytest.approx(99 / 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (HEADER, "no runs"),
        ("submit_s,user,team,devices,priority\n0,a,b,1,0\n", "no column duration_s"),
        (HEADER + "0,a,b,1,10,0\n1,a,b,1,-3,0\n", "line 3: duration_s is -3"),
        (HEADER + "0,a,b,1,0,0\n", "line 2: duration_s is 0"),
        (HEADER + "0,a,b,17,10,0\n", "line 2: devices is 17, but the cluster has 16"),
        (HEADER + "0,a,b,0,10,0\n", "at least 1"),
        (HEADER + "0,a,b,1.5,10,0\n", "devices is '1.5', not a whole number"),
        (HEADER + "nan,a,b,1,10,0\n", "submit_s is nan"),
        (HEADER + "soon,a,b,1,10,0\n", "submit_s is 'soon', not a number"),
        (HEADER + "0,a,b,1,10,high\n", "priority is 'high'"),
        (HEADER + "0,a,b\n", "line 2: 3 values for 6 columns"),
    ],
)
def test_a_bad_trace_names_line_and_value(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(CommandError) as error:
        run(str(path))
    assert message in str(error.value) and "trace.csv" in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trace": "missing.csv"}, "Cannot read missing.csv"),
        ({"trace": "philly:many:1"}, "philly:RUNS:SEED"),
        ({"trace": "venus:10:1"}, "Unknown synthetic trace 'venus'"),
        ({"trace": "philly:0:1"}, "from 1 to"),
        ({"policy": "fifo,best"}, "Unknown policy 'best'"),
        ({"policy": ","}, "No policy"),
        ({"nodes": 0}, "Nodes is 0"),
        ({"per_node": -1}, "Devices per node is -1"),
        ({"nodes": 10**6}, "use at most"),
    ],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CommandError) as error:
        run(**{"trace": "philly:10:1", **change})
    assert message in str(error.value)
