"""Which environment variables hold secrets, by their names. Does not read any value."""

from __future__ import annotations

import re

# HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, PGPASSWORD, GOOGLE_CREDENTIALS
_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|KEY|APIKEY|PASS|PASSWD|PASSPHRASE|CREDENTIALS?)$|PASSWORD$", re.I
)


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret."""
    return _SECRET_NAME.search(name) is not None
