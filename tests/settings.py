"""Settings of the tests: the project's, with a temporary data directory of this process.

Set before the project's settings are read, so no test uses a real data directory, database or
Redis.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_HOME = Path(tempfile.mkdtemp(prefix="orrery-tests-"))
_MAKER = os.getpid()


def _clean() -> None:
    if os.getpid() == _MAKER:  # not in a forked child
        shutil.rmtree(_HOME, ignore_errors=True)


atexit.register(_clean)
os.environ["ORRERY_HOME"] = str(_HOME)
os.environ["ORRERY_SECRET_KEY"] = "only for tests"
os.environ["ORRERY_OIDC_ISSUER"] = "http://127.0.0.1:9"  # test_oidc starts a provider
for _name in ("ORRERY_DATA_ROOTS", "REDIS_URL"):
    os.environ.pop(_name, None)

from orchestrator.config.settings import *  # noqa: E402, F403
from orchestrator.config.settings import DATABASES  # noqa: E402

(_HOME / "data").mkdir()
(_HOME / "static").mkdir()  # whitenoise warns if it is missing
# fast password hashing; real hashing is slow on purpose
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# each test client starts the middleware, which would list all static files each time
WHITENOISE_AUTOREFRESH = True
if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    # a file, so that threads and processes of a test meet the same locks as in production
    DATABASES["default"]["TEST"] = {"NAME": str(_HOME / "test.sqlite3")}
