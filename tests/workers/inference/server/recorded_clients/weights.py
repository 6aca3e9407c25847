"""A small untrained model of bytes with a tokenizer, as Hugging Face lays it out."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers

from tests.workers.inference.untrained import BYTES, untrained_folder

# tools as lists of signatures, calls with their arguments
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: "
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}>"
)


def byte_weights(folder: Path, template: str | None = TEMPLATE, context: int = 2048) -> Path:
    """Write the model with a chat template to a new folder."""
    folder.mkdir()
    untrained_folder(folder, {**BYTES, "vocab": 260, "max_seq_len": context})
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)} | {"<eos>": 256}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
