"""Metrics of evaluations: title, unit, whether less or more is better, and meaning."""

from __future__ import annotations

from typing import Final

from django.utils.translation import gettext_noop

# metric → (title, unit, lower or higher is better, meaning)
METRICS: Final = {
    "loss": (
        gettext_noop("Loss"),
        "nats/token",
        gettext_noop("lower"),
        gettext_noop("mean negative log-likelihood per token, given its window"),
    ),
    "perplexity": (
        gettext_noop("Perplexity"),
        "",
        gettext_noop("lower"),
        gettext_noop("exp(loss): the effective number of equally likely next tokens"),
    ),
    "bits_per_byte": (
        gettext_noop("Bits per byte"),
        "bits",
        gettext_noop("lower"),
        gettext_noop("loss per byte of text: comparable between tokenizers"),
    ),
    "accuracy": (
        gettext_noop("Accuracy"),
        "share",
        gettext_noop("higher"),
        gettext_noop("questions whose correct choice has the highest likelihood"),
    ),
    "accuracy_norm": (
        gettext_noop("Normalized accuracy"),
        "share",
        gettext_noop("higher"),
        gettext_noop("accuracy with likelihoods divided by each choice's length"),
    ),
    "bleu": (
        "BLEU",
        gettext_noop("of 100"),
        gettext_noop("higher"),
        gettext_noop("n-grams of one to four words shared with the references, over all answers"),
    ),
    "chrf": (
        "chrF",
        gettext_noop("of 100"),
        gettext_noop("higher"),
        gettext_noop("character n-grams shared with the references, over all answers"),
    ),
    "rouge1": (
        "ROUGE-1",
        "share",
        gettext_noop("higher"),
        gettext_noop("words shared with the nearest reference, mean F1 over answers"),
    ),
    "rouge2": (
        "ROUGE-2",
        "share",
        gettext_noop("higher"),
        gettext_noop("word pairs shared with the nearest reference"),
    ),
    "rougeL": (
        "ROUGE-L",
        "share",
        gettext_noop("higher"),
        gettext_noop("longest common word sequence with the nearest reference"),
    ),
    "exact_match": (
        gettext_noop("Exact match"),
        "share",
        gettext_noop("higher"),
        gettext_noop("answers identical to one of their references"),
    ),
}
