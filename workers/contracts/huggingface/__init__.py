"""Hugging Face `config.json` files as ModelSpec, for planning and for loading weights.

Depends on pydantic and the standard library only.
"""

from workers.contracts.huggingface.config_reader import read_config, read_json_object, read_model
from workers.contracts.huggingface.fields import UnreadableConfig

__all__ = ["UnreadableConfig", "read_config", "read_json_object", "read_model"]
