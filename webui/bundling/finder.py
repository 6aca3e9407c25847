"""A finder of static files: bundled scripts and styles, with their compressed forms.

The files lie in a folder named by the digest of their sources below `settings.BUNDLES`, so they are
written once per version. `collectstatic` copies them from a temporary folder.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from django.contrib.staticfiles.finders import BaseFinder
from django.core.files.storage import FileSystemStorage

from webui.bundling.modules import bundle

_STATIC: Final = Path(__file__).parents[1] / "static" / "webui"
_SITE: Final = ("tokens", "base", "components")  # of every page, in this order
_HTMX: Final = "django_htmx/htmx-2.min.js"
_LEAST: Final = 400  # bytes; compression makes smaller files hardly shorter


class BundleFinder(BaseFinder):
    """Lists the bundled files before the finders of their sources."""

    def find(self, path: str, find_all: bool = False, **options: Any) -> Any:
        """The path of the bundled file, or nothing."""
        known = path in _names()
        match = os.path.join(_folder(), path) if known else ""
        return ([match] if known else []) if find_all else match or []

    def list(self, ignore_patterns: Iterable[str] | None) -> Iterator[tuple[str, Any]]:
        """Each file's name and the storage that has it."""
        storage = FileSystemStorage(location=_folder())
        for name in _names():
            yield name, storage


def files() -> dict[str, bytes]:
    """All bundled files by name, without their compressed forms. Raises as `modules.bundle`."""
    scripts = {path.stem: path.read_text() for path in sorted((_STATIC / "js").glob("*.js"))}
    styles = {path.stem: path.read_text() for path in sorted((_STATIC / "css").glob("*.css"))}
    styles["site"] = "\n".join(styles[name] for name in _SITE)
    result = {f"webui/js/{name}.js": text.encode() for name, text in bundle(scripts).items()}
    result |= {f"webui/css/{name}.css": text.encode() for name, text in styles.items()}
    package = find_spec("django_htmx")
    assert package is not None and package.origin is not None
    result[_HTMX] = (Path(package.origin).parent / "static" / _HTMX).read_bytes()
    return result


@cache
def _names() -> tuple[str, ...]:
    folder = Path(_folder())
    return tuple(str(path.relative_to(folder)) for path in sorted(folder.rglob("*.*")))


@cache
def _folder() -> str:
    """The folder with the files; writes it if it does not exist."""
    if "collectstatic" in sys.argv:
        temporary = tempfile.TemporaryDirectory(prefix="orrery-bundles-")
        _temporary.append(temporary)  # until the process ends
        _write(files(), Path(temporary.name))
        return temporary.name
    return str(written_below(Path(settings.BUNDLES)))


def written_below(parent: Path) -> Path:
    """The folder below `parent` with this version's files; writes it if it does not exist."""
    content = files()
    digest = hashlib.sha256()
    for name, data in content.items():
        digest.update(f"{name} {len(data)} ".encode() + data)
    folder = parent / f"{digest.hexdigest()[:16]}{'-br' if _brotli() else ''}"
    if not folder.is_dir():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent) as near:
            made = Path(near) / "made"
            _write(content, made)
            try:
                made.rename(folder)
            except OSError:  # another process was faster
                if not folder.is_dir():
                    raise
    return folder


_temporary: list[tempfile.TemporaryDirectory[str]] = []


def _write(content: dict[str, bytes], folder: Path) -> None:
    brotli = _brotli()
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        if len(data) < _LEAST:
            continue
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data, 9, mtime=0))
        if brotli is not None:
            path.with_name(f"{path.name}.br").write_bytes(brotli.compress(data))


def _brotli() -> Any:
    """The module `brotli` if it is installed; without it browsers get gzip."""
    return import_module("brotli") if find_spec("brotli") else None
