"""Settings of engines and of their pools, as administrators enter them. Does not run commands."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from workers.contracts.base import Contract

_ROOT = str(Path(__file__).resolve().parents[3])
_WORD = r"^[A-Za-z0-9][A-Za-z0-9_.@-]*$"
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]+)?")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
# options that Orrery sets itself, or that let a job run elsewhere than recorded
_RESERVED = (
    "--job-name",
    "--comment",
    "--nodes",
    "--ntasks",
    "--uid",
    "--gid",
    "--requeue",
    "--no-requeue",
    "--array",
    "--wrap",
    "--parsable",
    "--wait",
    "--dependency",
    "-",
)


def _option(text: str) -> str:
    name = text.partition("=")[0]
    if not text.startswith("--") or any(c in text for c in "\n\r\0"):
        raise ValueError(f"{text!r} is not a long option of sbatch, such as --exclusive")
    if any(name == reserved or name.startswith("--ntasks") for reserved in _RESERVED):
        raise ValueError(f"{name} is set by Orrery and cannot be an option of a pool")
    return text


def absolute_path(text: str) -> str:
    """The text if it is an absolute path or one below $HOME, else ValueError."""
    rest = text.removeprefix("$HOME")
    if not text.startswith(("/", "$HOME", "~")) or any(c in rest for c in "\n\r\0'\"`$\\"):
        raise ValueError(f"{text!r} is not an absolute path, or one below $HOME")
    return text


def _rest_url(text: str) -> str:
    """slurmrestd's address; a token must not cross a network without TLS."""
    if any(c.isspace() for c in text) or not (_is_socket(text) or _is_safe_url(text)):
        raise ValueError(
            f"{text!r} is not unix:/PATH, an https:// address, or http:// on this machine"
        )
    return text.rstrip("/")


def _is_socket(text: str) -> bool:
    return text.startswith("unix:/") and not text.startswith("unix://")


def _is_safe_url(text: str) -> bool:
    """Whether the URL names a host, no login, and uses TLS unless the host is this machine."""
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    if not host or not _HOST_AND_PORT.fullmatch(parts.netloc):
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and host in _LOOPBACK)


def _token(text: object) -> object:
    """`scontrol token` prints SLURM_JWT=TOKEN."""
    return text.strip().removeprefix("SLURM_JWT=") if isinstance(text, str) else text


class SlurmSettings(Contract):
    """How to reach a Slurm cluster, and where Orrery is on its nodes.

    `home` is shared by all nodes; runs and checkpoints are in it. `identity`: jobs of all users run
    as the control plane's user, or as the Unix user with the submitter's name (`--uid`, root only).
    `rest`: where slurmrestd reports jobs (commands do if it fails); `rest_user`: whose token it is;
    `rest_ca`: a file on the control plane with the authority of slurmrestd's certificate.
    """

    home: Annotated[str, AfterValidator(absolute_path)] = "$HOME/orrery"
    python: Annotated[str, AfterValidator(absolute_path)] = sys.executable
    source: Annotated[str, AfterValidator(absolute_path)] = _ROOT
    path: Annotated[str, Field(pattern=r"^[^\s'\"`;$]+$")] = "/usr/local/bin:/usr/bin:/bin"
    identity: Literal["service", "submitter"] = "service"
    commands: Annotated[str, AfterValidator(absolute_path)] | None = None
    config: Annotated[str, AfterValidator(absolute_path)] | None = None
    rest: Annotated[str, Field(max_length=500), AfterValidator(_rest_url)] | None = None
    rest_user: Annotated[str, Field(pattern=_WORD, max_length=80)] | None = None
    rest_ca: Annotated[str, Field(max_length=500), AfterValidator(absolute_path)] | None = None
    poll_s: Annotated[float, Field(ge=0.5, le=60)] = 3.0
    timeout_s: Annotated[float, Field(ge=1, le=120)] = 15.0
    stop_grace_s: Annotated[float, Field(ge=1, le=3600)] = 20.0


class SlurmPool(Contract):
    """What a pool means in Slurm. `devices_per_node`: default by the partition's GPUs or CPUs."""

    partition: Annotated[str, Field(pattern=_WORD, max_length=80)]
    account: Annotated[str, Field(pattern=_WORD, max_length=80)] | None = None
    qos: Annotated[str, Field(pattern=_WORD, max_length=80)] | None = None
    # name in the device catalogue, for predictions; default: cpu, or unknown with GPUs
    device: str | None = None
    devices_per_node: Annotated[int, Field(ge=1, le=1024)] | None = None
    cpus_per_device: Annotated[int, Field(ge=1, le=1024)] | None = None
    gres: Annotated[str, Field(pattern=r"^[A-Za-z0-9_:.-]+$")] = "gpu"
    options: list[Annotated[str, AfterValidator(_option)]] = []

    @property
    def target(self) -> str:
        """The partition."""
        return self.partition


class Credentials(Contract):
    """Secrets of a Slurm engine. `redis_url`: how its nodes reach the broker; default REDIS_URL.

    `rest_token`: a JSON Web Token for slurmrestd, as `scontrol token` prints it.
    """

    redis_url: Annotated[str, Field(pattern=r"^(redis|rediss|unix)://\S+$")] | None = None
    rest_token: (
        Annotated[
            str,
            BeforeValidator(_token),
            Field(pattern=r"^[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+$", max_length=8192),
        ]
        | None
    ) = None
