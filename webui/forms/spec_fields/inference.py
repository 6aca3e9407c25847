"""Fields of serving, generation and evaluation."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import F, Section, SpecField
from workers.contracts.specs.inference_support import EVALUATION_METRICS, QUANTIZED


def quantization() -> tuple[tuple[str, str], ...]:
    """Return the choices of quantized weights with their labels."""
    return (("", _("not quantized")), *((name, name) for name in QUANTIZED))


def speculation(kind: str) -> tuple[SpecField, ...]:
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
        F(
            f"{kind}.decode_graphs",
            _("CUDA graphs"),
            "choice",
            _("Decode steps on one GPU are captured and replayed."),
            choices=(("", _("on")), ("false", _("off"))),
        ),
    )


SERVE = Section(
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
    more_title=_("Queue, cache and speculative decoding options"),
    more=(
        F("serve.quantize", _("Weights"), "choice", choices=quantization(), default=""),
        F(
            "serve.kv_blocks",
            _("Cache blocks"),
            "int",
            _("Blocks of 16 tokens."),
            default=_("as memory allows"),
        ),
        F(
            "serve.max_waiting",
            _("Max waiting requests"),
            "int",
            _("Further requests are refused with status 429."),
            default="256",
        ),
        F(
            "serve.adapters",
            _("LoRA adapters"),
            "pairs",
            _("NAME=PATH per line, such as mine=runs/12/checkpoints; each is a model id."),
            default=_("none"),
            wide=True,
        ),
        F(
            "serve.adapter_slots",
            _("Adapters in memory"),
            "int",
            _("Others wait on disk. More can be loaded while the server runs."),
            default=_("8 if there are adapters"),
        ),
        F(
            "serve.adapter_rank",
            _("Largest adapter rank"),
            "int",
            default="16",
        ),
        *speculation("serve"),
        F(
            "serve.backend",
            _("Engine"),
            "choice",
            _("vLLM must be installed on the node; it manages its own cache."),
            choices=(("orrery", _("Orrery")), ("vllm", _("vLLM at the same address"))),
            default="orrery",
        ),
    ),
)

GENERATE = Section(
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
            _("A name in the run's folder, or a path in a data root."),
            double=True,
        ),
        F("generate.max_new_tokens", _("Max output tokens"), "int", default="64"),
        F(
            "generate.temperature",
            _("Temperature"),
            "float",
            _("Set 0 for greedy decoding."),
            default="1",
        ),
    ),
    kinds=("generate",),
    more_title=_("Sampling and speculative decoding options"),
    more=(
        F("generate.quantize", _("Weights"), "choice", choices=quantization(), default=""),
        F("generate.top_k", _("Top k"), "int", _("Set 0 for all."), default="0"),
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
        *speculation("generate"),
    ),
)

EVALUATE = Section(
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
            _("A JSON Lines file, if the input has no references."),
            double=True,
        ),
        F(
            "evaluate.baseline",
            _("Compare with"),
            "model",
            _("Weights before training: both models get the same examples."),
            default=_("no other model"),
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
    more_title=_("Window, judge and answer options"),
    more=(
        F("evaluate.quantize", _("Weights"), "choice", choices=quantization(), default=""),
        F(
            "evaluate.window",
            _("Window"),
            "int",
            _("Tokens."),
            default=_("the context, at most 1024"),
        ),
        F("evaluate.stride", _("Stride"), "int", _("Tokens."), default=_("half a window")),
        F(
            "evaluate.judge_by",
            _("Judged by"),
            "choice",
            _("A chat model picks the better answer; a reward model scores each one."),
            choices=(
                ("choice", _("a chat model that chooses")),
                ("reward", _("a reward model that scores")),
            ),
            default="choice",
        ),
        F(
            "evaluate.judge.run",
            _("Judge: run"),
            "int",
            _("ID of a serve run that you can see. This run waits until that server is ready."),
            default=_("none"),
        ),
        F(
            "evaluate.judge.url",
            _("Judge: URL"),
            "text",
            _("Instead of a run: an OpenAI-compatible address up to /v1."),
            default=_("none"),
            double=True,
        ),
        F("evaluate.judge.model", _("Model of the judge"), "text", _("Its model id.")),
        F(
            "evaluate.judge.key_env",
            _("Key variable of the judge"),
            "text",
            _("The node's environment variable with the API key."),
        ),
        F("evaluate.max_tokens", _("Max input tokens"), "int", "", default=_("all")),
        F("evaluate.max_new_tokens", _("Max output tokens"), "int", "", default="64"),
    ),
)
