"""Reproducibility bundles: all that repeats a run, as one JSON document, and submitting one.

The same hardware, versions, plan, code and data give the same losses bit by bit. Files of data are
named by fingerprint, not included; code of scripts is included.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Final

from django.conf import settings
from pydantic import ValidationError

from orchestrator.accounts.models import User
from orchestrator.common.errors import conflict, invalid
from orchestrator.fleet.models import Node
from orchestrator.runs.code import record
from orchestrator.runs.code.capture import MOST_DIFF_BYTES, Captured, capture, workdir_of
from orchestrator.runs.datasets import selectors
from orchestrator.runs.datasets.from_bundle import with_data_sets_of_bundle
from orchestrator.runs.datasets.references import references
from orchestrator.runs.models import Attempt, Run
from orchestrator.runs.submission.run_paths import spec_texts
from orchestrator.runs.submission.submit import run_submit, spec_invalid
from orchestrator.runs.submission.weights import models_root
from workers.contracts import Problem
from workers.contracts.wire import versions
from workers.contracts.wire.programs.program_files import ProgramFiles, is_below

FORMAT: Final = 1


def bundle_of(run: Run) -> dict[str, Any]:
    """The bundle of a run that Orrery starts. Raises 409 for an external one."""
    if run.kind == "external":
        raise conflict(
            f"Run {run.pk} was not started by Orrery, so its program is not known here.",
            type="external-run",
        )
    spec, secrets = _without_secrets({**run.spec, **({"plan": run.plan} if run.plan else {})})
    return {
        "format": FORMAT,
        "release": versions.RELEASE,
        "run": {"id": str(run.pk), "name": run.name, "kind": run.kind},
        "spec": _relative(spec),
        "versions": _versions(run),
        "files": _fingerprints(spec),
        "data_sets": _data_sets(run),
        "code": _code(run),
        "secrets": secrets,
    }


def bundle_submit(
    *,
    owner: User,
    bundle: Any,
    name: str = "",
    other_versions: bool = False,
    force: bool = False,
) -> Run:
    """Submit the run of a bundle.

    Raises 422 for another format, for data or code that is missing or differs, and as `run_submit`
    does; 409 for a bundle of another release unless `other_versions`.
    """
    document = _checked(bundle)
    release = str(document.get("release"))
    if release != versions.RELEASE and not other_versions:
        raise conflict(
            f"The bundle was written by release {release}, this is {versions.RELEASE}; its losses "
            f"may differ. Install release {release}, or submit it with other_versions.",
            type="bundle-of-another-version",
            title="The bundle is of another version",
        )
    if document.get("secrets"):
        names = ", ".join(document["secrets"])
        raise invalid(
            "secrets",
            f"the bundle has no values for {names}",
            "Submit its spec with these variables in script.secrets.",
        )
    spec, code = _with_code(document["spec"], document.get("code"))
    spec = with_data_sets_of_bundle(spec, document.get("data_sets"), by=owner)
    if problems := list(_differences(document.get("files") or {})):
        raise spec_invalid(problems)
    origin = document.get("run") or {}
    title = name.strip() or str(origin.get("name") or "from a bundle")
    return run_submit(owner=owner, name=title[:160], spec=spec, force=force, code=code)


def _checked(bundle: Any) -> dict[str, Any]:
    if not isinstance(bundle, dict) or "format" not in bundle:
        raise invalid(
            "bundle", "this is not a bundle of a run", "Download a bundle from a run's page."
        )
    if bundle["format"] != FORMAT:
        raise invalid(
            "bundle.format",
            f"the bundle has format {bundle['format']!r} (release "
            f"{bundle.get('release', 'unknown')}); this release reads {FORMAT}",
            f"Install release {bundle.get('release', 'unknown')}.",
        )
    if not isinstance(bundle.get("spec"), dict):
        raise invalid("bundle.spec", "the bundle has no spec", "Download the bundle again.")
    return bundle


def _without_secrets(spec: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    script = spec.get("script")
    if not isinstance(script, dict) or not script.get("secrets"):
        return spec, []
    rest = {key: value for key, value in script.items() if key != "secrets"}
    return {**spec, "script": rest}, sorted(script["secrets"])


def _versions(run: Run) -> dict[str, Any]:
    """What the nodes of the newest attempt reported."""
    attempt = Attempt.objects.filter(run=run).order_by("-number").first()
    placement = attempt.placement if attempt is not None else []
    names = [str(share["node"]) for share in placement]
    nodes = Node.objects.filter(name__in=names)
    return {
        "orrery": versions.RELEASE,
        "nodes": [
            {
                "name": node.name,
                "versions": node.inventory.get("versions") or {},
                "devices": sorted(
                    {str(device.get("name")) for device in node.inventory.get("devices") or []}
                ),
            }
            for node in nodes.order_by("name")
        ],
    }


def _roots() -> list[Path]:
    return [*settings.DATA_ROOTS, models_root(), Path(settings.ENV.home)]


def _relative(value: Any) -> Any:
    """The value with paths below a data root, the models or the home made relative."""
    if isinstance(value, dict):
        return {key: _relative(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_relative(item) for item in value]
    if isinstance(value, str) and value.startswith("/"):
        for root in _roots():
            if Path(value).is_relative_to(root) and value != str(root):
                return str(Path(value).relative_to(root))
    return value


def _fingerprints(spec: Mapping[str, Any]) -> dict[str, str]:
    """`{relative path: SHA-256}` of files and folders that the spec names and this machine has."""
    digests = {}
    other = {str((each.data or {}).get("path")) for each in references(spec)}
    other.add(str((spec.get("script") or {}).get("workdir")))
    for _, text in spec_texts(spec):
        if not text.startswith("/") or text in other:
            continue
        relative = _relative(text)
        if relative != text and os.path.exists(text):
            digests[relative] = _digest(Path(text))
    return digests


def _data_sets(run: Run) -> dict[str, Any]:
    """`{name@version: facts}` of the registered data that the run uses."""
    return {
        use.data_set.label: {
            "fingerprint": use.data_set.fingerprint,
            "bytes": use.data_set.bytes,
            "folder": use.data_set.folder,
            "format": use.data_set.format,
        }
        for use in selectors.used_by(run=run)
    }


def _digest(path: Path) -> str:
    """SHA-256 of a file; of a folder, over the names and digests of its files."""
    if path.is_file():
        status = path.stat()
        return _file_digest(str(path), status.st_mtime_ns, status.st_size)
    digest = hashlib.sha256()
    for each in sorted(path.rglob("*")):
        if each.is_file():
            name = each.relative_to(path).as_posix()
            digest.update(f"{name}\0{_digest(each)}\n".encode())
    return digest.hexdigest()


@lru_cache(maxsize=4096)
def _file_digest(path: str, changed_ns: int, size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _differences(files: Mapping[str, Any]) -> Iterator[Problem]:
    for name, expected in files.items():
        place = _place(str(name))
        if place is None:
            yield Problem(
                field=f"files.{name}",
                message=f"{name} does not exist on this machine",
                hint=f"Copy it to {settings.DATA_ROOTS[0] / str(name)}.",
            )
        elif _digest(place) != expected:
            yield Problem(
                field=f"files.{name}",
                message=f"{place} differs from the data of the original run",
                hint="Copy the original file there.",
            )


def _place(name: str) -> Path | None:
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        return None
    return next((root / name for root in _roots() if os.path.exists(root / name)), None)


def _code(run: Run) -> dict[str, Any] | None:
    """`{files, start, …}` of a script's code at its submit; None for other runs."""
    stored = record.code_of(run)
    if reason := record.unusable(run):
        raise conflict(f"{reason} A bundle would lack it.", type="code-deleted")
    if stored is not None:
        return {
            "files": _files(record.files_of(stored)),
            "start": stored.start,
            "fingerprint": stored.snapshot.fingerprint,
            "git": stored.git,
            "commit": stored.commit,
            "branch": stored.branch,
            "remote": stored.remote,
            "submodules": stored.submodules,
            "diff": base64.b64encode(bytes(stored.diff)).decode(),
        }
    workdir = workdir_of(run.spec)  # of an earlier release: the folder as it is now
    now = capture(workdir, settings.DATA_ROOTS) if workdir is not None else None
    if now is None:
        return None
    return {
        "files": _files(now.files),
        "start": now.start,
        "fingerprint": now.files.fingerprint,
    }


