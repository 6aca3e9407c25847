"""`manage.py plan`: search, estimates, serving and export. Does not need a database or Redis."""

from __future__ import annotations

import json
from argparse import SUPPRESS
from collections.abc import Iterator
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from orchestrator.planner import api
from orchestrator.planner.cli_output import (
    format_search,
    format_serving,
    format_serving_simulation,
    format_trees,
)
from orchestrator.planner.explain import ExplainOptions, parse_explain_options
from orchestrator.planner.interchange import KINDS
from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.plan_request import BadRequest, ParseOptions
from orchestrator.planner.request_files import UnusableInput, read_calibration, read_json_lines

# command-line options of request fields
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
_RANKED = 100  # ranked plans tried for an export
_SERVING_TYPES: dict[str, type] = {
    "quantize": str,
    "kv_dtype": str,
    "acceptance": float,
    "draft_cost": float,
}
_PARSE_OPTIONS = ParseOptions(files=True)


class Command(BaseCommand):
    """The planner on the command line."""

    help = (
        "Predicts memory, time and cost of training a model on a cluster, and ranks every "
        "legal plan."
    )
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: CommandParser) -> None:
        """Declares the options of estimates, search, export and serving."""
        many = parser.add_argument_group("many estimates")
        many.add_argument(
            "--requests",
            metavar="FILE.jsonl",
            help="one request per input line, one answer per output line; - reads standard input",
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
            help="host memory per device, for offloading",
        )
        one.add_argument("--seq-len", type=int, help="tokens per sequence")
        one.add_argument("--global-batch", type=int, help="sequences per step")
        one.add_argument(
            "--tokens", type=float, help="tokens to train in total, for the duration in days"
        )
        one.add_argument("--framework", default="orrery")
        fixing = "plan fields with fixed values; | separates several values: tp=8,zero=1|3"
        one.add_argument("--fix", default="", metavar="k=v,…", help=fixing)
        one.add_argument("--objective", default="time", help="time, cost or memory")
        one.add_argument("--top", type=int, help="plans to show; 10, with --explain 3")
        one.add_argument(
            "--calibration", metavar="FILE", help="a file written by `manage.py calibrate`"
        )
        one.add_argument(
            "--explain",
            nargs="?",
            const=True,
            default=False,
            metavar="NAME,…",
            help="the formula and inputs of each number, or of the named numbers",
        )
        one.add_argument(
            "--explain-depth",
            type=int,
            metavar="N",
            help="levels of the trees; default: down to the catalogue",
        )
        one.add_argument("--json", action="store_true", help="print exactly one JSON document")
        one.add_argument(
            "--export", metavar="ENGINE", help=f"print the best plan for {', '.join(KINDS)}"
        )
        serve = parser.add_argument_group("serving")
        serve.add_argument(
            "--inference", action="store_true", help="predict serving instead of training"
        )
        for name in _SERVING:
            kind = _SERVING_TYPES.get(name, int)
            serve.add_argument(f"--{name.replace('_', '-')}", type=kind, default=SUPPRESS)
        load = parser.add_argument_group("serving under load, simulated with --inference")
        load.add_argument("--rate", type=float, help="requests per second, arriving at random")
        load.add_argument("--clients", type=int, help="clients that each wait for their answer")
        load.add_argument(
            "--length-cv",
            type=float,
            default=0.0,
            help="standard deviation of prompt and output lengths over their means; default 0",
        )
        load.add_argument("--max-seqs", type=int, default=256, help="sequences of an engine")
        load.add_argument("--ttft-limit", type=float, help="seconds that 99%% of requests meet")
        load.add_argument("--tpot-limit", type=float, help="seconds that 99%% of requests meet")

    def handle(self, *args: Any, **options: Any) -> None:
        """Runs the requested mode; exit code 2 for bad requests and unusable input."""
        try:
            path = options["calibration"]
            calibration = read_calibration(path) if path else None
            if options["requests"]:
                self._estimate(options, calibration)
            elif options["model"] is None:
                raise UnusableInput("Give --model PRESET|FILE or --requests FILE.jsonl")
            elif options["inference"]:
                self._serving(options)
            else:
                self._search(options, calibration)
        except BadRequest as error:
            messages = [
                f"{_FLAGS.get(item.field, item.field)}: {item.message}"
                + (f". {item.hint}" if item.hint else "")
                for item in error.problems
            ]
            raise CommandError("\n".join(messages), returncode=2) from None
        except UnusableInput as error:
            raise CommandError(str(error), returncode=2) from None

    def _estimate(self, options: dict[str, Any], calibration: Calibration | None) -> None:
        lines, explain = read_json_lines(options["requests"]), _explain_options(options)
        size = 1 if explain else max(1, len(lines))  # trees are large: one line at a time
        for start in range(0, len(lines), size):
            answers = api.estimate(
                lines[start : start + size],
                calibration=calibration,
                explain=explain,
                options=_PARSE_OPTIONS,
            )
            self._write("".join(json.dumps(answer) + "\n" for answer in answers))

    def _search(self, options: dict[str, Any], calibration: Calibration | None) -> None:
        for name in ("seq_len", "global_batch"):
            if options[name] is None:
                raise UnusableInput(f"A search needs --{name.replace('_', '-')}")
        scenario = _scenario(options)
        request = {
            **scenario,
            "fix": dict(_parse_fix(options["fix"])),
            "objective": options["objective"],
        }
        if options["export"]:
            self._export(scenario, request, options["export"], calibration)
            return
        explain = _explain_options(options)
        top = (3 if explain else 10) if options["top"] is None else options["top"]
        answer = api.search(
            {**request, "top": top},
            calibration=calibration,
            options=_PARSE_OPTIONS,
            explain=explain,
            front=options["top"] is None,
        )
        if options["json"]:
            self._write(json.dumps(answer) + "\n")
        else:
            self._write(
                format_search(scenario, answer, top=top) + (format_trees(answer) if explain else "")
            )
        if not answer["legal"]:
            raise _no_plan_error(answer)

    def _export(
        self, scenario: dict[str, Any], request: Any, engine: str, calibration: Calibration | None
    ) -> None:
        """Prints the best ranked plan that the engine can run, and its notes to standard error."""
        first = None
        answer = api.search(
            {**request, "top": _RANKED}, calibration=calibration, options=_PARSE_OPTIONS, front=True
        )
        for rank, best in enumerate(answer["plans"], 1):
            line = {
                **scenario,
                "plan": best["plan"],
                **({"cluster": best["cluster"]} if "cluster" in best else {}),
            }
            try:
                exported = api.export(line, engine, options=_PARSE_OPTIONS)
            except BadRequest as error:
                first = first or error
                if engine not in KINDS:
                    break
                continue
            self._write(exported.text if exported.text.endswith("\n") else exported.text + "\n")
            if first is not None:
                self.stderr.write(
                    f"This is number {rank} of the ranked plans: {engine} cannot run the better "
                    f"ones. {first}"
                )
            for note in exported.notes:
                self.stderr.write(note)
            return
        raise first or _no_plan_error(answer)

    def _serving(self, options: dict[str, Any]) -> None:
        values = {name: options[name] for name in _SERVING if name in options}
        if options["seq_len"] and "prompt_len" not in values:
            values.setdefault("output_len", max(1, min(256, options["seq_len"] // 4)))
            values["prompt_len"] = max(1, options["seq_len"] - values["output_len"])
        if options["global_batch"]:
            values.setdefault("batch", options["global_batch"])
        request = {
            key: value for key, value in _scenario(options).items() if key in ("model", "cluster")
        } | values
        if options["rate"] is not None or options["clients"] is not None:
            self._simulate_serving(request, options)
            return
        answer = api.serving(request, explain=bool(options["explain"]), options=_PARSE_OPTIONS)
        if options["json"]:
            self._write(json.dumps(answer) + "\n")
        else:
            self._write(format_serving(request, answer))

    def _simulate_serving(self, request: dict[str, Any], options: dict[str, Any]) -> None:
        cv = options["length_cv"]
        load = {
            "rate": options["rate"],
            "clients": options["clients"],
            "prompt": {"mean": request.get("prompt_len", 1024), "cv": cv},
            "output": {"mean": request.get("output_len", 256), "cv": cv},
        }
        limits = {"ttft_s": options["ttft_limit"], "tpot_s": options["tpot_limit"]}
        if any(limit is not None for limit in limits.values()):
            request["limits"] = limits
        request |= {"load": load, "max_seqs": options["max_seqs"]}
        answer = api.simulate_serving(request, options=_PARSE_OPTIONS)
        if options["json"]:
            self._write(json.dumps(answer) + "\n")
        else:
            self._write(format_serving_simulation(request, answer))

    def _write(self, text: str) -> None:
        self.stdout.write(text, ending="")


def _explain_options(options: dict[str, Any]) -> ExplainOptions | None:
    explain = options["explain"]
    if isinstance(explain, str):
        explain = [name.strip() for name in explain.split(",") if name.strip()]
    return parse_explain_options(explain, options["explain_depth"])


def _no_plan_error(answer: Any) -> CommandError:
    messages = [f"{item['message']}. {item['hint']}" for item in answer["problems"]]
    return CommandError("\n".join(messages or ["No plan fits; omit --export"]), returncode=2)


def _scenario(options: dict[str, Any]) -> dict[str, Any]:
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


def _parse_fix(text: str) -> Iterator[tuple[str, Any]]:
    """`tp=8,zero=1|3` as pairs of a field and its value or list of values."""
    for part in (item.strip() for item in text.split(",")):
        if not part:
            continue
        name, equals, values = part.partition("=")
        if not equals or not values.strip():
            raise UnusableInput(f"--fix: {part!r} is not name=value. Use --fix tp=8,zero=1.")
        parsed = [_parse_value(item.strip()) for item in values.split("|")]
        yield name.strip(), parsed[0] if len(parsed) == 1 else parsed


def _parse_value(text: str) -> Any:
    constants: dict[str, Any] = {"true": True, "false": False, "none": "none", "null": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return int(text)
    except ValueError:
        return text
