"""Reads all settings once from the environment. A wrong value stops the start."""

from __future__ import annotations

import os
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from pydantic import ValidationError

from orchestrator.config.env.variables import Env


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
