"""Every family that can be read and written, compared with transformers' own model."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import warnings
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from workers.contracts.catalog.presets import PRESETS
from workers.contracts.specs.model import ModelSpec
from workers.models.convert import convert, main
from workers.models.decoder import Decoder
from workers.models.errors import WeightsError
from workers.models.hf.saving import save_hugging_face
from workers.models.hf.weights_config import read_shape
from workers.models.hf.writing import write_config
from workers.models.weights.manifest import write_manifest
from workers.models.weights.open import open_weights
from workers.models.weights.reader import fill_model

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_inner": 48, "vocab_size": 61, "n_positions": 64}
DEEPSEEK = {
    **SIZES,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.7}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "rope_theta": 5e5,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, "rms_norm_eps": 1e-5}),
    "llama3": (
        "Llama",
        {**SIZES, "rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "llama-biased-mqa": (
        "Llama",
        {**SIZES, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    "llama-linear": (
        "Llama",
        {**SIZES, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama-dynamic": (
        "Llama",
        {
            **SIZES,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        },
    ),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 7}),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": (
        "Qwen3",
        {**SIZES, "head_dim": 16, "rope_parameters": YARN, "tie_word_embeddings": True},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **SIZES,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
        },
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt2-gelu-untied": (
        "GPT2",
        {**GPT2, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "deepseek-v2": ("DeepseekV2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": {**YARN, **MSCALE}},
    ),
    "deepseek-v3": ("DeepseekV3", {**DEEPSEEK, "rope_parameters": {**YARN, **MSCALE}}),
    "deepseek-v3-halves": (
        "DeepseekV3",
        {**DEEPSEEK, "rope_interleave": False, "norm_topk_prob": False},
    ),
}
TOKENS = torch.arange(46).reshape(2, 23) * 7 % 61


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """`saved(case)`: a folder that transformers wrote, and the logits of its model."""
    made: dict[str, tuple[Path, torch.Tensor]] = {}

    def save(case: str) -> tuple[Path, torch.Tensor]:
        if case not in made:
            model = their_model(*CASES[case])
            folder = tmp_path_factory.mktemp(case)
            model.save_pretrained(folder)
            made[case] = folder, logits_of(model)
        return made[case]

    return save


@pytest.mark.parametrize("case", CASES)
def test_read_and_written_again(case, saved, tmp_path):
    folder, wanted = saved(case)
    ours = decoder_of(folder)
    torch.testing.assert_close(logits_of(ours), wanted, atol=1e-4, rtol=0)

    assert main([str(folder), str(tmp_path / "ours"), "--to", "orrery"]) == 0
    assert main([str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    assert weights_in(tmp_path / "theirs") == weights_in(folder)
    again = transformers().AutoModelForCausalLM.from_pretrained(
        tmp_path / "theirs", dtype=torch.float32
    )
    torch.testing.assert_close(logits_of(again.eval()), wanted, atol=1e-6, rtol=0)


def test_many_files_and_an_index(saved, tmp_path):
    folder, wanted = saved("mixtral")
    save_hugging_face(open_weights(folder), tmp_path, max_file_bytes=20_000)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    torch.testing.assert_close(logits_of(decoder_of(tmp_path)), wanted, atol=1e-4, rtol=0)
    again = transformers().AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits_of(again), wanted, atol=1e-6, rtol=0)


def test_fp8_in_blocks_of_128_is_unscaled(tmp_path):
    model = their_model("Llama", {**SIZES, "hidden_size": 160, "intermediate_size": 200})
    model.save_pretrained(tmp_path)
    file, config = (
        tmp_path / "model.safetensors",
        json.loads((tmp_path / "config.json").read_text()),
    )
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    scale = torch.tensor([[0.01, 0.02], [0.03, 0.04]])
    stored = (torch.randn(200, 160) * 4).to(torch.float8_e4m3fn)
    save_file({**tensors, name: stored, f"{name}_scale_inv": scale}, file)
    reported = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": reported}))
    read = open_weights(tmp_path).read("blocks.1.mlp.up.weight").float()
    assert read[130, 5] == (stored[130, 5].float() * 0.03).bfloat16()
    assert read[5, 130] == (stored[5, 130].float() * 0.02).bfloat16()
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "awq"}})
    )
    with pytest.raises(WeightsError, match="awq weights have None bits; only 4"):
        open_weights(tmp_path)


@pytest.mark.parametrize("case", ["gpt2", "llama", "deepseek-v3", "qwen3"])
def test_what_published_files_hold_besides_is_left_aside(case, saved, tmp_path):
    """GPT-2's masks and shorter names, old rotary tables, layers of multi-token prediction, a tied
    head's copy.
    """
    folder, wanted = saved(case)
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    more = {
        "gpt2": ["h.0.attn.bias", "h.1.attn.masked_bias"],
        "llama": ["model.layers.0.self_attn.rotary_emb.inv_freq"],
        "deepseek-v3": ["model.layers.3.eh_proj.weight", "model.layers.3.mlp.gate.weight"],
        "qwen3": ["lm_head.weight"],
    }[case]
    save_file(
        {**tensors, **{name: torch.zeros(2) for name in more}}, tmp_path / "model.safetensors"
    )
    torch.testing.assert_close(logits_of(decoder_of(tmp_path)), wanted, atol=1e-4, rtol=0)


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of a whole folder, to be harmed."""
    return Path(shutil.copytree(saved("llama")[0], tmp_path / "llama"))


