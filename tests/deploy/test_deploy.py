"""Validates each file of deploy/ with its program or published schema, without a Docker engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests import memory_limits

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def need(program: str, *places: str) -> str:
    """The program's path.

    Where it is missing CI fails and a person's machine skips with a sentence.
    """
    for place in (program, *places):
        path = shutil.which(place)
        if path:
            return path
    if os.environ.get("CI"):
        pytest.fail(f"{program} is not installed; tools/system.py installs it")
    pytest.skip(f"{program} is not installed here")


def test_env_example_lists_every_setting() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import env_example
    finally:
        sys.path.pop(0)
    assert (DEPLOY / "env.example").read_text() == env_example.text(), (
        "run: python tools/env_example.py"
    )


def test_compose_follows_its_published_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(DEPLOY / "compose.yaml")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_resolves_with_the_settings_it_names(tmp_path: Path) -> None:
    """By `config` of docker-compose, which needs no Docker engine."""
    program = need("docker-compose")
    deploy = tmp_path / "deploy"
    deploy.mkdir()
    text = (DEPLOY / "compose.yaml").read_text()
    # docker-compose 1 does not know the name of a project; the schema of the test above does
    text, named = re.subn(r"^name: orrery\n", "", text, flags=re.MULTILINE)
    assert named == 1
    (deploy / "compose.yaml").write_text(text)
    required = set(re.findall(r"\$\{(\w+):\?", text))
    example = (DEPLOY / "env.example").read_text()

    def config(names: set[str]) -> subprocess.CompletedProcess[str]:
        lines = [example, *(f"{name}=secret-{name}" for name in sorted(names)), ""]
        (deploy / ".env").write_text("\n".join(lines))
        command = [program, "-f", "compose.yaml", "--env-file", ".env", "--profile", "node"]
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        return subprocess.run(
            [*command, "config"], cwd=deploy, env=environ, capture_output=True, text=True
        )

    done = config(required)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert set(services) == set(yaml.safe_load(text)["services"])
    for name, service in services.items():
        assert "${" not in str(service), name
        if "build" in service:
            assert Path(service["build"]["context"]) == tmp_path, name
    broker = "rediss://:secret-VALKEY_PASSWORD@broker:6379/0"
    for name in ("migrate", "web", "scheduler", "ingest", "jobs"):
        assert services[name]["environment"]["REDIS_URL"] == broker, name
    assert "--port 0 --tls-port 6379" in services["broker"]["command"]
    assert "ports" not in services["broker"] and "ports" not in services["database"]
    for name in sorted(required):
        done = config(required - {name})
        assert done.returncode != 0 and name in done.stderr, f"{name} is not required"


def test_compose_names_real_dockerfiles_and_commands() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    commands = {"migrate", "scheduler", "ingest", "jobs"}
    for name, service in services.items():
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).exists(), name
        if isinstance(service.get("command"), list) and "manage.py" in service["command"]:
            assert service["command"][2] in commands, name


@pytest.mark.parametrize("name", ["control", "node"])
def test_dockerfiles_copy_what_exists(name: str) -> None:
    text = (DEPLOY / "docker" / f"{name}.Dockerfile").read_text()
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), (
                f"{name}.Dockerfile copies {source}, which is not there"
            )


@pytest.mark.parametrize(
    "unit", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda path: path.stem
)
def test_systemd_units_verify(unit: Path, tmp_path: Path) -> None:
    program = need("systemd-analyze")
    # the units name the installed place; the checker wants an executable that exists
    text = re.sub(r"ExecStart=\S+", f"ExecStart={sys.executable}", unit.read_text())
    copy = tmp_path / unit.name
    copy.write_text(text)
    done = subprocess.run(
        [program, "verify", "--recursive-errors=no", str(copy)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert unit.name not in done.stderr, done.stderr


def test_nginx_accepts_the_configuration(tmp_path: Path) -> None:
    nginx = need("nginx", "/usr/sbin/nginx")
    openssl = need("openssl")
    certificate, key = tmp_path / "orrery.crt", tmp_path / "orrery.key"
    make = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=orrery.example.com",
        "-days",
        "1",
    ]
    subprocess.run(
        [*make, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    text = (DEPLOY / "nginx" / "orrery.conf").read_text().replace("/etc/nginx/tls", str(tmp_path))
    (tmp_path / "orrery.conf").write_text(text)
    main = (
        f"events {{}}\npid {tmp_path}/pid;\nhttp {{ access_log off; include "
        f"{tmp_path}/orrery.conf; }}\n"
    )
    (tmp_path / "nginx.conf").write_text(main)
    command = [
        nginx,
        "-t",
        "-p",
        str(tmp_path),
        "-c",
        str(tmp_path / "nginx.conf"),
        "-e",
        str(tmp_path / "errors"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_web_process_limits_the_frames_of_sockets() -> None:
    """The default is 16 MB for each frame of each socket, which sends nothing that is used."""
    embedded = (ROOT / "orchestrator" / "config" / "embedded" / "up.py").read_text()
    assert '"--ws-max-size",\n        "65536"' in embedded
    starts = [
        line
        for path in DEPLOY.rglob("*")
        if path.is_file() and path.suffix not in (".md", ".tgz", ".pyc")
        for line in path.read_text(errors="replace").splitlines()
        if "uvicorn orchestrator" in line
    ]
    assert len(starts) >= 2
    assert all("--ws-max-size 65536 --ws-per-message-deflate false" in line for line in starts)


def test_the_documented_memory_limits_are_enforced() -> None:
    limits = memory_limits.documented()
    assert {"web", "scheduler", "ingest", "jobs", "agent", "supervisor"} == set(limits)
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    for name in ("web", "scheduler", "ingest", "jobs"):
        unit = (DEPLOY / "systemd" / f"orrery-{name}.service").read_text()
        [size, suffix] = re.findall(r"^MemoryMax=(\d+)([GM])$", unit, re.MULTILINE)[0]
        assert int(size) * (1024 if suffix == "G" else 1) == limits[name], name
        assert services[name]["mem_limit"] == f"{size}{suffix.lower()}", name
    # the agent's unit holds its runs as well, whose memory is theirs
    assert "MemoryMax" not in (DEPLOY / "systemd" / "orrery-agent.service").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="slurmd runs the prolog as root")
@pytest.mark.parametrize(
    ("partitions", "user", "home", "refused"),
    [
        ("", "1", "/proc/none", False),  # nothing is checked unless partitions are named
        ("high low", "1", "/proc/none", True),
        ("high", "1", "/proc/none", False),
        ("low", "1", "/usr", False),
        ("low", "1", "", True),  # a folder of root's
        ("low", "0", "", False),
        ("low", "", "/proc/none", False),  # the user is unknown
    ],
)
def test_the_prolog_of_slurm_sees_what_the_user_of_the_job_sees(
    tmp_path: Path, partitions: str, user: str, home: str, refused: bool
) -> None:
    """As with a file server that maps root to a stranger."""
    shutil.copy(DEPLOY / "slurm" / "prolog.sh", tmp_path)
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    text = f'ORRERY_HOME={home or own}\nORRERY_PARTITIONS="{partitions}"\n'
    (tmp_path / "orrery.env").write_text(text)
    environ = {"PATH": os.environ["PATH"], "SLURM_JOB_PARTITION": "low"}
    environ |= {"SLURM_JOB_UID": user} if user else {}
    command = ["bash", str(tmp_path / "prolog.sh")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode == 1) is refused, done.stderr
