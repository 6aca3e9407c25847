"""`orrery download`: artifacts of a run, its bundle, or an archive of all its records."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from orrery_cli.errors import CliError
from orrery_cli.options import AsJson, RunId
from orrery_cli.output import print_json, size

if TYPE_CHECKING:
    from orrery_cli.client import Client

EXPORT_PATIENCE_S = 900.0


def download(
    run: RunId,
    names: Annotated[
        Optional[list[str]],  # noqa: UP045  (Python 3.10 with older releases of typer)
        typer.Argument(metavar="[ARTIFACT]...", help="Names; default: all artifacts."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the files.", file_okay=False)
    ] = Path("."),
    export: Annotated[
        bool, typer.Option("--export", help="A ZIP of spec, events, logs and all points.")
    ] = False,
    bundle: Annotated[
        bool, typer.Option("--bundle", help="The reproducibility bundle of the run.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Only list the artifacts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Download files of a run. Complete files replace older ones; a stop leaves no partial file."""
    from orrery_cli.client import Client

    with Client() as client:
        rows = [] if export or bundle else _artifacts(client, run, names or [])
        if listing:
            _print_listing(rows, as_json)
            return
        out.mkdir(parents=True, exist_ok=True)
        written = [
            _file(client, f"runs/{run}/artifacts/{row['id']}/download", out / _local(row["name"]))
            for row in rows
        ]
        if export:
            written.append(_export(client, run, out))
        if bundle:
            written.append(_bundle(client, run, out))
    if as_json:
        print_json({"files": [{"path": str(path), "bytes": count} for path, count in written]})
        return
    for path, count in written:
        print(f"{path} ({size(count)})")
    if not written:
        print(f"run {run} has no artifacts; --export downloads its points, events and logs")


def _artifacts(client: Client, run: int, names: list[str]) -> list[dict[str, Any]]:
    rows = list(client.items(f"runs/{run}/artifacts"))
    if not names:
        return rows
    known = [row["name"] for row in rows]
    for name in names:
        if name not in known:
            raise CliError(
                f"run {run} has no artifact {name}",
                f"Choose one of {', '.join(known)}." if known else "",
            )
    return [row for row in rows if row["name"] in names]


def _print_listing(rows: list[dict[str, Any]], as_json: bool) -> None:
    from orrery_cli.output import print_table

    if as_json:
        print_json({"items": rows})
        return
    cells = ((row["name"], size(row["bytes"])) for row in rows)
    print_table(("name", "size"), cells, empty="No artifacts.", right=("size",))


def _local(name: str) -> Path:
    """A relative path without `..`, whatever the name of the artifact is."""
    parts = [part for part in PurePosixPath(name).parts if part not in ("/", "..", ".")]
    return Path(*parts) if parts else Path("artifact")


def _file(client: Client, path: str, target: Path) -> tuple[Path, int]:
    """Write a response to a temporary file, then rename it."""
    import httpx

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.part")
    count = 0
    try:
        with client.stream(path) as response, open(partial, "wb") as stream:
            announced = int(response.headers.get("Content-Length", 0))
            with _bar(target.name, announced) as advance:
                for chunk in response.iter_raw():
                    stream.write(chunk)
                    count += len(chunk)
                    advance(len(chunk))
        if announced and count != announced:
            raise CliError(
                f"{target.name} is incomplete: {count} of {announced} bytes", "Try again."
            )
        partial.replace(target)
    except httpx.TransportError as error:
        raise CliError(f"the download of {target.name} broke off: {error}", "Try again.") from None
    except OSError as error:
        raise CliError(f"cannot write {target}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    return target, count


@contextmanager
def _bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Reports bytes to a progress bar on a terminal; to nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=total or None)
        yield lambda count: progress.advance(task, count)


def _export(client: Client, run: int, out: Path) -> tuple[Path, int]:
    """Request the archive, wait until the server has built it, and download it."""
    row = client.create("exports", {"run": run})
    until = time.monotonic() + EXPORT_PATIENCE_S
    while row["state"] == "queued":
        if time.monotonic() > until:
            raise CliError(f"export {row['id']} is not ready", "Open the page Exports later.")
        time.sleep(1)
        row = client.get(f"exports/{row['id']}")
    if row["state"] == "failed":
        raise CliError(f"export {row['id']} failed: {row['error']}")
    return _file(client, f"exports/{row['id']}/download", out / f"run-{run}.zip")


def _bundle(client: Client, run: int, out: Path) -> tuple[Path, int]:
    text = json.dumps(client.get(f"runs/{run}/bundle"), indent=1)
    path = out / f"run-{run}-bundle.json"
    path.write_text(text, encoding="utf-8")
    return path, len(text.encode())