def harm_weights(change):
    def harm(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return harm


def harm_config(**changes):
    def harm(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return harm


def cut(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def index_outside(folder):
    index = {"weight_map": {"lm_head.weight": "../../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_of_absent(folder):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "a.safetensors"}})
    )


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (cut, "not a complete safetensors file"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64),
            "not a complete safetensors file",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "not a complete safetensors file"),
        (pickled, "pytorch_model.bin is a pickle file"),
        (lambda f: (f / "model.safetensors").unlink(), "contains no model.safetensors"),
        (lambda f: (f / "config.json").unlink(), "contains neither a config.json"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "config.json").write_text("[1]"), "not an object"),
        (
            harm_config(model_type="bert"),
            "Use one of deepseek_v2, deepseek_v3, gpt2, llama",
        ),
        (harm_config(hidden_size=64), "has shape"),
        (harm_config(num_hidden_layers=3), "tensors are missing, the first is model.layers.2"),
        (
            harm_config(num_hidden_layers=1),
            "belong to no llama of this configuration, the first is model.layers.1",
        ),
        (harm_config(hidden_size="32"), "hidden_size is '32'"),
        (harm_config(rope_parameters={"rope_type": "longrope", "factor": 2.0}), "longrope"),
        (
            harm_config(rope_parameters={"partial_rotary_factor": 0.5}),
            "partial_rotary_factor is 0.5",
        ),
        (harm_weights(lambda t: t.pop("model.norm.weight")), "the first is model.norm.weight"),
        (
            harm_weights(lambda t: t.update({"model.extra": torch.zeros(1)})),
            "the first is model.extra",
        ),
        (index_outside, "no weight_map of file names in this folder"),
        (index_of_absent, "a.safetensors is missing, and the index lists it"),
    ],
)
def test_incomplete_weights_are_reported_and_leave_no_files(
    harm, message, folder, tmp_path, capsys
):
    harm(folder)
    assert main([str(folder), str(tmp_path / "out")]) == 64
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"], (
        "nothing half-written stays"
    )


@pytest.mark.parametrize("name", ["weights.bin", "model.pt", "step.ckpt"])
def test_pickles_are_refused_by_name(name, tmp_path):
    torch.save({"a": 1}, tmp_path / name)
    with pytest.raises(WeightsError, match="convert it to safetensors"):
        open_weights(tmp_path / name)


def test_a_checkpoint_whose_table_runs_code_is_refused(saved, tmp_path):
    """Its checksum is right, as an attacker would ensure."""
    convert(saved("llama")[0], tmp_path / "ours")
    shutil.copytree(tmp_path / "ours", tmp_path / "evil")
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(Evil(str(tmp_path / "ran"))))
    manifest = json.loads((tmp_path / "evil" / "manifest.json").read_text())
    (tmp_path / "evil" / "manifest.json").unlink()
    write_manifest(
        tmp_path / "evil", {key: manifest[key] for key in ("step", "tokens", "samples", "model")}
    )
    with pytest.raises(WeightsError, match="no table of contents does"):
        open_weights(tmp_path / "evil")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "ours" / ".metadata").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"\.metadata has 0 bytes"):
        open_weights(tmp_path / "ours")


