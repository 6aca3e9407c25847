"""Settings of what is deleted after which time, of the store and of energy figures."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings

from orchestrator.config.env.field_types import check_store_url


class RetentionVariables(BaseSettings):
    """Fields of `Env`: retention, garbage collection, store, exports, energy."""

    retain_frames_s: float = Field(3600.0, description="how long live frames can be replayed")
    retain_series_days: float = Field(
        0.0, description="raw points older than this are reduced to summaries; 0 keeps all"
    )
    retain_logs_days: float = Field(
        90.0, description="log lines of ended runs older than this are deleted; 0 keeps all"
    )
    retain_events_days: float = Field(
        0.0,
        description="events of ended runs, lifted cordons, preflight results and probes of idle "
        "nodes older than this are deleted, except each node's newest probes; 0 keeps all",
    )
    retain_audit_days: float = Field(
        0.0,
        description="audit entries, the log of the admin site, and API tokens and share links that "
        "expired or were revoked before this are deleted; 0 keeps all",
    )
    retain_topics_days: float = Field(
        30.0, description="live topics of runs that ended before this are deleted; 0 keeps all"
    )
    retain_sessions_days: float = Field(
        1.0, description="login sessions are deleted this long after they expire; 0 keeps all"
    )
    gc_checkpoint_days: float = Field(
        0.0,
        ge=0,
        description="checkpoints of runs that ended before this are deleted, except the newest, "
        "the best, pinned and referenced ones; 0 keeps all",
    )
    gc_checkpoint_gb: float = Field(
        0.0,
        ge=0,
        description="checkpoints of ended runs beyond this many GB in sum are deleted likewise, "
        "oldest runs first; 0: no limit",
    )
    gc_folder_days: float = Field(
        0.0,
        ge=0,
        description="attempt folders of runs that ended before this are deleted without their "
        "checkpoints: logs, samples and artifacts; 0 keeps all",
    )
    gc_store_days: float = Field(
        0.0,
        ge=0,
        description="copies in the store of runs that ended before this are deleted, except the "
        "newest, the best, pinned and referenced checkpoints; 0 keeps all",
    )
    gc_store_gb: float = Field(
        0.0,
        ge=0,
        description="copies of ended runs beyond this many GB in the store are deleted likewise, "
        "oldest runs first; 0: no limit",
    )
    store_url: Annotated[str, AfterValidator(check_store_url)] = Field(
        "",
        description="where nodes copy checkpoints and artifacts to: s3://bucket/prefix, or a "
        "folder that all machines mount; default: nowhere",
    )
    store_endpoint: str = Field(
        "", description="https://host:port of a store with the S3 protocol other than Amazon's"
    )
    store_region: str = Field("", description="region of the store's bucket")
    store_key: str = Field(
        "",
        repr=False,
        description="access key of the store; nodes receive it encrypted. Default: each machine's "
        "own AWS_* variables, profile or instance role",
    )
    store_secret: str = Field("", repr=False, description="secret key of the store")
    export_days: float = Field(7.0, gt=0, description="exports are deleted after this time")
    export_mb: float = Field(2000.0, gt=0, description="largest archive of an export, in MB")
    retain_jobs_days: float = Field(
        30.0,
        description="records of jobs and of deleted checkpoints, notifications, ended alerts, "
        "closed dead letters and unused expired join tokens older than this are deleted; 0 keeps "
        "all",
    )
    retain_usage_days: float = Field(
        0.0,
        description="usage by day, person and pool older than this is deleted; 0 keeps all",
    )
    retain_device_minutes_days: float = Field(
        7.0,
        ge=0,
        description="readings of nodes and devices per minute older than this are deleted; those "
        "per quarter hour remain; 0 keeps all",
    )
    retain_device_history_days: float = Field(
        90.0,
        ge=0,
        description="readings of nodes and devices per quarter hour, and the energy of attempts "
        "per hour, older than this are deleted; 0 keeps all",
    )
    co2_g_per_kwh: float = Field(
        445.0,
        ge=0,
        description="grams of CO2 per kWh of electricity; default: the world's mean of 2024 (IEA, "
        "Electricity 2025). Set the value of your supplier or country",
    )
    pue: float = Field(
        1.58,
        ge=1,
        description="power usage effectiveness of the site: its energy per energy of the machines; "
        "default: the industry's mean of 2023 (Uptime Institute, Global Data Center Survey)",
    )
    retain_programs_days: float = Field(
        0.0,
        description="stored files and diffs of scripts whose runs all ended before this are "
        "deleted; such runs cannot be retried. 0 keeps all",
    )
