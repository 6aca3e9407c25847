"""Which combinations of techniques the training engine refuses, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator

from workers.contracts.specs.training_rules.exclusion import Exclusion
from workers.contracts.specs.training_rules.techniques import Combination


def exclusions_of(c: Combination, *, scope: str, first: str = "") -> Iterator[Exclusion]:
    """The rows of a scope that refuse a combination, in the table's order.

    `first`: only rows whose first technique begins with it.
    """
    in_use = c.techniques
    for row in EXCLUSIONS:
        selected = row.scope == scope and row.techniques[0].startswith(first)
        if selected and in_use.issuperset(row.techniques):
            yield row


EXCLUSIONS = (
    Exclusion(
        ("offload_all", "replicated_weights"),
        "plan.offload",
        "offload all with zero {plan.zero}",
        "weights are loaded from the host in shards, zero {plan.zero} replicates them on "
        "{ranks} ranks",
        "Use zero 3, or offload optimizer.",
        scope="plan",
    ),
    Exclusion(
        ("offload", "pipedream"),
        "plan.offload",
        "offload {plan.offload} with pipedream",
        "pipedream updates after every micro-batch, and stores several versions of the weights",
        "Use none, or schedule 1f1b.",
        scope="plan",
    ),
    Exclusion(
        ("offload", "narrow_weights"),
        "plan.params_dtype",
        "{plan.params_dtype} weights with offload {plan.offload}",
        "an update on the host keeps fp32 weights there, which params_dtype {plan.params_dtype} "
        "does not have",
        "Use fp32, or offload none.",
        scope="plan",
    ),
    Exclusion(
        ("loss_scale", "not_fp16"),
        "plan.loss_scale",
        "loss scaling of {plan.precision}",
        "loss scaling is for fp16 gradients, precision is {plan.precision}",
        "Omit the field, or use precision fp16.",
        scope="plan",
    ),
    Exclusion(
        ("dp_replicate", "unsharded"),
        "plan.dp_replicate",
        "dp_replicate with zero {plan.zero}",
        "zero {plan.zero} already replicates everything",
        "Use zero 2 or 3, or dp_replicate 1.",
        scope="plan",
    ),
    # PipeDream's stages are at different steps, and its weights change between passes
    *(
        Exclusion(
            ("pipedream", technique),
            f"plan.{field}",
            f"pipedream with {field}",
            f"pipedream can be combined with dp only, {field} is {{plan.{field}}}",
            f"Use {field} 1, or schedule 1f1b.",
        )
        for technique, field in (
            ("tensor_parallel", "tp"),
            ("context_parallel", "cp"),
            ("expert_parallel", "ep"),
        )
    ),
    Exclusion(
        ("pipedream", "policy"),
        "plan.schedule",
        "{train.objective} with pipedream",
        "pipedream updates between micro-batches, answers are sampled by one version of all stages",
        "Use schedule 1f1b.",
    ),
    Exclusion(
        ("pipedream", "fp16"),
        "plan.precision",
        "pipedream in fp16",
        "all stages share one loss scale, which pipedream's updates do not wait for",
        "Use fp32 or bf16, or schedule 1f1b.",
    ),
    Exclusion(
        ("pipedream", "fp8"),
        "plan.precision",
        "pipedream in fp8",
        "fp8 weights are quantized at each use, without their versions",
        "Use fp32 or bf16, or schedule 1f1b.",
    ),
    Exclusion(
        ("pipedream", "bf16", "no_stashing"),
        "plan.weight_stashing",
        "pipedream in bf16 without stashing",
        "without stashing a backward pass uses the newest weights, but in bf16 the cast of older "
        "ones",
        "Use true, or precision fp32.",
    ),
    Exclusion(
        ("pipedream", "recompute", "no_stashing"),
        "plan.recompute",
        "pipedream with recompute {plan.recompute} without stashing",
        "without stashing recompute {plan.recompute} would run a forward pass again with newer "
        "weights",
        "Use none, or weight_stashing true.",
    ),
    Exclusion(
        ("pipedream", "narrow_weights"),
        "plan.params_dtype",
        "pipedream with {plan.params_dtype} weights",
        "pipedream's stages update copies of fp32 weights",
        "Use fp32, or schedule 1f1b.",
    ),
    Exclusion(
        ("pipedream", "experts"),
        "model.moe",
        "pipedream with experts",
        "balancing experts needs the loads of all ranks before the next step",
        "Use a dense model, or schedule 1f1b.",
    ),
    # a compiled block gives no access to what runs inside
    Exclusion(
        ("compile", "split_backward"),
        "train.compile",
        "{plan.schedule} compiled",
        "{plan.schedule} splits a block's backward pass, a compiled block cannot be split",
        "Use compile false, or schedule interleaved_1f1b.",
    ),
    Exclusion(
        ("compile", "pipedream"),
        "train.compile",
        "pipedream compiled",
        "pipedream's backward passes use other weights than a compiled block expects",
        "Use compile false, or schedule 1f1b.",
    ),
    Exclusion(
        ("compile", "block_fp8"),
        "train.compile",
        "block fp8 compiled",
        "products of the block recipe share quantized tensors, which a compiled block does not "
        "support",
        "Use fp8_recipe tensorwise, or compile false.",
    ),
    Exclusion(
        ("compile", "recompute_auto"),
        "train.compile",
        "recompute auto compiled",
        "recompute auto measures a block's operators one by one, a compiled block fuses them",
        "Use compile false, or recompute full or selective.",
    ),
    # other linear layers are used, or weights cannot be quantized as they will be stored
    Exclusion(
        ("quantize_aware", "fp8"),
        "train.quantize_aware",
        "fp8 aware of {train.quantize_aware}",
        "fp8 products quantize weights by their own tiles",
        "Omit the field, or use precision bf16.",
    ),
    Exclusion(
        ("quantize_aware", "compile"),
        "train.quantize_aware",
        "{train.quantize_aware} aware compiled",
        "a compiled block cannot quantize weights again for its backward pass",
        "Use compile false, or omit the field.",
    ),
    Exclusion(
        ("quantize_aware", "pipedream"),
        "train.quantize_aware",
        "{train.quantize_aware} aware pipedream",
        "pipedream computes with versions of weights, which are not quantized",
        "Omit the field, or use schedule 1f1b.",
    ),
    Exclusion(
        ("quantize_aware_int8", "tensor_parallel"),
        "train.quantize_aware",
        "int8 aware with tp",
        "int8 has one scale per output over all inputs, which tp {plan.tp} shards",
        "Use int4, or tp 1.",
    ),
    # a second, frozen module next to the trained one
    Exclusion(
        ("reference", "pipedream"),
        "plan.schedule",
        "{train.objective} with pipedream",
        "pipedream runs several batches at once, the reference one after another",
        "Use schedule 1f1b.",
    ),
    Exclusion(
        ("reference", "fp8"),
        "plan.precision",
        "{train.objective} with fp8",
        "frozen weights are stored in the compute type, which fp8 rounds again at every use",
        "Use precision bf16.",
    ),
    Exclusion(
        ("reference", "quantize_aware"),
        "train.quantize_aware",
        "{train.objective} aware of {train.quantize_aware}",
        "the reference has weights that are not rounded",
        "Omit the field.",
    ),
    # fp8 layers of torchao
    Exclusion(
        ("fp8_recipe", "not_fp8"),
        "plan.fp8_recipe",
        "fp8_recipe of {plan.precision}",
        "fp8_recipe chooses the scales of fp8, precision is {plan.precision}",
        "Use precision fp8, or omit the field.",
        scope="plan",
    ),
    *(
        Exclusion(
            ("torchao_fp8", technique),
            field,
            f"torchao fp8 with {label}",
            f"torchao's fp8 layers (fp8_recipe tensorwise or rowwise) {reason}",
            f"Use fp8_recipe block with compile false, or {other}.",
        )
        for technique, field, label, reason, other in (
            ("tensor_parallel", "plan.tp", "tp", "cannot be sharded by tp {plan.tp}", "tp 1"),
            ("experts", "plan.fp8_recipe", "experts", "do not cover routed experts", "bf16"),
            (
                "split_backward",
                "plan.schedule",
                "{plan.schedule}",
                "compute both gradients of a layer together, which {plan.schedule} splits",
                "schedule 1f1b",
            ),
            (
                "odd_hidden",
                "plan.fp8_recipe",
                "an odd width",
                "need widths that are multiples of 16, hidden is not",
                "precision bf16",
            ),
        )
    ),
    # weights of 16 bits without an fp32 copy
    Exclusion(
        ("narrow_weights", "not_adamw"),
        "train.optimizer.name",
        "{train.optimizer.name} with {plan.params_dtype} weights",
        "this engine version updates {plan.params_dtype} weights by AdamW only, which computes in "
        "fp32 and rounds once",
        "Use adamw, or params_dtype fp32.",
    ),
    Exclusion(
        ("narrow_weights", "frozen"),
        "plan.params_dtype",
        "{plan.params_dtype} weights with frozen ones",
        "frozen weights are already stored in the compute type, and the few trained ones in fp32",
        "Omit the field.",
    ),
    Exclusion(
        ("rounded_weights", "pipeline", "tied_embeddings"),
        "plan.params_dtype",
        "bf16 weights with a tied embedding in a pipeline",
        "both ends of the pipeline hold the tied embedding, and would round it differently",
        "Use fp32, tie_embeddings false, or pp 1.",
    ),
    # frozen weights have no gradient, and adapters compute next to a layer's own product
    Exclusion(
        ("frozen", "pipedream"),
        "plan.schedule",
        "pipedream with frozen weights",
        "pipedream stores versions of all weights, frozen ones included",
        "Use 1f1b.",
    ),
    Exclusion(
        ("frozen", "split_backward"),
        "plan.schedule",
        "{plan.schedule} with frozen weights",
        "{plan.schedule} computes the weights' gradients separately; frozen weights have no "
        "gradients",
        "Use 1f1b or interleaved_1f1b.",
    ),
    Exclusion(
        ("adapter", "compile"),
        "train.compile",
        "adapters compiled",
        "this engine version does not compile adapted layers",
        "Use compile false.",
    ),
    Exclusion(
        ("adapter", "fp8"),
        "plan.precision",
        "adapters in fp8",
        "fp8 products replace the linear layers that the adapter changes",
        "Use bf16.",
    ),
    Exclusion(
        ("adapter", "quantize_aware"),
        "train.quantize_aware",
        "{train.quantize_aware} aware adapters",
        "rounded products replace the linear layers that the adapter changes",
        "Omit the field, or use adapter method qlora.",
    ),
    Exclusion(
        ("adapter_dropout", "tensor_parallel"),
        "train.adapter.dropout",
        "adapter dropout with tp",
        "ranks of tp {plan.tp} would drop different inputs of one adapter",
        "Use dropout 0, or tp 1.",
    ),
    Exclusion(
        ("nf4", "experts"),
        "train.adapter.quantize",
        "nf4 with experts",
        "NF4 stores linear layers, this engine version does not quantize routed experts",
        "Use method lora.",
    ),
    Exclusion(
        ("paged", "offload"),
        "train.optimizer.paged",
        "paged states with offload {plan.offload}",
        "offload {plan.offload} already keeps optimizer states off the device",
        "Use paged false, or offload none.",
    ),
    # virtual tokens are positions before the text on one rank
    *(
        Exclusion(
            ("virtual_embeddings", technique),
            field,
            f"virtual tokens with {label}",
            f"the virtual tokens of {{train.adapter.method}} come before the text, {reason}",
            f"Use {hint}, or adapter method prefix.",
        )
        for technique, field, label, reason, hint in (
            ("context_parallel", "plan.cp", "cp", "which cp {plan.cp} splits", "cp 1"),
            (
                "sequence_parallel",
                "plan.sequence_parallel",
                "sequence parallelism",
                "which sequence parallelism splits",
                "sequence_parallel false",
            ),
            (
                "pipeline",
                "plan.pp",
                "pp",
                "stages exchange the text's positions only",
                "pp 1",
            ),
            (
                "packing",
                "train.adapter.method",
                "packing",
                "later samples of a packed row would not see them",
                "packing false",
            ),
            (
                "pairs",
                "train.adapter.method",
                "pairs",
                "the second answer of a pair, in the same row, would not see them",
                "train.dpo.loss kto",
            ),
        )
    ),
    Exclusion(
        ("prefix", "context_parallel"),
        "plan.cp",
        "prefixes with cp",
        "cp {plan.cp} exchanges keys of the text, not the prefix",
        "Use cp 1.",
    ),
)
