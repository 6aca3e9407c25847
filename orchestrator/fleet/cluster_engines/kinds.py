"""Which contracts describe an engine of each kind: its settings, its pools, its credentials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.fleet.cluster_engines.kubernetes_settings import (
    KubernetesAccess,
    KubernetesPool,
    KubernetesSettings,
)
from orchestrator.fleet.cluster_engines.settings import Credentials, SlurmPool, SlurmSettings
from orchestrator.fleet.models import Engine, Pool

Settings = SlurmSettings | KubernetesSettings
PoolSettings = SlurmPool | KubernetesPool


@dataclass(frozen=True)
class Kind:
    """The contracts of one kind, and what it calls the place where jobs wait."""

    settings: type[SlurmSettings] | type[KubernetesSettings]
    pool: type[SlurmPool] | type[KubernetesPool]
    credentials: type[Credentials] | type[KubernetesAccess]
    target: str  # the field of `pool` that names it


KINDS: Mapping[str, Kind] = {
    Engine.Kind.SLURM: Kind(SlurmSettings, SlurmPool, Credentials, "partition"),
    Engine.Kind.KUBERNETES: Kind(KubernetesSettings, KubernetesPool, KubernetesAccess, "queue"),
}


def settings_of(engine: Engine) -> Settings:
    """The engine's settings. Raises ValueError for those of another release."""
    return KINDS[engine.kind].settings.from_dict(engine.settings)


def pool_settings(engine: Engine, pool: Pool) -> PoolSettings:
    """What the pool means in its engine. Raises ValueError for settings of another release."""
    return KINDS[engine.kind].pool.from_dict(pool.engine_settings)


def target_of(engine: Engine, settings: Mapping[str, Any]) -> str:
    """The partition or queue of a pool's stored settings."""
    return str(settings.get(KINDS[engine.kind].target, ""))
