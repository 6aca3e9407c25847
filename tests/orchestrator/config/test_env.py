"""Settings are read once and typed; a wrong value stops the start and names the variable."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from orchestrator.config.env import derived
from orchestrator.config.env import read as environment
from orchestrator.config.env.variables import Env

Read = Callable[[dict[str, str]], Env]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Reads the settings from an environment with these variables only."""

    def read(variables: dict[str, str]) -> Env:
        for name in os.environ:
            if name.startswith("ORRERY_") or name in ("DATABASE_URL", "REDIS_URL"):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return environment.read()

    return read


def test_defaults_need_no_variable(read: Read) -> None:
    settings = read({})
    assert (settings.host, settings.port, settings.demo) == ("127.0.0.1", 8000, True)
    assert settings.database_url == ""
    assert settings.home == Path("var").resolve()


def test_values_are_typed(read: Read, tmp_path: Path) -> None:
    settings = read(
        {
            "ORRERY_PORT": "9000",
            "ORRERY_DEMO": "no",
            "ORRERY_DATA_ROOTS": f"{tmp_path}:/srv/data",
            "ORRERY_ALLOWED_HOSTS": "a.example, b.example",
        }
    )
    assert (settings.port, settings.demo) == (9000, False)
    assert settings.allowed_hosts == ("a.example", "b.example")
    assert settings.data_roots == (tmp_path.resolve(), Path("/srv/data"))


def test_empty_variables_keep_the_defaults(read: Read) -> None:
    settings = read({"ORRERY_PORT": "", "ORRERY_SECRET_KEY": "", "REDIS_URL": ""})
    assert (settings.port, settings.secret_key, settings.redis_url) == (8000, "", "")


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("ORRERY_PORT", "eighty", "port that"),
        ("ORRERY_DEMO", "perhaps", "1 or 0"),
        ("ORRERY_TICK_S", "often", "a number: the scheduler"),
        ("ORRERY_PROT", "8000", "not a setting"),
    ],
)
def test_a_wrong_setting_names_its_variable(read: Read, name: str, value: str, hint: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=hint) as raised:
        read({name: value})
    assert name in str(raised.value)


def test_the_secret_key_is_generated_once_and_private(read: Read, tmp_path: Path) -> None:
    settings = read({"ORRERY_HOME": str(tmp_path / "home")})
    key = derived.secret_key(settings)
    assert len(key) > 40
    assert derived.secret_key(settings) == key
    assert (tmp_path / "home" / "secret_key").stat().st_mode & 0o077 == 0


def test_database_url(read: Read) -> None:
    made = derived.database(read({"DATABASE_URL": "postgresql://ada:p%40ss@db:5433/orrery"}))
    assert (made["USER"], made["PASSWORD"], made["HOST"], made["PORT"], made["NAME"]) == (
        "ada",
        "p@ss",
        "db",
        5433,
        "orrery",
    )
    with pytest.raises(ImproperlyConfigured, match="mysql"):
        derived.database(read({"DATABASE_URL": "mysql://x/y"}))
