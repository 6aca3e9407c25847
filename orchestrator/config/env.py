"""Every setting, read once from the environment, typed. A wrong value stops the start with a hint.

Knows names, types and defaults; `settings` turns them into Django's. `deploy/env.example` lists
them all.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("say 1 or 0")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.replace(",", " ").split() if word)


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(Path(part).expanduser().resolve() for part in text.split(os.pathsep) if part)


def _path(text: str) -> Path:
    return Path(text).expanduser().resolve()


def _setting(default: Any, read: Callable[[str], Any], message: str) -> Any:
    return field(default=default, metadata={"read": read, "message": message})


@dataclass(frozen=True)
class Env:
    """One field per variable `ORRERY_<NAME>`; `database_url` and `redis_url` carry no prefix."""

    home: Path = _setting(Path("var").resolve(), _path, "the data directory")
    host: str = _setting("127.0.0.1", str, "address that `up` listens on")
    port: int = _setting(8000, int, "port that `up` listens on")
    demo: bool = _setting(True, _flag, "submit the demo run at the first start")
    debug: bool = _setting(False, _flag, "Django's debug pages; never on a shared server")
    secret_key: str = _setting(
        "", str, "signs sessions and node keys; kept in the data directory when not given"
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (), _words, "host names the pages answer to, besides this machine's own"
    )
    trusted_origins: tuple[str, ...] = _setting(
        (), _words, "https origins allowed to post forms, behind a proxy"
    )
    behind_https: bool = _setting(
        False, _flag, "a proxy in front speaks TLS and sets X-Forwarded-Proto"
    )
    data_roots: tuple[Path, ...] = _setting(
        (), _paths, "folders that data paths may lie under, ':' between them"
    )
    shared_runs: bool = _setting(
        False, _flag, "all nodes see one run directory, so checkpoints resume on any node"
    )
    heartbeat_s: float = _setting(2.0, float, "how often a node reports")
    node_silent_s: float = _setting(
        15.0, float, "no heartbeat for so long: the node is silent, nothing fails yet"
    )
    node_lost_s: float = _setting(
        90.0, float, "no heartbeat for so long: the node is lost, its attempts end as lost"
    )
    launch_timeout_s: float = _setting(
        120.0, float, "an assigned attempt that nobody launched for so long is lost"
    )
    hang_s: float = _setting(
        300.0, float, "a training without progress for so long ends as hang, and is tried again"
    )
    external_silent_s: float = _setting(
        1800.0, float, "an external run without a word for so long has ended"
    )
    tick_s: float = _setting(2.0, float, "the scheduler's timer; events wake it sooner")
    cancel_grace_s: float = _setting(
        10.0, float, "between the asking and the killing of a cancelled attempt"
    )
    retain_frames_s: float = _setting(3600.0, float, "how long live frames are kept for catch-up")
    retain_series_days: float = _setting(
        0.0, float, "raw points older than this are thinned to summaries; 0 keeps all"
    )
    retain_logs_days: float = _setting(
        90.0, float, "log lines of ended runs older than this are deleted; 0 keeps all"
    )
    max_body_mb: float = _setting(10.0, float, "largest request body")
    rate_per_minute: int = _setting(
        1200, int, "API requests a token or address may make each minute; 0: no limit"
    )
    serve_per_minute: int = _setting(
        12000, int, "calls of served models a token or address may make each minute"
    )
    serve_streams: int = _setting(
        1000, int, "answers of served models on their way through one web process at a time"
    )
    database_url: str = _setting(
        "", str, "postgresql://user:password@host:port/name; SQLite in the data directory else"
    )
    redis_url: str = _setting(
        "", str, "redis://… or rediss://…; `up` starts a server of its own else"
    )

    @property
    def media_runs(self) -> Path:
        return self.home / "runs"


def variable(name: str) -> str:
    return name.upper() if name in ("database_url", "redis_url") else f"ORRERY_{name.upper()}"


def read(environ: Mapping[str, str]) -> Env:
    """Reads all settings.

    Raises ImproperlyConfigured naming the variable, its value and what it should be.
    """
    values: dict[str, Any] = {}
    for item in fields(Env):
        text = environ.get(variable(item.name))
        if text is None or (text == "" and item.name not in ("secret_key",)):
            continue
        try:
            values[item.name] = item.metadata["read"](text)
        except ValueError as error:
            raise ImproperlyConfigured(
                f"{variable(item.name)}={text!r} cannot be read ({error}): it is "
                f"{item.metadata['says']}."
            ) from error
    known = {variable(item.name) for item in fields(Env)} | OTHER_VARIABLES
    for name in environ:
        if name.startswith("ORRERY_") and name not in known:
            raise ImproperlyConfigured(
                f"{name} is not a setting of Orrery; deploy/env.example lists them all."
            )
    return Env(**values)


# Read elsewhere: by agents, supervisors, ranks and the recorder, or set by one part for another.
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
}


def secret_key(env: Env) -> str:
    """The given key, or one made once and kept at `home/secret_key` with mode 600."""
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
    except FileExistsError:  # another process of ours was first
        return path.read_text().strip()
    return key


def database(env: Env) -> dict[str, Any]:
    """Django's DATABASES entry: SQLite in WAL mode by default, PostgreSQL by DATABASE_URL."""
    if not env.database_url:
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": env.home / "orrery.sqlite3",
            "OPTIONS": {
                "timeout": 30,
                "transaction_mode": "IMMEDIATE",  # a reader that turns writer never deadlocks
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA "
                "cache_size=-65536;"
                " PRAGMA mmap_size=268435456; PRAGMA temp_store=MEMORY;",
            },
        }
    url = urlsplit(env.database_url)
    if url.scheme not in ("postgres", "postgresql"):
        raise ImproperlyConfigured(
            f"DATABASE_URL has scheme {url.scheme!r}; Orrery speaks postgresql://."
        )
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
