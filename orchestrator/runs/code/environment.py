"""The packages of a script run: what its spec asks for and what its newest attempt reported."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from orchestrator.runs.models import Run, RunEvent

PREPARED: Final = "environment_prepared"


@dataclass(frozen=True)
class RunEnvironment:
    """`fingerprint`, `packages` and `seconds` are of the newest attempt; empty before it starts."""

    lock: str | None
    modules: list[str]
    python: str | None
    node_packages: bool
    fingerprint: str | None = None
    python_version: str = ""
    packages: list[str] = field(default_factory=list)
    seconds: float | None = None
    built: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for REST."""
        return asdict(self)


def environment_of(run: Run) -> RunEnvironment | None:
    """The environment of a script run; None if it uses the node's own packages."""
    wanted = (run.spec.get("script") or {}).get("environment")
    if run.kind != "script" or not isinstance(wanted, dict):
        return None
    event = RunEvent.objects.filter(run=run, type=PREPARED).order_by("seq").last()
    reported = event.data if event is not None and isinstance(event.data, dict) else {}
    packages = reported.get("packages")
    return RunEnvironment(
        lock=wanted.get("lock"),
        modules=list(wanted.get("modules") or []),
        python=wanted.get("python"),
        node_packages=wanted.get("node_packages", True),
        fingerprint=reported.get("fingerprint"),
        python_version=str(reported.get("python") or ""),
        packages=[str(each) for each in packages] if isinstance(packages, list) else [],
        seconds=reported.get("seconds"),
        built=reported.get("built"),
    )
