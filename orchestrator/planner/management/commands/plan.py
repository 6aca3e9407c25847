"""`manage.py plan`: search, estimate lines, serving, export. Needs neither a database nor Redis."""

from __future__ import annotations

import json
from argparse import SUPPRESS
from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from orchestrator.planner import api
from orchestrator.planner.calibration.result import Calibration
from orchestrator.planner.cli_output import told_search, told_serving, told_trees
from orchestrator.planner.interchange import KINDS
from orchestrator.planner.request_files import Unusable, calibration_of, lines_of
from orchestrator.planner.requests import BadRequest, Choices

# what a request's fields are called on the command line
_FLAGS = {
    "model": "--model",
    "cluster.device": "--device",
    "cluster.nodes": "--nodes",
    "cluster.devices_per_node": "--devices-per-node",
    "workload.seq_len": "--seq-len",
    "workload.tokens": "--tokens",
    "workload.global_batch_size": "--global-batch",
    "framework.name": "--framework",
    "objective": "--objective",
    "top": "--top",
    "engine": "--export",
    "explain": "--explain",
    "explain_depth": "--explain-depth",
    "cluster.host_gib_per_device": "--host-gib-per-device",
}
_SERVING = (
    "prompt_len",
    "output_len",
    "batch",
    "tp",
    "pp",
    "replicas",
    "quantize",
    "kv_dtype",
    "acceptance",
    "draft_tokens",
    "draft_cost",
)
_RANKED = 100  # plans tried for another engine
_SERVING_KINDS: dict[str, type] = {
    "quantize": str,
    "kv_dtype": str,
    "acceptance": float,
    "draft_cost": float,
}


