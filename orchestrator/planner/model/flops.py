"""Floating-point operations per step: those of the model, and those executed with recomputation.

Does not depend on time or devices, except for the derived utilization.
"""

from __future__ import annotations

import numpy as np

from orchestrator.planner.model.columns.codes import RECOMPUTE
from orchestrator.planner.model.terms import Column, term


@term(
    "FLOP/token",
    "(4, or 2 if causal) x layers x attention_width x seq_len",
    "PaLM, arXiv 2204.02311, appendix B",
)
def attention_forward_flops_per_token(
    causal_flops: Column, layers: Column, attention_width: Column, seq_len: Column
) -> Column:
    """FLOPs of attention scores and values per token, forward."""
    return np.asarray((4 - 2 * causal_flops) * layers * attention_width * seq_len)


@term(
    "FLOP/token",
    "attention_forward_flops_per_token x attention_passes / layers",
    "PaLM, arXiv 2204.02311, appendix B; 3 passes per trained layer",
)
def attention_flops_per_token(
    attention_forward_flops_per_token: Column, attention_passes: Column, layers: Column
) -> Column:
    """FLOPs of attention scores and values per token, both passes."""
    return np.asarray(attention_forward_flops_per_token * (attention_passes / layers))


@term(
    "FLOP/token",
    "second_products_flops + second_attention_flops (half if causal)",
    "the forward pass of a reference or teacher: 2 per parameter, and attention",
)
def second_flops_per_token(
    second_products_flops: Column, second_attention_flops: Column, causal_flops: Column
) -> Column:
    """FLOPs of the second module per token."""
    return np.asarray(second_products_flops + second_attention_flops * (1 - causal_flops / 2))


@term(
    "FLOP/token",
    "6 x (params_active - params_lookup) - spared_flops + adapter_flops + "
    "attention_flops_per_token + second_flops_per_token",
    "PaLM, arXiv 2204.02311, appendix B; active experts only, without the lookups of positions and "
    "of an input embedding that is not the head; a frozen weight counts 4, or 2 below all trained "
    "ones",
)
def model_flops_per_token(
    params_active: Column,
    params_lookup: Column,
    spared_flops: Column,
    adapter_flops: Column,
    attention_flops_per_token: Column,
    second_flops_per_token: Column,
) -> Column:
    """FLOPs of the model per token, both passes."""
    products = 6 * (params_active - params_lookup) - spared_flops + adapter_flops
    return np.asarray(products + attention_flops_per_token + second_flops_per_token)


@term(
    "",
    "trained_share on a CPU without tp, pp and compile, else 1",
    "a CPU computes logits of tokens with loss alone",
)
def head_share(
    trained_share: Column, is_cpu: Column, tp: Column, pp: Column, compiled: Column
) -> Column:
    """Share of a step's tokens whose logits are computed."""
    selects = (is_cpu == 1) & (tp == 1) & (pp == 1) & (compiled == 0)
    return np.asarray(np.where(selects, trained_share, 1.0))


@term("FLOP/token", "head_flops x (1 - head_share)")
def omitted_head_flops_per_token(head_flops: Column, head_share: Column) -> Column:
    """FLOPs of the head per token that positions without logits omit, on average."""
    return np.asarray(head_flops * (1 - head_share))


@term("FLOP", "(model_flops_per_token - omitted_head_flops_per_token) x step_tokens")
def model_flops(
    model_flops_per_token: Column, omitted_head_flops_per_token: Column, step_tokens: Column
) -> Column:
    """FLOPs of the model per step."""
    return np.asarray((model_flops_per_token - omitted_head_flops_per_token) * step_tokens)


@term(
    "FLOP/token",
    "2 x (parameters of the blocks that a token uses) + attention_forward_flops_per_token",
    "full recomputation repeats the forward pass of the blocks, not of the head (arXiv "
    "2104.04473, eq. 3)",
)
def full_recompute_flops_per_token(
    params_active: Column,
    params_positions: Column,
    params_embedding: Column,
    params_head: Column,
    params_final_norm: Column,
    attention_forward_flops_per_token: Column,
) -> Column:
    """FLOPs that full recomputation adds per token."""
    outside = params_positions + params_embedding + params_head + params_final_norm
    return np.asarray(2 * (params_active - outside) + attention_forward_flops_per_token)


