"""`python -m tests.chaos.upgrade`: upgrades a running cluster component by component.

Starts release 0.1 (from git history) with runs on it, then replaces the control plane, the broker
and one agent after another, in the order of `docs/upgrading.md`, with runs active all the time.
Nothing may start twice, no point may be lost, and every run must finish. In a clone without that
commit, all parts run the current release: then it checks the order, not the versions.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import memory_limits
from tests.chaos.cluster import ROOT, TIMES, Cluster, Part, wait_until
from tests.flows.embedded import clean_environ

PREVIOUS = "db91227"  # the commit of release 0.1
WAIT_S = 300.0  # against a hang; a loaded machine is slow
STEPS = 3000
SHORT_STEPS = 200  # of runs that are submitted during the upgrade
SETUP = """
import json, sys
from django.core.management import call_command
call_command("migrate", verbosity=0, interactive=False)
from orchestrator.accounts.models import User
from orchestrator.fleet.services import join_token_create
from orchestrator.runs import services as runs
owner = User.objects.create_user("chaos", password=None, role="admin")
given = json.loads(sys.argv[1])
ids = [runs.run_submit(owner=owner, name=name, spec=spec, force=True).pk
       for name, spec in given["runs"]]
print(json.dumps({"tokens": [join_token_create(by=None) for _ in range(2)], "runs": ids}))
"""


def main() -> int:
    """The exit code: 0 if nothing is violated."""
    parser = argparse.ArgumentParser(prog="tests.chaos.upgrade", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the folder with all files")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="orrery-upgrade-"))
    violated = Upgrade(folder).run()
    for violation in violated:
        print(f"VIOLATED: {violation}")
    if violated or options.keep:
        print(f"upgrade: files are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if violated else 0


def previous_release(folder: Path) -> Path | None:
    """The previous release's files, from git history; None if this clone lacks the commit."""
    target = folder / "previous"
    target.mkdir()
    packed = subprocess.run(
        ["git", "archive", PREVIOUS, "manage.py", "orchestrator", "webui", "workers"],
        cwd=ROOT,
        capture_output=True,
    )
    if packed.returncode:
        return None
    subprocess.run(["tar", "-x", "-C", str(target)], input=packed.stdout, check=True)
    return target


def spec(ranks: int, steps: int = STEPS) -> dict[str, Any]:
    """A training run that saves a checkpoint now and again."""
    return {
        "kind": "train",
        "plan": {"dp": ranks, "micro_batch_size": 1, "global_batch_size": ranks},
        "train": {
            "steps": steps,
            "seq_len": 32,
            "checkpoint": {"every_steps": 100, "keep": 1000, "async": False},
        },
    }


