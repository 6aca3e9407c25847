"""Revokes attempts that have ended, so that supervisors stop, and removes their leases.

Best effort: a supervisor without contact stops before its lease ends, and heartbeats that name an
ended attempt make the scheduler kill it. Does not decide what is revoked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import Any

import redis

from orchestrator.common.redis import client, quick_client
from workers.contracts.wire import liveness

log = logging.getLogger(__name__)
# KEYS: revoked, leases of each node; ARGV: fence, now. Returns 0 if one of the leases exists.
_REVOKE_UNLAUNCHED = """
for i = 2, #KEYS do
  if redis.call('HEXISTS', KEYS[i], ARGV[1]) == 1 then
    return 0
  end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
"""
# a node may write any fields there; supervisors renew what is deleted within seconds
_MAX_LEASES = 1000
_MAX_LEASE_BYTES = 2**20
_FENCES = """
local size = redis.call('MEMORY', 'USAGE', KEYS[1], 'SAMPLES', 20)
if redis.call('HLEN', KEYS[1]) > tonumber(ARGV[1]) or (size or 0) > tonumber(ARGV[2]) then
  redis.call('UNLINK', KEYS[1])
  return false
end
return redis.call('HKEYS', KEYS[1])
"""


def revoke(fence: str) -> bool:
    """Stop the attempt's ranks wherever they still run; False if the broker does not answer."""
    try:
        quick_client().hset(liveness.REVOKED, fence, f"{time.time():.0f}")
    except (redis.RedisError, OSError) as error:
        log.warning("Attempt %s was not revoked at the broker: %s", fence, error)
        return False
    return True


def revoke_unlaunched(fence: str, nodes: Collection[str]) -> bool:
    """Revoke an attempt that no supervisor has started; False if one has a lease.

    Also False while the broker does not answer: a launch order may still wait in it. Supervisors
    start ranks only with a lease, so none starts after a revocation.
    """
    keys = [liveness.REVOKED, *map(liveness.leases_key, nodes)]
    try:
        script, now = _REVOKE_UNLAUNCHED, f"{time.time():.0f}"
        answer = quick_client().eval(script, len(keys), *keys, fence, now)
    except (redis.RedisError, OSError) as error:
        log.warning("Attempt %s was not revoked at the broker: %s", fence, error)
        return False
    return bool(answer)


def remove_leases(fence: str, nodes: Collection[str]) -> None:
    """Remove the leases of an attempt that has ended."""
    try:
        with quick_client().pipeline(transaction=False) as pipe:
            for node in nodes:
                pipe.hdel(liveness.leases_key(node), fence)
            pipe.execute()
    except (redis.RedisError, OSError):
        return  # `prune` removes them


def prune(open_fences: Collection[str], nodes: Sequence[str]) -> None:
    """Remove the nodes' leases of attempts that are not open, and old revocations."""
    try:
        server = client()
        with server.pipeline(transaction=False) as pipe:
            for node in nodes:
                pipe.eval(_FENCES, 1, liveness.leases_key(node), _MAX_LEASES, _MAX_LEASE_BYTES)
            leases = pipe.execute(raise_on_error=False)
            for node, fences in zip(nodes, leases, strict=True):
                if isinstance(fences, Exception):
                    continue  # the node wrote something else there
                if fences is None:
                    log.warning("The leases of %s exceeded their size and were deleted", node)
                    continue
                stale = [fence for fence in fences if _text(fence) not in open_fences]
                if stale:
                    pipe.hdel(liveness.leases_key(node), *stale)
            pipe.execute()
        before = time.time() - liveness.REVOKED_TTL_S
        revoked: Any = server.hgetall(liveness.REVOKED)
        if old := [fence for fence, at in revoked.items() if _seconds(at) < before]:
            server.hdel(liveness.REVOKED, *old)
    except (redis.RedisError, OSError) as error:
        log.warning("Old leases were not removed: %s", error)


def _text(fence: bytes) -> str:
    return fence.decode("utf-8", "replace")


def _seconds(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
