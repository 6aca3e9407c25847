"""Settings are read once, typed, and a wrong one stops the start with a hint."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from orchestrator.config import env


def test_defaults_need_no_variable() -> None:
    read = env.read({})
    assert (read.host, read.port, read.demo, read.database_url) == ("127.0.0.1", 8000, True, "")
    assert read.home == Path("var").resolve()


def test_values_are_typed(tmp_path: Path) -> None:
    read = env.read(
        {
            "ORRERY_PORT": "9000",
            "ORRERY_DEMO": "no",
            "ORRERY_DATA_ROOTS": f"{tmp_path}:/srv/data",
            "ORRERY_ALLOWED_HOSTS": "a.example, b.example",
        }
    )
    assert (read.port, read.demo, read.allowed_hosts) == (9000, False, ("a.example", "b.example"))
    assert read.data_roots == (tmp_path.resolve(), Path("/srv/data"))


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("ORRERY_PORT", "eighty", "port that"),
        ("ORRERY_DEMO", "perhaps", "say 1 or 0"),
        ("ORRERY_PROT", "8000", "not a setting"),
    ],
)
def test_a_wrong_setting_names_itself(name: str, value: str, hint: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=hint) as raised:
        env.read({name: value})
    assert name in str(raised.value)


def test_the_secret_key_is_made_once_and_private(tmp_path: Path) -> None:
    settings = env.read({"ORRERY_HOME": str(tmp_path / "home")})
    key = env.secret_key(settings)
    assert len(key) > 40
    assert env.secret_key(settings) == key
    assert (tmp_path / "home" / "secret_key").stat().st_mode & 0o077 == 0


def test_database_url() -> None:
    made = env.database(env.read({"DATABASE_URL": "postgresql://ada:p%40ss@db:5433/orrery"}))
    assert (made["USER"], made["PASSWORD"], made["HOST"], made["PORT"], made["NAME"]) == (
        "ada",
        "p@ss",
        "db",
        5433,
        "orrery",
    )
    with pytest.raises(ImproperlyConfigured, match="mysql"):
        env.database(env.read({"DATABASE_URL": "mysql://x/y"}))
