"""Versions of the release and of the wire protocol, and the one rule how far two sides may differ.

Pure. The wire version is `major.minor`: a minor version adds fields and messages, a major version
changes existing ones. Does not depend on messages; `field_versions` has the version of each field.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final, NamedTuple

RELEASE: Final = "0.2.0"
DOCUMENT: Final = "docs/upgrading.md"


class WireVersion(NamedTuple):
    """A version of the wire protocol."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


WIRE: Final = WireVersion(1, 1)
# of release 0.1, whose messages name no version
FIRST: Final = WireVersion(1, 0)
FIRST_RELEASE: Final = "0.1"


class Skew(StrEnum):
    """How far two sides differ: `minor` works, with a warning; `refused` does not."""

    SAME = "same"
    MINOR = "minor"
    REFUSED = "refused"


class PeerVersion(NamedTuple):
    """What one side says about itself; `wire` is None if it names a version that is not one."""

    release: str
    wire: WireVersion | None

    def __str__(self) -> str:
        return f"release {self.release or 'unknown'} (wire protocol {self.wire or 'unreadable'})"


OWN: Final = PeerVersion(RELEASE, WIRE)


class VersionCheck(NamedTuple):
    """The skew of two sides, what is wrong, and a hint; both are empty for `same`."""

    skew: Skew
    message: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


_WIRE = re.compile(r"(0|[1-9]\d{0,5})\.(0|[1-9]\d{0,5})")


def parse_wire(text: object) -> WireVersion | None:
    """The version in a text such as "1.1"; None if it is not one."""
    match = _WIRE.fullmatch(text) if isinstance(text, str) else None
    return WireVersion(int(match[1]), int(match[2])) if match else None


def parse_peer(release: object, wire: object) -> PeerVersion:
    """From the fields of a message; a side that names no version is of release 0.1."""
    if not wire:
        return PeerVersion(FIRST_RELEASE, FIRST)
    return PeerVersion(str(release or "")[:40], parse_wire(wire))


def skew(one: WireVersion | None, other: WireVersion | None) -> Skew:
    """One minor version of difference works; more, or another major version, is refused."""
    if one is None or other is None or one.major != other.major:
        return Skew.REFUSED
    if one.minor == other.minor:
        return Skew.SAME
    return Skew.MINOR if abs(one.minor - other.minor) == 1 else Skew.REFUSED


def judge(
    peer: PeerVersion, *, name: str, own: PeerVersion = OWN, own_name: str = "control plane"
) -> VersionCheck:
    """Compare a peer with this side; `name` and `own_name` are the subjects of the sentence."""
    result = skew(own.wire, peer.wire)
    if result is Skew.SAME:
        return VersionCheck(result)
    older = name if _is_older(peer, own) else f"the {own_name}"
    message = f"{name[:1].upper()}{name[1:]} runs {peer}, the {own_name} {own}."
    if result is Skew.MINOR:
        return VersionCheck(
            result, message, f"Upgrade {older} next; until then they work together ({DOCUMENT})."
        )
    return VersionCheck(
        result,
        message,
        f"Upgrade {older}, one minor version at a time; until then they cannot work together "
        f"({DOCUMENT}).",
    )


def _is_older(peer: PeerVersion, own: PeerVersion) -> bool:
    return peer.wire is None or own.wire is None or peer.wire < own.wire
