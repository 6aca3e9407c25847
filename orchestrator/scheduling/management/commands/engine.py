"""`manage.py engine`: adds, changes, checks and lists engines and their pools on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from orchestrator.common.errors import Refusal
from orchestrator.fleet.cluster_engines import services as engines
from orchestrator.fleet.models import Engine
from orchestrator.scheduling.cluster_engines import contact
from orchestrator.scheduling.cluster_engines.interface import EngineUnavailable

_FILES = {
    "rest_token": "Slurm",
    "kubeconfig": "Kubernetes",
    "token": "Kubernetes",
    "ca": "Kubernetes",
}


class Command(BaseCommand):
    """Manages clusters with a scheduler of their own: Slurm, Kubernetes."""

    help = "Adds, changes, checks, lists and removes engines (Slurm, Kubernetes) and their pools."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """One subcommand per action."""
        actions = parser.add_subparsers(dest="action", required=True)
        add = actions.add_parser("add", help="add an engine")
        add.add_argument("name")
        add.add_argument("--kind", default="slurm", choices=Engine.Kind.values)
        change = actions.add_parser("set", help="change settings; --enable or --disable")
        change.add_argument("name")
        change.add_argument("--enable", action="store_true")
        change.add_argument("--disable", action="store_true")
        for one in (add, change):
            one.add_argument("values", nargs="*", help="name=value, see docs/install.md")
            one.add_argument("--redis-url", help="how the engine's nodes reach the broker")
            for name, kind in _FILES.items():
                option = name.replace("_", "-")
                text = f"{kind}: a file with the {option}; stored encrypted"
                one.add_argument(f"--{option}", metavar="FILE", help=text)
        pool = actions.add_parser("pool", help="let the engine schedule a pool")
        pool.add_argument("name")
        pool.add_argument("pool")
        pool.add_argument("values", nargs="+", help="partition=… or queue=…, and more")
        unpool = actions.add_parser("unpool", help="take a pool from the engine")
        unpool.add_argument("name")
        unpool.add_argument("pool")
        for action in ("check", "remove"):
            actions.add_parser(action).add_argument("name")
        actions.add_parser("list")

    def handle(self, *args: Any, **options: Any) -> None:
        """Do the action; raises CommandError with the reason."""
        try:
            answer = _act(options)
        except Refusal as refusal:
            raise CommandError(str(refusal)) from None
        except EngineUnavailable as error:
            raise CommandError(f"The engine does not answer: {error}") from None
        self.stdout.write(json.dumps(answer, indent=2))


def _act(options: dict[str, Any]) -> Any:
    action = options["action"]
    if action == "list":
        rows = Engine.objects.order_by("name").prefetch_related("pools")
        return [engines.serialize_engine(one) for one in rows]
    if action == "add":
        added = engines.engine_add(
            by=None,
            name=options["name"],
            kind=options["kind"],
            settings=_pairs(options["values"]),
            credentials=_credentials(options),
        )
        return engines.serialize_engine(added)
    row = Engine.objects.filter(name=options["name"]).first()
    if row is None:
        raise CommandError(f"No engine is named {options['name']}. See: manage.py engine list")
    if action == "set":
        enabled = True if options["enable"] else False if options["disable"] else None
        engines.engine_update(
            engine=row,
            by=None,
            settings=_pairs(options["values"]) or None,
            credentials=_credentials(options) or None,
            enabled=enabled,
        )
    elif action == "pool":
        settings = _pairs(options["values"])
        engines.engine_pool_set(engine=row, by=None, pool=options["pool"], settings=settings)
    elif action == "unpool":
        engines.engine_pool_remove(engine=row, by=None, pool=options["pool"])
    elif action == "remove":
        engines.engine_remove(engine=row, by=None)
        return {"removed": options["name"]}
    elif action == "check":
        engine = contact.connect(row)
        engine.watch()  # as the scheduler does: only then is a problem of slurmrestd known
        contact.answered(row, engine)
        contact.refresh(row, engine, force=True)
    return engines.serialize_engine(row)


def _credentials(options: dict[str, Any]) -> dict[str, Any]:
    """The given credentials, read from their files."""
    given = {"redis_url": options["redis_url"]} if options["redis_url"] else {}
    for name in _FILES:
        if options[name] is None:
            continue
        try:
            given[name] = Path(options[name]).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            option = name.replace("_", "-")
            raise CommandError(f"--{option} {options[name]} cannot be read: {error}") from None
    return given


def _pairs(words: list[str]) -> dict[str, Any]:
    """Settings of `name=value` words; numbers, lists and objects as JSON."""
    settings: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise CommandError(f"{word!r} is not name=value")
        try:
            settings[name] = json.loads(value)
        except ValueError:
            settings[name] = value
    return settings
