"""`orrery sweep` through the real REST API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from orrery_cli.commands import sweep as command
from orrery_cli.errors import CliError

from orchestrator.accounts.models import User
from orchestrator.runs.models import Run
from orchestrator.sweeps.advance import sweeps_advance
from orchestrator.sweeps.models import Sweep, Trial
from tests import factories
from tests.cli.conftest import Orrery


def test_a_sweep_is_started_shown_watched_and_cancelled(
    orrery: Orrery, owner: User, tmp_path: Path, live_redis: str, monkeypatch: Any
) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(factories.spec()))
    options = ("--spec", spec, "-p", "train.optimizer.lr=1e-4..0.1:log", "--runs", 3)
    made = orrery("sweep", "start", *options, "--name", "rates", "--set", "parallel=1", "--json")
    assert made.code == 0, made.err
    document = json.loads(made.out)
    number = document["id"]
    assert document["definition"]["parameters"]["train.optimizer.lr"]["scale"] == "log"
    assert (document["budget"]["runs"], document["definition"]["parallel"]) == (3, 1)
    sweeps_advance()
    Trial.objects.update(value=2.5, step=20)
    shown = orrery("sweep", "show", number)
    assert f"sweep {number} rates: running, 1 of 3 runs, 1 active, best loss 2.5" in shown.out
    assert "rates" in orrery("sweep", "list").out
    monkeypatch.setattr(command.time, "sleep", lambda s: orrery_cancel(Sweep.objects.get(), owner))
    watched = orrery("sweep", "watch", number)
    assert watched.code == 3 and "Cancelled by owner." in watched.out
    assert "cancelled" in orrery("sweep", "cancel", number).out
    assert {run.state for run in Run.objects.all()} == {"cancelled"}


def orrery_cancel(sweep: Sweep, by: User) -> None:
    from orchestrator.sweeps.services import sweep_cancel

    sweep_cancel(sweep=sweep, by=by)


def test_a_file_is_a_sweep_and_wrong_ones_are_refused(orrery: Orrery, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    body = {
        "name": "file",
        "spec": factories.spec(),
        "method": "grid",
        "parameters": {"train.seed": {"values": [1, 2]}},
    }
    path.write_text(json.dumps(body))
    assert "sweep 1 file: running" in orrery("sweep", path).out
    refused = orrery("sweep", path, "-p", "train.sed=1,2")
    assert refused.code == 1 and "parameters.train.sed: " in refused.err
    assert orrery("sweep", "start").code == 2
    assert orrery("sweep", path, "-p", "train.seed").code == 2
    assert Sweep.objects.count() == 1


def test_parameters_of_options() -> None:
    read = command.read_parameter
    assert read("a.lr=1e-4..0.1:log:5") == (
        "a.lr",
        {"min": 1e-4, "max": 0.1, "scale": "log", "points": 5},
    )
    assert read("a.b=bf16,fp32") == ("a.b", {"values": ["bf16", "fp32"]})
    assert read("a=1..8:integer")[1] == {"min": 1, "max": 8, "integer": True}
    for wrong in ("a", "a=", "=1", "a=1..2:cubic"):
        with pytest.raises(CliError):
            read(wrong)