def test_a_table_that_an_older_python_wrote(saved, tmp_path):
    """Before 3.11.4 a member of an enumeration was pickled as what `getattr` gives; nothing else
    may come that way.
    """
    convert(saved("llama")[0], tmp_path / "ours")
    _rewrite_table(
        tmp_path / "ours", tmp_path / "older", lambda member: (getattr, (type(member), member.name))
    )
    assert open_weights(tmp_path / "older").read("norm.weight").shape == (32,)
    _rewrite_table(
        tmp_path / "ours", tmp_path / "evil", lambda member: (getattr, (torch.Size, "count"))
    )
    with pytest.raises(WeightsError, match="not a member of an enumeration"):
        open_weights(tmp_path / "evil")


def _rewrite_table(ours: Path, folder: Path, reduced: Callable[[Enum], tuple[Any, ...]]) -> None:
    class Older(pickle.Pickler):
        def reducer_override(self, thing: Any) -> Any:
            return reduced(thing) if isinstance(thing, Enum) else NotImplemented

    shutil.copytree(ours, folder)
    table = pickle.loads((ours / ".metadata").read_bytes())
    with (folder / ".metadata").open("wb") as file:
        Older(file).dump(table)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").unlink()
    write_manifest(folder, {key: manifest[key] for key in ("step", "tokens", "samples", "model")})


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_an_existing_folder_is_never_overwritten(saved, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    assert main([str(saved("llama")[0]), str(tmp_path / "out")]) == 64
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "out" / "mine").read_text() == "precious"


@pytest.mark.parametrize("form", ["hf", "orrery"])
def test_a_full_disk_is_reported_and_leaves_no_files(form, saved, tmp_path, capsys):
    folder = saved("llama")[0]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # writing beyond fails as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        assert main([str(folder), str(tmp_path / "out"), "--to", form]) == 64
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "cannot be written to" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gpt2-124m", "gpt2"),
        ("llama3-8b", "llama"),
        ("mixtral-8x7b", "mixtral"),
        ("qwen3-0.6b", "qwen3"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("deepseek-v2", "deepseek_v2"),
        ("deepseek-v3", "deepseek_v3"),
    ],
)
def test_a_preset_survives_its_configuration(name, family):
    spec = PRESETS[name]
    config = write_config(spec, dtype="bfloat16")
    again = read_shape(config, label="config", name="")
    assert again == (family, spec)
    room = transformers()
    newer = room.AutoConfig.for_model(
        **{key: config[key] for key in config if key != "architectures"}
    )
    assert (
        read_shape(json.loads(newer.to_json_string(use_diff=False)), label="config", name="")[1].moe
        == spec.moe
    )


@pytest.mark.parametrize(
    "more",
    [
        {"logit_softcap": 30.0},
        {"position": "none"},
        {"rope": {"interleaved": True}},
        {"attention": "mfa", "mfa": {"qk_rank": 8, "head_dim": 8, "heads": 4}},
        {"norm": "layernorm"},
        {"moe": {"experts": 4, "top_k": 2, "expert_ffn": 8, "shared_experts": 1}},
    ],
    ids=str,
)
def test_what_no_family_computes_is_not_written(more):
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 61, "max_seq_len": 64}
    with pytest.raises(WeightsError, match="no Hugging Face family that can be written has"):
        write_config(ModelSpec.from_dict({**sizes, **more}), dtype="float32")


def transformers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


def their_model(family: str, config: dict[str, Any]) -> Any:
    """A small model of theirs with random weights, including norms and all biases."""
    room = transformers()
    model = getattr(room, {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM"))
    built = model(
        getattr(room, f"{family}Config")(**{"bos_token_id": None, "eos_token_id": None, **config})
    ).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in [*built.named_parameters(), *built.named_buffers()]:
            if "inv_freq" not in name:
                norm = name.endswith("weight") and parameter.ndim == 1
                parameter.normal_(1.0 if norm else 0.0, 0.2, generator=generator)
    return built


def decoder_of(folder: Path) -> Decoder:
    weights = open_weights(folder)
    decoder = Decoder(weights.spec)
    fill_model(decoder, weights)
    return decoder.eval()


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    out = model(TOKENS)
    return getattr(out, "logits", out)


def weights_in(folder: Path) -> dict[str, list[int]]:
    return {
        name: tensor.double().sum().item()
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