class Command(BaseCommand):
    help = (
        "Predicts memory, time and cost of training a model on a cluster, and ranks every "
        "legal plan."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        many = parser.add_argument_group("many estimates")
        many.add_argument(
            "--requests",
            metavar="FILE.jsonl",
            help="a request a line in, an answer a line out; - reads standard input",
        )
        one = parser.add_argument_group("a search")
        one.add_argument(
            "--model", help="a preset, or the path of a ModelSpec or a Hugging Face config.json"
        )
        one.add_argument("--device", default="h100-80g", help="a name of the device catalogue")
        one.add_argument("--nodes", type=int, default=1)
        one.add_argument("--devices-per-node", type=int, default=8)
        one.add_argument(
            "--host-gib-per-device",
            type=float,
            help="memory of a host over its devices, for offloading",
        )
        one.add_argument("--seq-len", type=int, help="tokens a sequence")
        one.add_argument("--global-batch", type=int, help="sequences a step")
        one.add_argument("--tokens", type=float, help="to be trained in all, for days")
        one.add_argument("--framework", default="orrery")
        fixing = (
            "fields of a plan that are not to be chosen; several values with | between: "
            "tp=8,zero=1|3"
        )
        one.add_argument("--fix", default="", metavar="k=v,…", help=fixing)
        one.add_argument("--objective", default="time", help="time, cost or memory")
        one.add_argument("--top", type=int, help="plans to show; 10, with --explain 3")
        one.add_argument(
            "--calibration", metavar="FILE", help="parameters as `manage.py calibrate` wrote them"
        )
        one.add_argument(
            "--explain",
            nargs="?",
            const=True,
            default=False,
            metavar="NAME,…",
            help="the formula and inputs of each number, or of these alone",
        )
        one.add_argument(
            "--explain-depth",
            type=int,
            metavar="N",
            help="levels of them; else down to the catalogue",
        )
        one.add_argument("--json", action="store_true", help="one JSON document and nothing else")
        one.add_argument(
            "--export", metavar="ENGINE", help=f"print the best plan for {', '.join(KINDS)}"
        )
        serve = parser.add_argument_group("serving")
        serve.add_argument(
            "--inference", action="store_true", help="what serving the model would reach"
        )
        for name in _SERVING:
            kind = _SERVING_KINDS.get(name, int)
            serve.add_argument(f"--{name.replace('_', '-')}", type=kind, default=SUPPRESS)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            calibration = calibration_of(options["calibration"]) if options["calibration"] else None
            if options["requests"]:
                self._lines(options, calibration)
            elif options["model"] is None:
                raise Unusable(
                    "Say what to plan for: --model PRESET|FILE, or --requests FILE.jsonl"
                )
            elif options["inference"]:
                self._serving(options)
            else:
                self._search(options, calibration)
        except BadRequest as error:
            found = [
                f"{_FLAGS.get(each.field, each.field)}: {each.message}"
                + (f"; try {each.hint}" if each.hint else "")
                for each in error.problems
            ]
            raise CommandError("\n".join(found), returncode=2) from None
        except Unusable as error:
            raise CommandError(str(error), returncode=2) from None

    def _lines(self, options: dict[str, Any], calibration: Calibration | None) -> None:
        lines, explain = lines_of(options["requests"]), _trees(options)
        each = 1 if explain else max(1, len(lines))  # trees are large: one line's at a time
        for start in range(0, len(lines), each):
            told = api.estimate(
                lines[start : start + each],
                calibration=calibration,
                explain=explain,
                choices=Choices(files=True),
            )
            self._write("".join(json.dumps(answer) + "\n" for answer in told))

    def _search(self, options: dict[str, Any], calibration: Calibration | None) -> None:
        for name in ("seq_len", "global_batch"):
            if options[name] is None:
                raise Unusable(f"A search needs --{name.replace('_', '-')}")
        scene = _scene(options)
        request = {**scene, "fix": dict(_fixed(options["fix"])), "objective": options["objective"]}
        if options["export"]:
            self._export(scene, request, options["export"], calibration)
            return
        explain = _trees(options)
        top = (3 if explain else 10) if options["top"] is None else options["top"]
        answer = api.search(
            {**request, "top": top},
            calibration=calibration,
            choices=Choices(files=True),
            explain=explain,
            front=options["top"] is None,
        )
        if options["json"]:
            self._write(json.dumps(answer) + "\n")
        else:
            self._write(
                told_search(scene, answer, top=top) + (told_trees(answer) if explain else "")
            )
        if not answer["legal"]:
            raise _nothing(answer)

    def _export(
        self, scene: dict[str, Any], request: Any, engine: str, calibration: Calibration | None
    ) -> None:
        """The best of the ranked plans that the engine can run; its notes go beside it, to standard
        error.
        """
        choices, first = Choices(files=True), None
        answer = api.search(
            {**request, "top": _RANKED}, calibration=calibration, choices=choices, front=True
        )
        for place, best in enumerate(answer["plans"], 1):
            line = {
                **scene,
                "plan": best["plan"],
                **({"cluster": best["cluster"]} if "cluster" in best else {}),
            }
            try:
                made = api.export(line, engine, choices=choices)
            except BadRequest as error:
                first = first or error
                if engine not in KINDS:
                    break
                continue
            self._write(made.text if made.text.endswith("\n") else made.text + "\n")
            if first is not None:
                self.stderr.write(
                    f"This is number {place} of the ranked plans: {engine} cannot run those "
                    f"before it. {first}"
                )
            for note in made.notes:
                self.stderr.write(note)
            return
        raise first or _nothing(answer)

    def _serving(self, options: dict[str, Any]) -> None:
        given = {name: options[name] for name in _SERVING if name in options}
        if options["seq_len"] and "prompt_len" not in given:
            given.setdefault("output_len", max(1, min(256, options["seq_len"] // 4)))
            given["prompt_len"] = max(1, options["seq_len"] - given["output_len"])
        if options["global_batch"]:
            given.setdefault("batch", options["global_batch"])
        request = {
            key: value for key, value in _scene(options).items() if key in ("model", "cluster")
        } | given
        answer = api.serving(request, explain=bool(options["explain"]), choices=Choices(files=True))
        if options["json"]:
            self._write(json.dumps(answer) + "\n")
        else:
            self._write(told_serving(request, answer))

    def _write(self, text: str) -> None:
        self.stdout.write(text, ending="")


def _trees(options: dict[str, Any]) -> api.Trees | None:
    named = options["explain"]
    names = (
        [each.strip() for each in named.split(",") if each.strip()]
        if isinstance(named, str)
        else named
    )
    return api.trees(names, options["explain_depth"])


def _nothing(answer: Any) -> CommandError:
    message = [f"{each['message']}; try {each['hint']}" for each in answer["problems"]] or [
        "No plan fits; leave out --export"
    ]
    return CommandError("\n".join(message), returncode=2)


def _scene(options: dict[str, Any]) -> dict[str, Any]:
    cluster = {
        "device": options["device"],
        "nodes": options["nodes"],
        "devices_per_node": options["devices_per_node"],
    }
    if options["host_gib_per_device"] is not None:
        cluster["host_gib_per_device"] = options["host_gib_per_device"]
    workload = {"seq_len": options["seq_len"], "global_batch_size": options["global_batch"]}
    if options["tokens"] is not None:
        workload["tokens"] = options["tokens"]
    return {
        "model": options["model"],
        "cluster": cluster,
        "workload": workload,
        "framework": options["framework"],
    }


def _fixed(text: str) -> Iterator[tuple[str, Any]]:
    """`tp=8,zero=1|3` as a field and its value, or the list of its values."""
    for part in (each.strip() for each in text.split(",")):
        if not part:
            continue
        name, equals, values = part.partition("=")
        if not equals or not values.strip():
            raise Unusable(f"--fix: {part!r} is not name=value; try --fix tp=8,zero=1")
        found = [_value(each.strip()) for each in values.split("|")]
        yield name.strip(), found[0] if len(found) == 1 else found


def _value(text: str) -> Any:
    words: dict[str, Any] = {"true": True, "false": False, "none": "none", "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return int(text)
    except ValueError:
        return text
