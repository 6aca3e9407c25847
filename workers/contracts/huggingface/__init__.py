"""Hugging Face `config.json` files as ModelSpec, for planning and for loading weights.

Depends on pydantic and the standard library only.
"""

from workers.contracts.huggingface.fields import UnreadableConfig
from workers.contracts.huggingface.reading import read_config, read_json_object, read_model

__all__ = ["UnreadableConfig", "read_config", "read_json_object", "read_model"]
