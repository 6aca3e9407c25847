"""PEFT computes our modules' logits from the files that we write."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.workers.models.adapters import golden, written
from workers.models.adapters.peft_config import CONFIG, TENSORS
from workers.models.weights.open import open_weights

WRITTEN = json.loads((golden.FOLDER / "written.json").read_text())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    golden.base(folder)
    return open_weights(folder)


@pytest.mark.parametrize("name", written.ADAPTERS)
def test_peft_computes_the_logits_of_our_modules(name, base, tmp_path):
    """`golden/written` are files that PEFT 0.21 loaded; today's writer writes the same ones."""
    decoder = written.adapted_decoder(name, base)
    written.write(name, decoder, tmp_path, base)
    stored = golden.FOLDER / "written" / name
    assert json.loads((tmp_path / CONFIG).read_text()) == json.loads((stored / CONFIG).read_text())
    ours, theirs = load_file(tmp_path / TENSORS), load_file(stored / TENSORS)
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-6, atol=1e-6)
    expected = torch.tensor(WRITTEN[name])
    torch.testing.assert_close(written.live_logits(decoder), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", written.ADAPTERS)
def test_an_installed_peft_computes_the_same(name, base, tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "BASE", tmp_path / "base")
    decoder = written.adapted_decoder(name, base)
    written.write(name, decoder, tmp_path / "adapter", base)
    theirs = torch.tensor(golden.peft_logits(tmp_path / "adapter"))
    torch.testing.assert_close(written.live_logits(decoder), theirs, rtol=1e-5, atol=1e-5)