def _files(program: ProgramFiles) -> dict[str, Any]:
    return {name: file.model_dump(exclude_defaults=True) for name, file in program.files.items()}


def _with_code(spec: dict[str, Any], code: Any) -> tuple[dict[str, Any], Captured | None]:
    """The spec with a folder of the bundle's code, named by its fingerprint, and that code."""
    if not isinstance(code, dict) or not isinstance(spec.get("script"), dict):
        return spec, None
    if "files" not in code:  # texts by name, of an earlier bundle
        code = {"files": {name: {"text": text} for name, text in code.items()}}
    try:
        program = ProgramFiles.model_validate({"files": code["files"]})
        start = str(code.get("start") or "")
        diff = base64.b64decode(str(code.get("diff") or ""), validate=True)
        if start and not is_below(start):
            raise ValueError(f"{start!r} is not a folder of the program")
    except ValueError as error:
        detail = str(error)
        if isinstance(error, ValidationError):
            detail = str(error.errors(include_url=False)[0]["msg"])
        raise invalid(
            "code", f"the code cannot be used: {detail}", "Download the bundle again."
        ) from None
    fingerprint = program.fingerprint
    if code.get("fingerprint", fingerprint) != fingerprint:
        raise invalid("code", "the code differs from its fingerprint", "Download the bundle again.")
    folder = Path(os.path.realpath(settings.DATA_ROOTS[0])) / "code" / fingerprint[:16]
    if not folder.is_dir():
        _write(program, folder)
    submodules = code.get("submodules")
    captured = Captured(
        program,
        str(folder),
        start,
        git=bool(code.get("git")),
        commit=str(code.get("commit") or "")[:64],
        branch=str(code.get("branch") or "")[:200],
        remote=str(code.get("remote") or "")[:500],
        submodules=submodules if isinstance(submodules, dict) else {},
        diff=diff[:MOST_DIFF_BYTES],
        notes=["The code is from a bundle."],
    )
    workdir = str(folder / start) if start else str(folder)
    return {**spec, "script": {**spec["script"], "workdir": workdir}}, captured


def _write(program: ProgramFiles, folder: Path) -> None:
    """Write the files into a new folder; links last, so that none is followed."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for name, file in sorted(program.files.items(), key=lambda item: item[1].link is not None):
        target = temporary / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.link is not None:
            os.symlink(file.link, target)
            continue
        target.write_bytes(file.data)
        if file.executable:
            target.chmod(0o755)
    os.rename(temporary, folder)
