"""Settings of a worker process that uses the database of the test that started it."""

from __future__ import annotations

import os

from orchestrator.config.settings import *  # noqa: F403
from orchestrator.config.settings import DATABASES

DATABASES["default"]["NAME"] = os.environ["JOBS_TEST_DATABASE"]
