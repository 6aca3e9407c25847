"""Publishes the control plane's versions in Redis, where agents read them with each heartbeat.

The key expires soon after the scheduler ends, so that agents notice a scheduler of release 0.1.
"""

from __future__ import annotations

import json
import logging
import math

import redis
from django.conf import settings

from orchestrator.common.redis import quick_client
from workers.contracts.wire import names, versions

log = logging.getLogger(__name__)


def publish() -> None:
    """Renew the key; the next pass repeats it if the broker does not answer."""
    value = json.dumps({"release": versions.RELEASE, "wire": str(versions.WIRE)})
    life_s = max(names.CONTROL_TTL_S, math.ceil(3 * settings.ENV.tick_s))
    try:
        quick_client().set(names.CONTROL, value, ex=life_s)
    except (redis.RedisError, OSError) as error:
        log.warning("The control plane's versions were not published: %s", error)
