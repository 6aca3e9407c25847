"""Types of settings that are written as text: names, paths, networks, the address of a store."""

from __future__ import annotations

import os
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator
from pydantic_settings import NoDecode

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


def check_store_url(url: str) -> str:
    """The address of a store, checked. Raises ValueError."""
    if url:
        split_url(url)
    return url


def _absolute(path: Path) -> Path:
    return path.expanduser().resolve()


AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_names)]
Entries = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_entries)]
Networks = Annotated[
    tuple[str, ...], NoDecode, BeforeValidator(_split_names), AfterValidator(_networks)
]
Paths = Annotated[tuple[AbsolutePath, ...], NoDecode, BeforeValidator(_split_paths)]
