"""Every setting, read once from the environment and typed. A wrong value stops the start.

Holds names, types, defaults and descriptions; `settings` turns them into Django's settings, and
`tools/env_example.py` writes `deploy/env.example` from them.
"""

from __future__ import annotations

import os
import secrets
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from workers.contracts.wire.maintenance.store import split_url


def _split_names(value: Any) -> Any:
    return value.replace(",", " ").split() if isinstance(value, str) else value


def _split_entries(value: Any) -> Any:
    """Parts between commas, which may have spaces in them."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",") if part.strip()]


def _split_paths(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [part for part in value.split(os.pathsep) if part]


def _networks(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(str(ip_network(value)) for value in values)


def _store(url: str) -> str:
    if url:
        split_url(url)
    return url


def _absolute(path: Path) -> Path:
    return path.expanduser().resolve()


_Path = Annotated[Path, AfterValidator(_absolute)]
_Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_names)]
_Entries = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_entries)]
_Networks = Annotated[
    tuple[str, ...], NoDecode, BeforeValidator(_split_names), AfterValidator(_networks)
]
_Paths = Annotated[tuple[_Path, ...], NoDecode, BeforeValidator(_split_paths)]


class Env(BaseSettings):
    """One field per variable `ORRERY_<NAME>`; `DATABASE_URL` and `REDIS_URL` have no prefix."""

    model_config = SettingsConfigDict(
        env_prefix="ORRERY_",
        env_ignore_empty=True,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
    )

    home: _Path = Field(Path("var").resolve(), description="the data directory")
    host: str = Field("127.0.0.1", description="address that `up` listens on")
    port: int = Field(8000, description="port that `up` listens on")
    demo: bool = Field(True, description="submit the demo run at the first start")
    first_probe_s: float = Field(
        7.0,
        ge=0,
        le=60,
        description="seconds of the probe of this machine before the demo run; 0: none",
    )
    idle_probe_s: float = Field(
        600.0,
        ge=0,
        description="seconds for which a node must be idle before it is probed for a minute "
        "without a request; 0: only on request",
    )
    idle_probe_days: int = Field(
        7, ge=1, le=365, description="days after which an idle node is probed again"
    )
    debug: bool = Field(False, description="Django's debug pages; never on a shared server")
    secret_key: str = Field(
        "",
        repr=False,
        description="signs sessions and node keys; stored in the data directory if not set",
    )
    secret_key_fallbacks: _Names = Field(
        (),
        repr=False,
        description="earlier values of the secret key, still accepted after a change; in order",
    )
    allowed_hosts: _Names = Field(
        (), description="host names of this server, in addition to this machine's own"
    )
    trusted_origins: _Names = Field(
        (), description="https origins that may post forms, behind a proxy"
    )
    behind_https: bool = Field(
        False, description="a proxy terminates TLS and sets X-Forwarded-Proto"
    )
    hsts_s: int = Field(
        31_536_000,
        description="behind https: how long browsers use only https for this server; 0: no header",
    )
    oidc_issuer: str = Field(
        "",
        description="login by an identity provider with OpenID Connect: its issuer, such as "
        "https://login.example.org/realms/lab; the callback is /login/oidc/sso/callback/",
    )
    oidc_client_id: str = Field("", description="the client id at the identity provider")
    oidc_client_secret: str = Field(
        "", repr=False, description="the client secret at the identity provider"
    )
    oidc_name: str = Field("single sign-on", description="name of the provider on the login page")
    oidc_scopes: _Names = Field(
        ("openid", "profile", "email"),
        description="scopes to request, separated by commas; some providers need groups",
    )
    oidc_groups_claim: str = Field(
        "groups", description="claim with the person's groups; a.b is the key b in a"
    )
    oidc_roles: _Entries = Field(
        (),
        description="roles of groups as GROUP=ROLE, separated by commas; the highest counts, and "
        "is set at every login. Empty: roles are set in Orrery",
    )
    oidc_default_role: str = Field(
        "submitter", description="role without a group that has one; none: may not log in"
    )
    oidc_teams: _Entries = Field(
        (),
        description="teams of groups as GROUP=TEAM or GROUP=TEAM:ROLE, separated by commas, or * "
        "for a team per group; members are set at every login",
    )
    oidc_link_by_email: bool = Field(
        False,
        description="the first login uses the account with the same e-mail address, if the "
        "provider has verified it",
    )
    password_login: Literal["all", "admins"] = Field(
        "all", description="who may log in by password if there is an identity provider"
    )
    data_roots: _Paths = Field((), description="folders for data paths, separated by ':'")
    redis_ca: str = Field(
        "",
        description="certificates of the authority that signed the certificate of a rediss:// "
        "server, a file; default: the system's authorities",
    )
    redis_acl: bool = Field(
        True,
        description="create a user of the broker per node, limited to the node's keys (Redis or "
        "Valkey 7.0 or later); 0: nodes share the credentials of their REDIS_URL",
    )
    redis_join_password: str = Field(
        "",
        repr=False,
        description="password of the broker's user orrery-join, with which nodes join; default: "
        "derived from the secret key, in the join command of the page Fleet",
    )
    run_as: str = Field(
        "",
        description="Unix user of runs: uids (one per user, if the agent is root; the default "
        "then), uids:FIRST-LAST, account:NAME ({user} for the user's name), or agent (the agent's "
        "own)",
    )
    container_runtime: str = Field(
        "",
        description="starts runs with an image: docker, apptainer or none; default: the first that "
        "works on the node",
    )
    container_mounts: _Paths = Field(
        (), description="more folders of a node that images may read, separated by ':'"
    )
    run_env: _Names = Field(
        (), description="variables of the agent with a name of a secret that runs may read"
    )
    shared_runs: bool = Field(
        False, description="all nodes share one run directory, so any node can resume a checkpoint"
    )
    heartbeat_s: float = Field(5.0, description="interval between a node's heartbeats")
    node_silent_s: float = Field(
        15.0, description="a node without heartbeat for this long is silent; nothing fails yet"
    )
    node_lost_s: float = Field(
        35.0, description="a node without heartbeat for this long is lost, and so are its attempts"
    )
    lost_share: float = Field(
        0.2,
        gt=0,
        le=1,
        description="share of the fleet, at least one node, that may be lost within ten minutes "
        "without an operator's confirmation",
    )
    cordon_failures: int = Field(
        3,
        ge=0,
        description="infrastructure failures in a row after which a node is cordoned; 0: never",
    )
    cordon_window_s: float = Field(
        3600.0, gt=0, description="only failures within this time count for a cordon"
    )
    avoid_s: float = Field(
        600.0,
        ge=0,
        description="a retry avoids the node of the failure for this long if others can host it",
    )
    cordon_slow_runs: int = Field(
        0,
        ge=0,
        description="runs within cordon_window_s whose ranks waited for the same device, after "
        "which it is cordoned; 0: it is only marked as slow",
    )
    preflight_devices: int = Field(
        16,
        ge=0,
        description="gangs of this many devices or more are probed before they start; 0: none",
    )
    preflight_share: float = Field(
        0.7,
        gt=0,
        le=1,
        description="share of a node's own record below which a probe fails",
    )
    launch_timeout_s: float = Field(
        120.0, description="an assigned attempt that is not launched for this long is lost"
    )
    hang_s: float = Field(
        300.0, description="a training run without progress for this long ends as hang; retried"
    )
    external_silent_s: float = Field(
        1800.0, description="an external run that sends nothing for this long has ended"
    )
    tick_s: float = Field(2.0, description="the scheduler's interval; events start a tick earlier")
    placements_per_tick: int = Field(
        250, gt=0, description="runs that one scheduling pass starts; reports are read in between"
    )
    preemption: bool = Field(
        True,
        description="a waiting run whose priority is above 100 preempts runs of lower priority, "
        "and any run preempts those below 0",
    )
    grow_after_s: float = Field(
        120.0,
        ge=0,
        description="an elastic run gets more devices after they have been free for so long",
    )
    grow_every_s: float = Field(
        600.0, ge=0, description="an elastic run keeps each size for so long before it grows"
    )
    cancel_grace_s: float = Field(
        10.0, description="time between the termination signal and the kill of a cancelled attempt"
    )
    retain_frames_s: float = Field(3600.0, description="how long live frames can be replayed")
    retain_series_days: float = Field(
        0.0, description="raw points older than this are reduced to summaries; 0 keeps all"
    )
    retain_logs_days: float = Field(
        90.0, description="log lines of ended runs older than this are deleted; 0 keeps all"
    )
    retain_events_days: float = Field(
        0.0, description="events of ended runs older than this are deleted; 0 keeps all"
    )
    retain_audit_days: float = Field(
        0.0, description="audit entries older than this are deleted; 0 keeps all"
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
    store_url: Annotated[str, AfterValidator(_store)] = Field(
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
        description="records of jobs, notifications, ended alerts and closed dead letters older "
        "than this are deleted; 0 keeps all",
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
    log_mb: float = Field(
        128.0,
        gt=0,
        description="MiB of log lines that an attempt stores per node, shared equally by the "
        "output files of its ranks; more is dropped, with a record in the log",
    )
    outbox_mb: float = Field(
        1024.0,
        gt=0,
        description="MiB of points and events that an attempt's programs may write per node before "
        "the oldest that were not stored are dropped, with an event",
    )
    webhook_networks: _Networks = Field(
        (), description="networks inside yours that webhooks may reach, such as 10.1.0.0/16"
    )
    smtp_url: str = Field(
        "",
        repr=False,
        description="smtp://user:password@host:port for e-mail; smtps:// for TLS from the start, "
        "smtp+tls:// for STARTTLS",
    )
    mail_from: str = Field("orrery@localhost", description="sender of e-mail")
    max_body_mb: float = Field(10.0, description="largest request body")
    web_processes: int = Field(
        1,
        ge=1,
        le=64,
        description="web processes that share the port; each uses one core at most, and "
        "ORRERY_WEB_THREADS connections to the database",
    )
    web_threads: int = Field(
        12,
        ge=1,
        le=200,
        description="requests that a web process handles at once; each thread keeps a connection "
        "to the database",
    )
    web_queue: int = Field(
        100,
        ge=0,
        description="requests that may wait for a thread of a web process; further ones are "
        "refused with 503, except health checks, actions on runs and files of pages; 0: no limit",
    )
    web_wait_s: float = Field(
        10.0,
        ge=0,
        description="a request that has waited for a thread for this long is refused with 503; "
        "0: no limit",
    )
    rate_per_minute: int = Field(
        1200, description="API requests per minute of a token, user or address; 0: no limit"
    )
    serve_per_minute: int = Field(
        12000, description="calls of served models per minute of a token, user or address"
    )
    serve_streams: int = Field(
        1000, description="concurrent responses of served models per web process"
    )
    database_url: str = Field(
        "",
        validation_alias="DATABASE_URL",
        repr=False,
        description="postgresql://user:password@host:port/name; default: SQLite in the data "
        "directory",
    )
    redis_url: str = Field(
        "",
        validation_alias="REDIS_URL",
        repr=False,
        description="redis://… or rediss://…; default: `up` starts its own server",
    )

    @property
    def media_runs(self) -> Path:
        """The folder that holds one directory per run."""
        return self.home / "runs"


def variable(name: str) -> str:
    """The environment variable of a field of `Env`."""
    alias = Env.model_fields[name].validation_alias
    return alias if isinstance(alias, str) else f"ORRERY_{name.upper()}"


def read() -> Env:
    """Read all settings.

    Raises ImproperlyConfigured, which names the variable and its value, and says what to set.
    """
    known = {variable(name) for name in Env.model_fields} | OTHER_VARIABLES
    for name in os.environ:
        if name.startswith("ORRERY_") and name not in known:
            raise ImproperlyConfigured(
                f"{name} is not a setting of Orrery; deploy/env.example lists them all."
            )
    try:
        return Env()
    except ValidationError as error:
        raise ImproperlyConfigured(
            " ".join(
                _describe(item["loc"][0], item["input"], item["msg"]) for item in error.errors()
            )
        ) from error


_EXPECTED: dict[Any, str] = {bool: "1 or 0", int: "an integer", float: "a number"}


def _describe(location: int | str, value: object, message: str) -> str:
    name = next(name for name in Env.model_fields if location in (name, variable(name)))
    field = Env.model_fields[name]
    expected = _EXPECTED.get(field.annotation)
    return (
        f"{variable(name)}={value!r} is not valid: {message}. "
        f"Set it to {expected + ': ' if expected else ''}{field.description}."
    )


# Read by agents, supervisors, ranks and the recorder, or set by one process for another.
OTHER_VARIABLES = {
    "ORRERY_TORCH",
    "ORRERY_JOIN",
    "ORRERY_TOPOLOGY",
    "ORRERY_RUN",
    "ORRERY_RUN_DIR",
    "ORRERY_ATTEMPT",
    "ORRERY_FENCE",
    "ORRERY_ENGINE_TICKET",
    "ORRERY_JOB_ID",
    "ORRERY_JOB_ADDRESS",
    "ORRERY_JOB_HOST",
    "ORRERY_NODE",
    "ORRERY_NODE_CONTAINERS",
    "ORRERY_NODE_LIMITS",
    "ORRERY_ADDRESS",
    "ORRERY_SLOT_BYTES",
    "ORRERY_RESUME",
    "ORRERY_CHECKPOINTS",
    "ORRERY_COMMIT",
    "ORRERY_PG_TIMEOUT_S",
    "ORRERY_DATASET_DAYS",
    "ORRERY_ENVIRONMENT_DAYS",
    "ORRERY_SCRATCH",
    "ORRERY_SERVERS",
    "ORRERY_URL",
    "ORRERY_TOKEN",
    "ORRERY_CAPTURE",
    "ORRERY_SPOOL",
    "ORRERY_SYSTEM_S",
    "ORRERY_STORE_RETRY_S",
    "ORRERY_EMBEDDED",
    "ORRERY_CACHE",
    "ORRERY_TEST_DATABASE_URL",
    "ORRERY_TEST_MATRIX",
    "ORRERY_FUZZ_MUTATIONS",
    "ORRERY_FUZZ_SEED",
}


def secret_key(env: Env) -> str:
    """The configured key, or one generated once and stored in `home/secret_key` (mode 600)."""
    if env.secret_key:
        return env.secret_key
    path = env.home / "secret_key"
    if path.exists():
        return path.read_text().strip()
    env.home.mkdir(parents=True, exist_ok=True)
    key = secrets.token_urlsafe(48)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key)
    except FileExistsError:  # another process created it first
        return path.read_text().strip()
    return key


def database(env: Env) -> dict[str, Any]:
    """Django's DATABASES entry: SQLite in WAL mode by default, PostgreSQL with DATABASE_URL."""
    if not env.database_url:
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": env.home / "orrery.sqlite3",
            "OPTIONS": {
                "timeout": 30,
                "transaction_mode": "IMMEDIATE",  # a reader that starts to write cannot deadlock
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA "
                "cache_size=-65536;"
                " PRAGMA mmap_size=268435456; PRAGMA temp_store=MEMORY;",
            },
        }
    url = urlsplit(env.database_url)
    if url.scheme not in ("postgres", "postgresql"):
        raise ImproperlyConfigured(f"DATABASE_URL has scheme {url.scheme!r}; use postgresql://.")
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": url.path.lstrip("/"),
        "USER": unquote(url.username or ""),
        "PASSWORD": unquote(url.password or ""),
        "HOST": url.hostname or "",
        "PORT": url.port or "",
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": {},
    }
