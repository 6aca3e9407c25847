"""Encrypts short texts for the database under the server's secret key, with its fallbacks.

Does not depend on what the texts are.
"""

from __future__ import annotations

from django.conf import settings

from workers.contracts.wire import encrypted_text


class Unreadable(ValueError):
    """The text was changed, or encrypted under a key that is no longer configured."""


def encrypt(text: str, *, purpose: str) -> str:
    """The text under the current key; `purpose` must be the same for `decrypt`."""
    return encrypted_text.encrypt(settings.SECRET_KEY.encode(), text, purpose=purpose)


def decrypt(stored: str, *, purpose: str) -> str:
    """The text. Raises Unreadable if no configured key fits."""
    return _opened(stored, purpose)[0]


def renewed(stored: str, *, purpose: str) -> str | None:
    """The text under the current key if it is stored under an earlier one, else None.

    Raises Unreadable if no configured key fits.
    """
    text, key = _opened(stored, purpose)
    return None if key == settings.SECRET_KEY else encrypt(text, purpose=purpose)


def _opened(stored: str, purpose: str) -> tuple[str, str]:
    """`(text, the key that fits)`."""
    for key in (settings.SECRET_KEY, *settings.SECRET_KEY_FALLBACKS):
        try:
            return encrypted_text.decrypt(key.encode(), stored, purpose=purpose), key
        except encrypted_text.Undecryptable:
            continue
    raise Unreadable("no configured secret key decrypts this text; enter it again")
