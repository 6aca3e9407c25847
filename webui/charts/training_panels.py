"""Charts of training metrics and devices."""

from __future__ import annotations

from typing import Final

from django.utils.translation import gettext_noop as _

from webui.charts.panel import Line, Panel, single

MEMORY_PARTS: Final = (
    "params",
    "reference",
    "grads",
    "optimizer",
    "activations",
    "kv_cache",
    "buffers",
    "other",
)
MEMORY_TITLES: Final = {
    "params": _("parameters"),
    "reference": _("reference or teacher"),
    "grads": _("gradients"),
    "optimizer": _("optimizer states"),
    "activations": _("activations"),
    "kv_cache": _("KV cache"),
    "buffers": _("buffers"),
    "other": _("other"),
}

LOSS = Panel(
    "loss",
    _("Loss"),
    "nats/token",
    (Line("loss", _("training"), "loss"), Line("val_loss", _("validation"), "loss-2", "dash")),
    wide=True,
)
THROUGHPUT = single(
    "throughput", _("Throughput"), "tokens/s", "tokens_per_s", _("tokens/s"), "throughput"
)
MFU = Panel(
    "mfu",
    _("Model FLOPs utilization"),
    "fraction",
    (Line("mfu", _("MFU"), "mfu"), Line("hfu", _("HFU"), "hfu", "dot")),
    zero=True,
)
GRAD_NORM = single("grad_norm", _("Gradient norm"), "", "grad_norm", _("before clipping"), "grad")
LEARNING_RATE = single("lr", _("Learning rate"), "", "lr", _("learning rate"), "lr")
STEP_SPLIT = Panel(
    "step_split",
    _("Step time breakdown"),
    "s",
    (
        Line("time/data_s", _("data"), "split-data"),
        Line("time/generation_s", _("generation"), "split-generation"),
        Line("time/forward_s", _("forward"), "split-forward"),
        Line("time/backward_s", _("backward"), "split-backward"),
        Line("comm/exposed_s", _("exposed communication"), "split-exposed"),
        Line("time/optimizer_s", _("optimizer"), "split-optimizer"),
        Line("time/other_s", _("other"), "split-other"),
    ),
    kind="stack",
    zero=True,
    wide=True,
)
SENT = Panel(
    "sent",
    _("Communication volume"),
    "bytes",
    (
        Line("comm/bytes", _("total"), "other-series", "dot"),
        Line("comm/all_reduce_bytes", _("all-reduce"), "loss"),
        Line("comm/all_gather_bytes", _("all-gather"), "throughput"),
        Line("comm/reduce_scatter_bytes", _("reduce-scatter"), "grad"),
        Line("comm/all_to_all_bytes", _("all-to-all"), "loss-2"),
        Line("comm/broadcast_bytes", _("broadcast"), "mfu"),
        Line("comm/send_bytes", _("send"), "time-2"),
    ),
    zero=True,
)
STEP_TIME = Panel(
    "step_time",
    _("Step time"),
    "s",
    (
        Line("step_time_s", _("full step"), "time"),
        Line("data_time_s", _("data loading"), "time-2"),
        Line("comm/exposed_s", _("exposed communication"), "fail"),
    ),
    zero=True,
)
MEMORY = Panel(
    "memory",
    _("Memory by category"),
    "bytes",
    tuple(
        Line(f"memory/{part}_bytes", MEMORY_TITLES[part], f"mem-{part}") for part in MEMORY_PARTS
    ),
    kind="stack",
    zero=True,
)
ALLOCATOR = Panel(
    "allocator",
    _("Allocator"),
    "bytes",
    (
        Line("memory/allocated_bytes", _("allocated"), "mem-params"),
        Line("memory/reserved_bytes", _("reserved"), "mem-grads"),
    ),
    zero=True,
)
OFFLOADED = single(
    "offloaded",
    _("Offloaded memory"),
    "bytes",
    "memory/offloaded_bytes",
    _("offloaded"),
    "mem-offloaded",
)
TFLOPS = single(
    "tflops", _("Model TFLOP/s per device"), "TFLOP/s", "tflops_per_device", _("per device"), "mfu"
)
BUBBLE = single(
    "bubble", _("Pipeline bubble"), "fraction", "pipeline/bubble_fraction", _("bubble"), "time-2"
)
LOSS_SCALE = Panel(
    "loss_scale",
    _("Loss scale"),
    "",
    (
        Line("loss_scale", _("loss scale"), "event"),
        Line("value/loss_scale", _("value model"), "grad", "dot"),
    ),
    log=True,
)
SKIPPED_UPDATES = Panel(
    "skipped_updates",
    _("Skipped updates"),
    "updates",
    (
        Line("skipped_updates", _("skipped by overflow, in total"), "event"),
        Line("value/skipped_updates", _("value model"), "grad", "dot"),
    ),
    zero=True,
)
VIOLATION = single(
    "max_violation",
    _("Expert load imbalance"),
    "",
    "moe/max_violation",
    _("max load / mean load - 1"),
    "event",
)
AUXILIARY = single(
    "aux_loss", _("Auxiliary loss"), "", "moe/aux_loss", _("sum over layers"), "loss-2"
)
PERPLEXITY = single(
    "val_perplexity",
    _("Validation perplexity"),
    "",
    "val_perplexity",
    _("validation"),
    "loss-2",
    zero=False,
)
UTILIZATION = single(
    "utilization",
    _("Device utilization"),
    "fraction",
    "device/utilization",
    _("utilization"),
    "throughput",
)
POWER = single("power", _("Power"), "W", "device/power_w", _("power"), "event")
TEMPERATURE = single(
    "temperature",
    _("Temperature"),
    "°C",
    "device/temperature_c",
    _("temperature"),
    "fail",
    zero=False,
)
MACHINE_CPU = single(
    "machine_cpu", _("CPU of the machine"), "fraction", "system/cpu_utilization", _("used"), "mfu"
)
MACHINE_MEMORY = Panel(
    "machine_memory",
    _("Memory of the machine"),
    "bytes",
    (
        Line("system/memory_bytes", _("all programs"), "mem-other"),
        Line("system/process_memory_bytes", _("this program"), "mem-params"),
    ),
    zero=True,
)
NETWORK = Panel(
    "network",
    _("Network of the machine"),
    "bytes/s",
    (
        Line("system/network_received_bytes_per_s", _("received"), "throughput"),
        Line("system/network_sent_bytes_per_s", _("sent"), "event"),
    ),
    zero=True,
)
PREFERENCE_MARGIN = Panel(
    "preference_margin",
    _("Rewards of answers"),
    "",
    (
        Line("dpo/margin", _("margin"), "loss"),
        Line("val_dpo/margin", _("margin, validation"), "loss-2", "dash"),
        Line("dpo/reward_chosen", _("chosen"), "throughput"),
        Line("dpo/reward_rejected", _("rejected"), "fail"),
    ),
)
PREFERENCE_ACCURACY = Panel(
    "preference_accuracy",
    _("Pairs with a positive margin"),
    "fraction",
    (
        Line("dpo/accuracy", _("training"), "loss"),
        Line("val_dpo/accuracy", _("validation"), "loss-2", "dash"),
    ),
    zero=True,
)
ANSWER_LOGPS = Panel(
    "answer_logps",
    _("Log-probabilities of answers"),
    "nats",
    (
        Line("dpo/logp_chosen", _("chosen"), "throughput"),
        Line("dpo/logp_rejected", _("rejected"), "fail"),
        Line("dpo/kl", _("divergence from the reference"), "loss", "dot"),
    ),
)
ON_POLICY = single(
    "on_policy",
    _("Learns from the student's answers"),
    "",
    "on_policy",
    _("1: its own answers, 0: given ones"),
    "loss-2",
)
TRAINED_TOKENS = single(
    "trained_tokens",
    _("Tokens with loss per step"),
    "tokens",
    "trained_tokens",
    _("trained tokens"),
    "throughput",
)
REWARD_MARGIN = Panel(
    "reward_margin",
    _("Rewards of answers"),
    "",
    (
        Line("reward/margin", _("margin"), "loss"),
        Line("val_reward/margin", _("margin, validation"), "loss-2", "dash"),
        Line("reward/chosen", _("chosen"), "throughput"),
        Line("reward/rejected", _("rejected"), "fail"),
    ),
)
REWARD_ACCURACY = Panel(
    "reward_accuracy",
    _("Pairs ranked as labeled"),
    "fraction",
    (
        Line("reward/accuracy", _("training"), "loss"),
        Line("val_reward/accuracy", _("validation"), "loss-2", "dash"),
    ),
    zero=True,
)
CALIBRATION = Panel(
    "reward_calibration",
    _("Calibration error of rewards"),
    "fraction",
    (
        Line("reward/ece", _("training"), "loss"),
        Line("val_reward/ece", _("validation"), "loss-2", "dash"),
    ),
    zero=True,
)
DIVERGENCE = Panel(
    "divergence",
    _("Divergence"),
    "nats/token",
    (
        Line("kl", _("training"), "loss"),
        Line("val_kl", _("validation"), "loss-2", "dash"),
    ),
    zero=True,
)
