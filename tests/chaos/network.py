"""A network namespace per node, so that a node can be cut off as by a broken switch.

Needs root and iproute2; without them nodes use loopback and cannot be partitioned. Names contain
the harness's process id, so that the next harness removes what a killed one left.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_NAMESPACES = Path("/run/netns")
_OWNED = re.compile(r"or[rv](\d+)x\d+")  # namespaces (orr) and links (orv) of a process id
_BLOCKS = range(200, 250)  # subnets are 10.BLOCK.NUMBER.0/30


class NodeNetwork:
    """A namespace with one link to this machine; `address` is this machine's end of the link."""

    def __init__(self, number: int, subnet: str) -> None:
        unique = f"{os.getpid()}x{number}"
        self._namespace, self._link, self._peer = f"orr{unique}", f"orv{unique}", f"orp{unique}"
        self.address, inner = f"{subnet}.1", f"{subnet}.2"
        _ip("netns", "add", self._namespace)
        try:
            _ip("link", "add", self._link, "type", "veth", "peer", "name", self._peer)
            _ip("link", "set", self._peer, "netns", self._namespace)
            _ip("addr", "add", f"{self.address}/30", "dev", self._link)
            _ip("link", "set", self._link, "up")
            self._inside("addr", "add", f"{inner}/30", "dev", self._peer)
            self._inside("link", "set", self._peer, "up")
            self._inside("link", "set", "lo", "up")
        except subprocess.CalledProcessError:
            self.close()
            raise

    def command(self, words: list[str]) -> list[str]:
        """The command that runs inside the namespace."""
        return ["ip", "netns", "exec", self._namespace, *words]

    def partition(self) -> None:
        """Cut the link; nothing answers, not even with a refusal."""
        _ip("link", "set", self._link, "down")

    def join(self) -> None:
        """Restore the link."""
        _ip("link", "set", self._link, "up")

    def close(self) -> None:
        """Remove the namespace and its link."""
        _remove(self._link, self._namespace)

    def _inside(self, *words: str) -> None:
        _ip("-n", self._namespace, *words)


def create_networks(count: int) -> list[NodeNetwork]:
    """One network per node; an empty list if this user may not create namespaces."""
    networks: list[NodeNetwork] = []
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return networks
    try:
        with _only_one_harness():
            remove_stale()
            for number, subnet in zip(range(count), _free_subnets(), strict=False):
                networks.append(NodeNetwork(number, subnet))
    except subprocess.CalledProcessError:
        for network in networks:
            network.close()
        return []
    return networks


def remove_stale() -> list[str]:
    """Remove namespaces and links of harnesses that no longer run; returns their names."""
    links = [row["ifname"] for row in json.loads(_ip("-j", "link", "show") or "[]")]
    names = [path.name for path in _NAMESPACES.glob("orr*")]
    stale = [name for name in (*links, *names) if _is_stale(name)]
    for name in stale:
        _remove(*((name, "") if name.startswith("orv") else ("", name)))
    return stale


def _is_stale(name: str) -> bool:
    """Whether the name's process has ended, or is younger than the name's namespace."""
    owner = _OWNED.fullmatch(name)
    if owner is None:
        return False
    try:
        started = psutil.Process(int(owner[1])).create_time()
        return started > (_NAMESPACES / f"orr{name[3:]}").stat().st_mtime + 1.0
    except psutil.NoSuchProcess:
        return True
    except OSError:  # a link without namespace
        return False


def _free_subnets() -> Iterator[str]:
    """Subnets of which no link of this machine has an address."""
    links = json.loads(_ip("-j", "-4", "addr", "show") or "[]")
    used = {info["local"].rpartition(".")[0] for link in links for info in link["addr_info"]}
    for block in _BLOCKS:
        for number in range(256):
            if (subnet := f"10.{block}.{number}") not in used:
                yield subnet


@contextmanager
def _only_one_harness() -> Iterator[None]:
    with open(Path(tempfile.gettempdir()) / "orrery-chaos-network.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove(link: str, namespace: str) -> None:
    if link:
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", link)
    if namespace:
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "del", namespace)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
