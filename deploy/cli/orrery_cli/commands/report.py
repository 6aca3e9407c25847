"""`orrery report`: list, show, create, update and share reports."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from orrery_cli.errors import USAGE, CliError
from orrery_cli.options import AsJson
from orrery_cli.output import age, print_items, print_json

OptionalText = Optional[str]  # noqa: UP045  (Python 3.10 with older releases of typer)
OptionalInt = Optional[int]  # noqa: UP045
ReportId = Annotated[int, typer.Argument(min=1, help="Id of a report.")]
MarkdownFile = Annotated[str, typer.Argument(metavar="FILE", help="Markdown; - for stdin.")]
Note = Annotated[str, typer.Option(help="What changed.")]

app = typer.Typer(help="Write reports in Markdown and share them.", no_args_is_help=True)


@app.command("list")
def listed(
    query: Annotated[OptionalText, typer.Option("--query", "-q", help="Part of a title.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List reports, newest first."""
    from orrery_cli.client import Client

    with Client() as client:
        rows = list(client.items("reports", most=limit, q=query))
    print_items(
        rows,
        ("id", "title", "owner", "version", "changed", "open comments"),
        lambda row: (
            row["id"],
            row["title"],
            row["owner"],
            row["version"],
            age(row["updated"]),
            row["open_comments"] or None,
        ),
        as_json=as_json,
        empty="No reports. `orrery report create FILE` creates one.",
        right=("id", "version", "changed", "open comments"),
    )


@app.command("show")
def show(
    report: ReportId,
    version: Annotated[OptionalInt, typer.Option(min=1, help="Default: the newest.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print a report's Markdown."""
    from orrery_cli.client import Client

    path = f"reports/{report}" if version is None else f"reports/{report}/versions/{version}"
    with Client() as client:
        document = client.get(path)
    if as_json:
        print_json(document)
    else:
        print(document["text"])


@app.command("create")
def create(
    file: MarkdownFile,
    title: Annotated[OptionalText, typer.Option(help="Default: the first heading.")] = None,
    note: Note = "",
    as_json: AsJson = False,
) -> None:
    """Create a report from a Markdown file."""
    from orrery_cli.client import Client

    text = read_markdown(file)
    heading, rest = split_title(text)
    title = title or heading
    text = rest if heading == title else text
    if not title:
        raise CliError(f"{file} has no heading", "Give the report a --title.", code=USAGE)
    with Client() as client:
        report = client.create("reports", {"title": title, "text": text, "note": note})
        _print_saved(client.url, report, as_json)


@app.command("update")
def update(
    report: ReportId,
    file: MarkdownFile,
    title: Annotated[OptionalText, typer.Option(help="Default: unchanged.")] = None,
    note: Note = "",
    version: Annotated[
        OptionalInt,
        typer.Option(min=1, help="The version that your text is based on. Default: the newest."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Save a Markdown file as the newest version of a report.

    With --version, the update is refused if another version was saved since.
    """
    from orrery_cli.client import Client

    text = read_markdown(file)
    with Client() as client:
        current = client.get(f"reports/{report}")
        heading, rest = split_title(text)
        if heading == (title or current["title"]):
            text = rest
        body: dict[str, Any] = {"version": version or current["version"], "text": text}
        body |= {"note": note, **({"title": title} if title else {})}
        _print_saved(client.url, client.change(f"reports/{report}", body), as_json)


@app.command("share")
def share(
    report: ReportId,
    days: Annotated[int, typer.Option(min=1, max=365, help="Days until the link expires.")] = 30,
    note: Annotated[str, typer.Option(help="For whom the link is.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a link that shows a report without a login until it expires."""
    from orrery_cli.client import Client

    expires = datetime.now(UTC) + timedelta(days=days)
    body = {"expires": expires.isoformat(), "note": note}
    with Client() as client:
        link = client.create(f"reports/{report}/links", body)
        address = f"{client.url}{link['path']}"
    if as_json:
        print_json({**link, "url": address})
        return
    print(address)
    print(f"Expires on {expires:%Y-%m-%d}. Revoke it on the report's page Share.", file=sys.stderr)


def read_markdown(source: str) -> str:
    """The text of a file, or of standard input (`-`). Raises CliError."""
    try:
        return sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CliError(f"cannot read {source}: {reason}", code=USAGE) from None


def first_heading(text: str) -> str:
    """The first heading of a Markdown text outside of fenced blocks; empty without one."""
    fence = ""
    for line in text.splitlines():
        if marks := re.match(r" {0,3}(`{3,}|~{3,})", line):
            fence = "" if fence and line.strip().startswith(fence) else fence or marks[1]
        elif not fence and (heading := re.match(r" {0,3}#{1,6}\s+(.*?)(\s+#+)?\s*$", line)):
            return heading[1].strip()
    return ""


def split_title(text: str) -> tuple[str, str]:
    """The first heading, and the text: without it if it begins the text, since pages show both."""
    title = first_heading(text)
    first, _, rest = text.lstrip().partition("\n")
    begins = title != "" and first.startswith("#") and first_heading(first) == title
    return title, rest.lstrip("\n") if begins else text


def _print_saved(url: str, report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    print(f"report {report['id']} {report['title']}: version {report['version']}")
    print(f"{url}/reports/{report['id']}/")
