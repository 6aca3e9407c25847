"""Probes of nodes become the planner's parameters, and are refused or marked where they differ."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from orchestrator.accounts.models import User
from orchestrator.fleet import node_probes
from orchestrator.fleet.models import NodeProbe
from orchestrator.planner import user_api
from orchestrator.planner.calibration.probe_parameters import calibration_of, choose_alike
from orchestrator.planner.models import Calibration
from orchestrator.planner.store.node_probes import probe_record, probed_device
from orchestrator.runs.models import Run
from orchestrator.runs.submission.target_hardware import target_hardware_for
from tests import factories
from tests.node_probe_samples import TINY, node_report, step
from workers.contracts import RunSpec

pytestmark = pytest.mark.django_db


def predicted(owner: User, micro_batch: int = 4) -> dict[str, Any]:
    line = {
        "id": 1,
        "model": TINY,
        "plan": step(micro_batch, 1.0)["plan"],
        "cluster": {"device": "cpu", "nodes": 1, "devices_per_node": 2},
        "workload": {"seq_len": 128},
        "framework": {"name": "orrery"},
    }
    return user_api.estimate(user=owner, lines=[line])[0]


def test_a_probe_gives_the_step_time_and_memory_of_its_node(owner: User) -> None:
    node = factories.node("n1", devices=4)
    before = predicted(owner)
    probe_record(node=node, report=node_report(slower=2.0))
    after = predicted(owner)
    assert after["calibration"].startswith("probe of n1, ") and before["calibration"] is None
    # steps of 2 and 6 sequences took 80 and 200 ms
    assert after["step_time_s"] == pytest.approx(0.14, rel=0.1) != before["step_time_s"]
    assert after["step_time_low_s"] < 0.14 < after["step_time_high_s"]
    process = after["memory"]["unattributed_bytes"]
    assert 4.2e8 < process < 4.5e8 and before["memory"]["unattributed_bytes"] == 4.3e8
    spec = RunSpec.from_dict({**factories.spec(), "resources": {"devices": 2}})
    hardware = target_hardware_for(spec)
    assert hardware.entry.peak_tflops["fp32"] == pytest.approx(0.1)
    assert hardware.calibration_name == after["calibration"] and not hardware.notes


def test_days_are_stored_and_a_short_probe_does_not_replace_a_full_one(owner: User) -> None:
    node = factories.node("n1", devices=2)
    day = timedelta(days=1).total_seconds()
    old = node_report(gflops=50)
    probe_record(node=node, report=old.model_copy(update={"time": old.time - day}))
    probe_record(node=node, report=node_report())
    probe_record(node=node, report=node_report(gflops=1, short=True))
    rows = list(node_probes.probes_of(node=node))
    assert [row.report["rates"][0]["value"] for row in rows] == [1e11, 5e10]
    products = node_probes.series_of(rows)[0]
    assert products.values == [5e10, 1e11] and products.drift == pytest.approx(1.0)


def test_nodes_that_differ_are_named_and_not_averaged(owner: User) -> None:
    for name, gflops in (("n1", 100.0), ("n2", 40.0), ("n3", 97.0)):
        probe_record(node=factories.node(name, devices=2), report=node_report(gflops=gflops))
    alike = probed_device(catalogue="cpu", pool="default")
    assert alike is not None and alike.entry.peak_tflops["fp32"] == pytest.approx(0.097)
    assert "n2" in alike.notes[0] and "n1" not in alike.notes[0]
    [one] = calibration_of(node_report(gflops=97.0), name="x").groups  # type: ignore[union-attr]
    assert alike.calibration is not None and alike.calibration.groups[0].scale > one.scale
    assert choose_alike([node_report(gflops=100), node_report(gflops=50)])[0] == 1


def test_a_busy_node_counts_less(owner: User) -> None:
    probe_record(node=factories.node("n1", devices=2), report=node_report(load=0.9))
    probed = probed_device(catalogue="cpu")
    assert probed is not None and "has less weight" in probed.notes[0]
    quiet = calibration_of(node_report(), name="x")
    assert probed.calibration is not None and quiet is not None
    assert probed.calibration.groups[0].scale > quiet.groups[0].scale


def test_other_versions_are_named_and_not_used(owner: User) -> None:
    node = factories.node("n1", devices=2)
    row = probe_record(node=node, report=node_report())
    NodeProbe.objects.filter(pk=row.pk).update(report={**row.report, "version": 99})
    probed = probed_device(catalogue="cpu")
    assert probed is not None and probed.calibration is None and "version 99" in probed.notes[0]
    with pytest.raises(ValueError, match="version 99"):
        probe_record(node=node, report=node_report(version=99))
    Calibration.objects.create(
        name="old", device="cpu", default=True, document={"version": 0}, rows=1, created_by=owner
    )
    hardware = target_hardware_for(RunSpec.from_dict(factories.spec()))
    assert hardware.calibration is None and any("old is not used" in n for n in hardware.notes)
    run = factories.run(owner, devices=2)
    assert any("old is not used" in note for note in Run.objects.get(pk=run.pk).prediction["notes"])
