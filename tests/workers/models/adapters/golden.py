"""Writes the golden files of adapters with PEFT and bitsandbytes, once, by hand.

    PYTHONPATH=REFERENCES python -m tests.workers.models.adapters.golden

REFERENCES holds peft 0.21 and bitsandbytes 0.50, which the tests do not need. For each method it
writes a trained-looking adapter as PEFT saves it, and the logits that PEFT computes with it, over a
small Llama whose weights `base` draws. `written` has the opposite direction: files that our writer
makes, and the logits that PEFT computes with them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "golden"
BASE = Path("/tmp/golden-base")
TOKENS = [[3, 17, 29, 5, 60, 2, 44, 11]]
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def base(folder: Path) -> Any:
    """A Llama with drawn weights, saved to `folder`."""
    import transformers

    torch.manual_seed(11)
    rope = {"rope_type": "default", "rope_theta": 1e4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, rope_parameters=rope))
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(len(name))
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.1, generator=generator)
        else:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    model.save_pretrained(folder)
    return model


def methods() -> dict[str, Any]:
    """PEFT's configurations by name."""
    import peft

    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    prompt = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    return {
        "lora": peft.LoraConfig(r=4, lora_alpha=8, target_modules=linear),
        "rslora": peft.LoraConfig(
            r=4,
            lora_alpha=8,
            use_rslora=True,
            target_modules=["q_proj", "down_proj"],
            rank_pattern={"down_proj": 2},
            alpha_pattern={"layers.1.self_attn.q_proj": 3},
            modules_to_save=["lm_head"],
        ),
        "dora": peft.LoraConfig(r=4, use_dora=True, target_modules=linear, lora_alpha=16),
        "embedding": peft.LoraConfig(r=2, target_modules=["embed_tokens"], lora_alpha=4),
        "ia3": peft.IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        "prompt": peft.PromptTuningConfig(**prompt),
        "p_tuning": peft.PromptEncoderConfig(**prompt, encoder_hidden_size=16),
        "prefix": peft.PrefixTuningConfig(**prompt),
    }


def main() -> None:
    """Write every golden file."""
    import peft

    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    logits: dict[str, Any] = {}
    for name, config in methods().items():
        model = peft.get_peft_model(base(BASE), config)
        model.eval()
        for key, parameter in model.named_parameters():
            if parameter.requires_grad and "norm" not in key:
                generator = torch.Generator().manual_seed(len(key))
                drawn = torch.randn(parameter.shape, generator=generator)
                if "lora_A" in key or "lora_B" in key or "embedding" in key or "encoder" in key:
                    parameter.data.copy_(0.2 * drawn)
                elif "ia3" in key or "magnitude" in key:
                    parameter.data.mul_(1 + 0.2 * drawn)
        model.save_pretrained(FOLDER / name)
        (FOLDER / name / "README.md").unlink(missing_ok=True)
        with torch.no_grad():
            out = model(input_ids=torch.tensor(TOKENS)).logits[0, -len(TOKENS[0]) :]
        logits[name] = [[round(x, 6) for x in row[:8]] for row in out.tolist()]
    (FOLDER / "logits.json").write_text(json.dumps(logits) + "\n", encoding="utf-8")
    _written()
    _nf4()


def _written() -> None:
    """Our files of each method, and PEFT's logits with them."""
    from tests.workers.models.adapters import written
    from workers.models.weights.open import open_weights

    base(BASE)
    weights, logits = open_weights(BASE), {}
    for name in written.ADAPTERS:
        folder = FOLDER / "written" / name
        written.write(name, written.adapted_decoder(name, weights), folder, weights)
        logits[name] = peft_logits(folder)
    (FOLDER / "written.json").write_text(json.dumps(logits) + "\n", encoding="utf-8")


def peft_logits(folder: Path) -> list[list[float]]:
    """`[S, 8]`: what PEFT computes with an adapter's files. Needs peft."""
    import peft

    model = peft.PeftModel.from_pretrained(base(BASE), folder).eval()
    with torch.no_grad():
        out = model(input_ids=torch.tensor(TOKENS)).logits[0, -len(TOKENS[0]) :]
    return [[round(x, 6) for x in row[:8]] for row in out.tolist()]


def _nf4() -> None:
    import bitsandbytes.functional as bnb

    torch.manual_seed(5)
    weight = torch.randn(8, 128) * 0.02
    packed, state = bnb.quantize_nf4(weight)
    double, more = bnb.quantize_nf4(weight, compress_statistics=True)
    golden = {
        "codes": packed.flatten().tolist(),
        "absmax": state.absmax.tolist(),
        "dequantized": bnb.dequantize_nf4(packed, state)[0].tolist(),
        "double": {
            "codes": more.absmax.tolist(),
            "scales": more.state2.absmax.tolist(),
            "mean": more.offset.item(),
            "dequantized": bnb.dequantize_nf4(double, more)[0].tolist(),
        },
    }
    (FOLDER / "nf4.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
