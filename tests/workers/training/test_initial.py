"""Training that begins from existing weights, alone and sharded, and what comes out of it goes back
to transformers.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tests.workers.models.test_hugging_face import decoder_of, logits_of, transformers
from tests.workers.training.conftest import TINY, make_spec
from workers.models.convert import main
from workers.runtime.exit_codes import UserError
from workers.training.setup.spec_loading import accept

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
MODELS = {
    "Llama": {"ffn": 48},
    "Mixtral": {
        "ffn": 48,
        "moe": {"experts": 4, "top_k": 2, "expert_ffn": 48},
        "rope": {"theta": 1e4},
    },
}
BATCH = {"micro_batch_size": 2, "global_batch_size": 4}


def spec(family, source, plan=None, **train):
    shape = {
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 256,
        "max_seq_len": 64,
        **MODELS[family],
    }
    return make_spec(
        shape,
        {**BATCH, **(plan or {})},
        **{"steps": 3, "init_from": {"path": str(source)}, **train},
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for family in MODELS:
        room, more = transformers(), {"num_local_experts": 4} if family == "Mixtral" else {}
        torch.manual_seed(4)
        made[family] = tmp_path_factory.mktemp(family)
        config = getattr(room, f"{family}Config")(
            **SIZES, **more, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        )
        getattr(room, f"{family}ForCausalLM")(config).save_pretrained(made[family])
    return made


@pytest.mark.parametrize("family", MODELS)
def test_import_train_export_reload(family, folders, train, tmp_path):
    source = folders[family]
    alone = train(spec(family, source), tmp_path / "alone")
    for plan in (
        {"dp": 2, "zero": 0},
        {"dp": 2, "zero": 1},
        {"dp": 2, "zero": 3, "micro_batch_size": 1},
    ):
        last = tmp_path / f"zero{plan['zero']}"
        result = train(spec(family, source, plan, checkpoint={"every_steps": 3}), last)
        assert [outcome["class"] for outcome in result.outcomes] == ["ok", "ok"], result.outcomes
        assert result.values("loss") == pytest.approx(alone.values("loss"), rel=1e-5)
    reported = next(event["data"] for event in result.events() if event["type"] == "weights_loaded")
    assert reported["path"] == str(source)

    assert main([str(last), str(tmp_path / "exported")]) == 0
    again = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()
    ours = decoder_of(last / "checkpoints" / "step-00000003")
    torch.testing.assert_close(logits_of(again), logits_of(ours), atol=1e-5, rtol=0)
    assert not torch.allclose(logits_of(ours), logits_of(decoder_of(source)), atol=1e-3), (
        "three steps change weights"
    )
    onward = train(spec(family, tmp_path / "exported"), tmp_path / "onward")
    from_checkpoint = train(spec(family, last, {"dp": 2, "zero": 3}), tmp_path / "from checkpoint")
    assert onward.values("loss") == pytest.approx(from_checkpoint.values("loss"), rel=1e-5)
    assert onward.values("loss")[0] < alone.values("loss")[0]


def test_a_restart_goes_on_from_its_checkpoint_not_from_the_beginning(folders, train, tmp_path):
    train(spec("Llama", folders["Llama"], checkpoint={"every_steps": 3}), tmp_path)
    more = train(spec("Llama", folders["Llama"], steps=4), tmp_path)
    assert [event["type"] for event in more.events()].count("weights_loaded") == 1
    assert [point["step"] for point in more.points()] == [1, 2, 3, 4]


def test_what_differs_on_purpose_is_reported(folders, train, tmp_path):
    longer = spec("Llama", folders["Llama"])
    longer["model"] |= {"rope": {"theta": 5e5}, "max_seq_len": 128, "dropout": 0.1}
    result = train(longer, tmp_path)
    reported = next(event["data"] for event in result.events() if event["type"] == "weights_loaded")
    assert reported["model_differs_in"] == ["dropout", "max_seq_len", "rope.theta"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ffn": 64}, "has ffn 48, the model 64. Use model with ffn 48"),
        ({"norm_eps": 1e-6}, "has norm_eps 1e-05, the model 1e-06"),
        ({"tie_embeddings": True}, "has tie_embeddings False, the model True"),
        ({"rope": {"interleaved": True}}, "has rope.interleaved False, the model True"),
        ({"vocab": 512}, "has vocab 256, the model 512"),
    ],
    ids=str,
)
def test_weights_of_another_model_are_refused(change, message, folders, train, tmp_path):
    other = spec("Llama", folders["Llama"])
    other["model"] |= change
    outcome = train(other, tmp_path).outcomes[0]
    assert outcome["class"] == "user_error"
    assert message in outcome["reason"]


def test_broken_weights_end_all_ranks_with_one_sentence(folders, train, tmp_path):
    broken = shutil.copytree(folders["Llama"], tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    result = train(spec("Llama", broken, {"dp": 2, "zero": 3}), tmp_path / "out")
    assert {outcome["class"] for outcome in result.outcomes} == {"user_error"}
    assert all("model_type 'bert' is not known" in outcome["reason"] for outcome in result.outcomes)
    absent = make_spec(None, None, init_from={"package": "no-such-package"})
    assert "is not installed" in train(absent, tmp_path / "absent").outcomes[0]["reason"]


def test_the_shape_comes_from_the_weights_without_a_model(train, tmp_path):
    """Also of a model that is given as weights; another shape than llama-tiny's, the default."""
    first = train(make_spec(steps=1, checkpoint={"every_steps": 1}), tmp_path / "base")
    folder = str(first.directory / "checkpoints")
    document = make_spec(steps=1, init_from={"path": folder})
    del document["model"]
    left_out = train(document, tmp_path / "left-out")
    named = train({**document, "model": {"path": folder}}, tmp_path / "named")
    full = train({**document, "model": TINY}, tmp_path / "full")
    assert left_out.values("loss") == named.values("loss") == full.values("loss")
    missing = make_spec(steps=1, init_from={"path": str(tmp_path / "nothing")})
    del missing["model"]
    with pytest.raises(UserError, match=r"train\.init_from: .*nothing does not exist"):
        accept(missing)