class Upgrade:
    """One upgrade of a cluster with two nodes of two devices; `run` returns the violations."""

    def __init__(self, folder: Path) -> None:
        # no node may become silent because a loaded machine starts its agent slowly
        os.environ.update(clean_environ())
        self.cluster = Cluster(folder, nodes=2, devices=2, skews_s=[0.0])
        slow = {"ORRERY_NODE_SILENT_S": "60", "ORRERY_NODE_LOST_S": "240"}
        slow |= {"ORRERY_LAUNCH_TIMEOUT_S": "240", "ORRERY_HANG_S": "240"}
        for environ in (self.cluster.environ, *self._environs()):
            environ.update({**TIMES, **slow})
        old = previous_release(folder)
        self.versions = ("1.0", "1.1") if old else ("1.1", "1.1")
        print(f"upgrade: from {'release 0.1' if old else 'the current release itself'}", flush=True)
        self.old = old or ROOT

    def _environs(self) -> list[dict[str, str]]:
        return [part._environ for part in (self.cluster.scheduler, self.cluster.ingest)]

    def run(self) -> list[str]:
        """Upgrade, let every run finish, and check."""
        try:
            self._start_previous_release()
            self._upgrade_control_plane()
            self._restart(self.cluster.broker)
            self._submit("after the control plane", 1)
            self._wait_for_ranks(4)
            self._submit("waits for devices", 2)
            for number, node in enumerate(self.cluster.agents):
                self._upgrade_agent(node.name, node.agent, number)
            self._submit("after the agents", 2)
            return self._finish()
        finally:
            self.cluster.close()

    def _start_previous_release(self) -> None:
        """Two runs on three of four devices."""
        given = {"runs": [["two ranks", spec(2)], ["one rank", spec(1)]]}
        done = subprocess.run(
            [sys.executable, "manage.py", "shell", "-c", _as_command(given)],
            cwd=self.old,
            env=self.cluster.environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        prepared = json.loads(done.stdout.strip().splitlines()[-1])
        tokens = iter(prepared["tokens"])
        self.cluster.code = self.cluster.scheduler.code = self.cluster.ingest.code = self.old
        self.cluster.start(lambda: next(tokens))
        self._wait_for_ranks(3)
        self._say("three ranks run under the previous release")

    def _upgrade_control_plane(self) -> None:
        """Stop scheduler and ingest, migrate, start the current release."""
        parts = (self.cluster.scheduler, self.cluster.ingest)
        for part in parts:
            part.kill()
        os.environ.update(self.cluster.environ)
        os.environ["DJANGO_SETTINGS_MODULE"] = "orchestrator.config.settings"
        import django

        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0, interactive=False)
        for part in parts:
            part.code = ROOT
            part.start()
        from orchestrator.fleet.models import Node

        wires = [self.versions[0]] * 2
        self._wait(
            lambda: [*Node.objects.values_list("wire", flat=True)] == wires and self._scheduled(),
            "the new scheduler reads heartbeats of the old agents",
        )

    def _scheduled(self) -> bool:
        """Whether a scheduler of the current release runs."""
        import redis

        with redis.Redis.from_url(self.cluster.environ["REDIS_URL"]) as client:
            return bool(client.exists("orrery:control"))

    def _restart(self, part: Part) -> None:
        part.kill()
        part.start()

    def _submit(self, name: str, ranks: int) -> None:
        from orchestrator.accounts.models import User
        from orchestrator.runs import services as runs

        runs.run_submit(
            owner=User.objects.get(), name=name, spec=spec(ranks, SHORT_STEPS), force=True
        )

    def _upgrade_agent(self, name: str, agent: Part, number: int) -> None:
        """Replace one agent; its supervisors continue under their own release."""
        from orchestrator.fleet.models import Node

        lives = self._living_ranks(name)
        agent.kill()
        agent.code = ROOT
        agent.start()
        node = Node.objects.filter(name=name, wire=self.versions[1])
        self._wait(node.exists, f"{name} reports the current release")
        if self.versions[0] != self.versions[1]:
            old = {"release": "0.1", "wire": "1.0", "skew": "minor"}
            self._wait(lambda: self._old_supervisors(name) == old, f"{name} lists old supervisors")
        lost = lives - self._living_ranks(name) - self._completed_ranks()
        assert not lost, f"ranks on {name} ended with its agent: {sorted(lost)}"
        self._say(f"agent {number + 1} of 2 is upgraded")

    def _old_supervisors(self, name: str) -> dict[str, Any]:
        from orchestrator.fleet import selectors
        from orchestrator.fleet.models import Node

        rows = selectors.old_supervisors(Node.objects.get(name=name))
        return {key: value for key, value in rows[0].items() if key != "attempts"} if rows else {}

    def _living_ranks(self, node: str = "") -> set[tuple[str, int]]:
        """`(fence, rank)` of ranks that have started and not ended."""
        return {
            rank
            for rank, rows in self._journals()
            if rows[-1]["kind"] != "end" and (not node or rows[0]["node"] == node)
        }

    def _completed_ranks(self) -> set[tuple[str, int]]:
        """`(fence, rank)` of ranks that did all their steps: short runs end during an upgrade."""
        return {
            rank
            for rank, rows in self._journals()
            if rows[-1]["kind"] == "end" and rows[-1]["step"] in (STEPS, SHORT_STEPS)
        }

    def _journals(self) -> Iterator[tuple[tuple[str, int], list[dict[str, Any]]]]:
        """`((fence, rank), rows)` of each rank that has started."""
        for path in self.cluster.journal.glob("*.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines() if line[-1:] == "}"]
            if rows:
                yield (path.stem.rpartition("-")[0], rows[0]["rank"]), rows

    def _wait_for_ranks(self, count: int) -> None:
        self._wait(lambda: len(self._living_ranks()) == count, f"{count} ranks run")

    def _finish(self) -> list[str]:
        """Let all runs finish, then check the invariants and the memory of every process."""
        too_large = self._memory()
        from orchestrator.runs.models import Run
        from orchestrator.runs.states import ENDED
        from tests.chaos.invariants import Evidence, every_point_once, violations

        (self.cluster.journal / "hurry").touch()
        self._wait(lambda: not Run.objects.exclude(state__in=ENDED).exists(), "every run ends")
        home = self.cluster.nodes_home
        self._wait(lambda: not every_point_once(home), "every point is stored", problem=False)
        evidence = Evidence(home, self.cluster.journal, frozenset(), frozenset())
        again = [
            f"run {run.pk} ({run.name}) has {run.attempt_number} attempts"
            for run in Run.objects.exclude(attempt_number=1)
        ]
        self._say(f"{Run.objects.count()} runs ended")
        return [*violations(evidence), *again, *too_large, *self._memory()]

    def _memory(self) -> list[str]:
        """Living processes that have used more than their documented limit."""
        parts = [("scheduler", self.cluster.scheduler), ("ingest", self.cluster.ingest)]
        parts += [("agent", node.agent) for node in self.cluster.agents]
        pids = [(name, part.process.pid) for name, part in parts if part.process is not None]
        pids += [("supervisor", one.pid) for one in self.cluster.processes("supervisor")]
        peaks = [(name, memory_limits.peak_mib(pid)) for name, pid in pids]
        for name in dict.fromkeys(name for name, _ in peaks):
            most = max(peak for other, peak in peaks if other == name)
            self._say(f"peak memory of {name}: {most:.0f} MiB")
        limits = memory_limits.documented()
        return [
            f"{name} used {peak:.0f} MiB, its limit is {limits[name]} MiB"
            for name, peak in peaks
            if peak > limits[name]
        ]

    def _wait(self, condition: Any, description: str, *, problem: bool = True) -> None:
        from django.conf import settings

        def checked() -> bool:
            if settings.configured:
                from django.db import close_old_connections

                close_old_connections()
            return bool(condition())

        try:
            wait_until(checked, WAIT_S, description)
        except TimeoutError:
            if problem:
                raise

    def _say(self, text: str) -> None:
        print(f"upgrade: {time.strftime('%H:%M:%S')} {text}", flush=True)


def _as_command(given: dict[str, Any]) -> str:
    """The preparation as one text for `manage.py shell -c`."""
    return f"import sys; sys.argv = ['', {json.dumps(given)!r}]\n{SETUP}"


if __name__ == "__main__":
    sys.exit(main())
