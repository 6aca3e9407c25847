"""Every setting, read once from the environment and typed. A wrong value stops the start.

Holds names, types, defaults and descriptions; `settings` turns them into Django's settings, and
`tools/env_example.py` writes `deploy/env.example` from them.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict


def _split_names(value: Any) -> Any:
    return value.replace(",", " ").split() if isinstance(value, str) else value


def _split_paths(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return [part for part in value.split(os.pathsep) if part]


def _absolute(path: Path) -> Path:
    return path.expanduser().resolve()


_Path = Annotated[Path, AfterValidator(_absolute)]
_Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_names)]
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
    debug: bool = Field(False, description="Django's debug pages; never on a shared server")
    secret_key: str = Field(
        "",
        repr=False,
        description="signs sessions and node keys; stored in the data directory if not set",
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
    data_roots: _Paths = Field((), description="folders for data paths, separated by ':'")
    shared_runs: bool = Field(
        False, description="all nodes share one run directory, so any node can resume a checkpoint"
    )
    heartbeat_s: float = Field(2.0, description="interval between a node's heartbeats")
    node_silent_s: float = Field(
        15.0, description="a node without heartbeat for this long is silent; nothing fails yet"
    )
    node_lost_s: float = Field(
        90.0, description="a node without heartbeat for this long is lost, and so are its attempts"
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
    max_body_mb: float = Field(10.0, description="largest request body")
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
    "ORRERY_RUN",
    "ORRERY_RUN_DIR",
    "ORRERY_ATTEMPT",
    "ORRERY_FENCE",
    "ORRERY_NODE",
    "ORRERY_ADDRESS",
    "ORRERY_RESUME",
    "ORRERY_CHECKPOINTS",
    "ORRERY_PG_TIMEOUT_S",
    "ORRERY_SCRATCH",
    "ORRERY_URL",
    "ORRERY_TOKEN",
    "ORRERY_SPOOL",
    "ORRERY_EMBEDDED",
    "ORRERY_CACHE",
    "ORRERY_TEST_DATABASE_URL",
    "ORRERY_TEST_MATRIX",
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
