"""Every setting: name, type, default and description, each from one environment variable.

`read` reads them, `settings` turns them into Django's settings, and `tools/env_example.py` writes
`deploy/env.example` from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from orchestrator.config.env.field_types import AbsolutePath, Entries, Names, Networks, Paths
from orchestrator.config.env.retention_variables import RetentionVariables


class Env(RetentionVariables):
    """One field per variable `ORRERY_<NAME>`; `DATABASE_URL` and `REDIS_URL` have no prefix."""

    model_config = SettingsConfigDict(
        env_prefix="ORRERY_",
        env_ignore_empty=True,
        populate_by_name=True,
        extra="ignore",
        frozen=True,
    )

    home: AbsolutePath = Field(Path("var").resolve(), description="the data directory")
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
    secret_key_fallbacks: Names = Field(
        (),
        repr=False,
        description="earlier values of the secret key, still accepted after a change; in order",
    )
    allowed_hosts: Names = Field(
        (), description="host names of this server, in addition to this machine's own"
    )
    trusted_origins: Names = Field(
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
    oidc_scopes: Names = Field(
        ("openid", "profile", "email"),
        description="scopes to request, separated by commas; some providers need groups",
    )
    oidc_groups_claim: str = Field(
        "groups", description="claim with the person's groups; a.b is the key b in a"
    )
    oidc_roles: Entries = Field(
        (),
        description="roles of groups as GROUP=ROLE, separated by commas; the highest counts, and "
        "is set at every login. Empty: roles are set in Orrery",
    )
    oidc_default_role: str = Field(
        "submitter", description="role without a group that has one; none: may not log in"
    )
    oidc_teams: Entries = Field(
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
    data_roots: Paths = Field((), description="folders for data paths, separated by ':'")
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
    container_mounts: Paths = Field(
        (), description="more folders of a node that images may read, separated by ':'"
    )
    run_env: Names = Field(
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
    webhook_networks: Networks = Field(
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