@term(
    "FLOP/token",
    "attention_forward_flops_per_token",
    "one more attention forward, as executed",
)
def selective_executed_flops_per_token(attention_forward_flops_per_token: Column) -> Column:
    """FLOPs that recomputing the attention core adds per token."""
    return np.asarray(1.0 * attention_forward_flops_per_token)


@term(
    "FLOP/token",
    "attention_flops_per_token",
    "arXiv 2205.05198, eq. 9: 72BsLh^2(1 + s/3h + V/12Lh), which the published HFU follow",
)
def selective_published_flops_per_token(attention_flops_per_token: Column) -> Column:
    """FLOPs that publications count for selective recomputation per token."""
    return np.asarray(1.0 * attention_flops_per_token)


@term(
    "FLOP",
    "(model_flops_per_token - omitted_head_flops_per_token + what recomputation adds; selective as "
    "Megatron's publications count it, or as executed if products are saved) x step_tokens",
    "arXiv 2205.05198; the attention kernel's own recomputation is not counted",
)
def hardware_flops(
    recompute: Column,
    recomputed_share: Column,
    model_flops_per_token: Column,
    omitted_head_flops_per_token: Column,
    full_recompute_flops_per_token: Column,
    selective_published_flops_per_token: Column,
    selective_executed_flops_per_token: Column,
    selective_products: Column,
    step_tokens: Column,
) -> Column:
    """FLOPs per step with recomputation as publications count it."""
    again = recomputed_share * full_recompute_flops_per_token
    published, executed = selective_published_flops_per_token, selective_executed_flops_per_token
    # with the published count HFU would exceed 100%
    selective = np.where(selective_products == 1, executed, published)
    again = np.where(recompute == RECOMPUTE["selective"], selective, again)
    own = model_flops_per_token - omitted_head_flops_per_token
    return np.asarray((own + again) * step_tokens)


@term(
    "FLOP",
    "(model_flops_per_token - omitted_head_flops_per_token + recomputed FLOPs) x step_tokens",
    "counted as executed",
)
def executed_flops(
    recompute: Column,
    recomputed_share: Column,
    model_flops_per_token: Column,
    omitted_head_flops_per_token: Column,
    full_recompute_flops_per_token: Column,
    selective_executed_flops_per_token: Column,
    step_tokens: Column,
) -> Column:
    """FLOPs per step with recomputation as executed."""
    again = recomputed_share * full_recompute_flops_per_token
    again = np.where(recompute == RECOMPUTE["selective"], selective_executed_flops_per_token, again)
    own = model_flops_per_token - omitted_head_flops_per_token
    return np.asarray((own + again) * step_tokens)


@term(
    "TFLOP/s",
    "model_flops / step_time_s / devices / 10^12",
    "model FLOPs; attention by the convention of the framework",
)
def tflops_per_device(model_flops: Column, step_time_s: Column, devices: Column) -> Column:
    """Model TFLOP/s per device."""
    return np.asarray(model_flops / step_time_s / devices / 1e12)


@term("TFLOP/s", "hardware_flops / step_time_s / devices / 10^12", "recomputation counted")
def hardware_tflops_per_device(
    hardware_flops: Column, step_time_s: Column, devices: Column
) -> Column:
    """TFLOP/s per device with recomputation."""
    return np.asarray(hardware_flops / step_time_s / devices / 1e12)


@term(
    "", "tflops_per_device x 10^12 / peak_flops", "model FLOPs over the dense peak of the datasheet"
)
def mfu(tflops_per_device: Column, peak_flops: Column) -> Column:
    """Model FLOPs utilization."""
    return np.asarray(tflops_per_device * 1e12 / peak_flops)


@term("", "hardware_tflops_per_device x 10^12 / peak_flops", "recomputation counted")
def hfu(hardware_tflops_per_device: Column, peak_flops: Column) -> Column:
    """Hardware FLOPs utilization as publications count it."""
    return np.asarray(hardware_tflops_per_device * 1e12 / peak_flops)


@term("", "mfu x executed_flops / model_flops", "recomputation counted as executed")
def hfu_executed(mfu: Column, executed_flops: Column, model_flops: Column) -> Column:
    """Hardware FLOPs utilization as executed."""
    return np.asarray(mfu * executed_flops / model_flops)
