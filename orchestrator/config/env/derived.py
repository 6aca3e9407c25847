"""Values that follow from several settings: the secret key and Django's database entry."""

from __future__ import annotations

import os
import secrets
from typing import Any
from urllib.parse import unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured

from orchestrator.config.env.variables import Env


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
    """Django's DATABASES entry: SQLite in WAL mode by default, PostgreSQL with DATABASE_URL.

    Raises ImproperlyConfigured for a URL of another database.
    """
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
