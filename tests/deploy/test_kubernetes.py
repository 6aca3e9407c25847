"""The manifests of deploy/kubernetes: valid by published schemas, and enough for the engine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_deploy import DEPLOY
from tests.kubernetes import schemas

FOLDERS = sorted(path.parent for path in (DEPLOY / "kubernetes").rglob("kustomization.yaml"))


def resources(folder: Path) -> list[dict[str, Any]]:
    """All objects that a kustomization names, of bases too."""
    items: list[dict[str, Any]] = []
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    for name in listed:
        path = (folder / name).resolve()
        if path.is_dir():
            items += resources(path)
        else:
            items += [item for item in yaml.safe_load_all(path.read_text()) if item]
    return items


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_every_object_is_valid_against_its_published_schema(folder: Path) -> None:
    items = resources(folder)
    assert items
    for item in items:
        assert schemas.problems(item) == [], item["metadata"]["name"]
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"} <= {
        *kustomization["resources"],
        *(name for one in kustomization.get("secretGenerator", []) for name in one["envs"]),
    }


def test_the_control_plane_runs_every_program_with_one_home() -> None:
    items = resources(DEPLOY / "kubernetes" / "control")
    pods = [item["spec"]["template"]["spec"] for item in items if "template" in item["spec"]]
    commands = [pod["containers"][0].get("command", ["", "", "web"])[2] for pod in pods]
    assert set(commands) == {"web", "scheduler", "ingest", "jobs", "migrate"}
    for pod in pods:
        claims = [one.get("persistentVolumeClaim", {}).get("claimName") for one in pod["volumes"]]
        assert "orrery-control" in claims and pod["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_kustomize_builds_it(folder: Path, tmp_path: Path) -> None:
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed here")
    copy = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", copy)
    (copy / "control" / "orrery.env").write_text("ORRERY_SECRET_KEY=x\n")
    command = ["kubectl", "kustomize", str(copy / folder.name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for item in yaml.safe_load_all(done.stdout):
        assert schemas.problems(item) == [], item["metadata"]["name"]


def test_the_role_allows_what_the_engine_requests() -> None:
    items = resources(DEPLOY / "kubernetes" / "engine")
    role = next(item for item in items if item["kind"] == "Role")
    allowed = {
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    mirrored = {
        (name, verb) for name in ("jobsets", "workloads", "pods") for verb in ("list", "watch")
    }
    own = {("jobsets", verb) for verb in ("create", "get", "delete")}
    secrets = {("secrets", verb) for verb in ("create", "patch", "delete")}
    assert mirrored | own | secrets | {("pods", "delete"), ("localqueues", "get")} <= allowed
    # reading Secrets would show the tickets of all runs
    assert not {("secrets", "get"), ("secrets", "list"), ("secrets", "watch")} & allowed
