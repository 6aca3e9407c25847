"""`python -m workers.store.fetch KEY FOLDER HINT`: reads one copy from the store into a folder.

Reads a `StoreLogin` from standard input. Prints a `StoreProblem` and exits with 1 if the store
refuses or the copy is damaged; then HINT says what to do.
"""

from __future__ import annotations

import sys
from pathlib import Path

from workers.contracts.wire.maintenance.store import StoreProblem
from workers.contracts.wire.maintenance.store_work import StoreLogin
from workers.store import copies
from workers.store.access import explain, open_store


def main() -> int:
    """0 if the folder has the copy."""
    key, folder, hint = sys.argv[1:4]
    login = StoreLogin.model_validate_json(sys.stdin.readline())
    store = open_store(
        url=login.access.url,
        endpoint=login.access.endpoint,
        region=login.access.region,
        key=login.key,
        secret=login.secret,
    )
    try:
        copies.get(store, key, Path(folder))
    except copies.Damaged as error:
        print(StoreProblem(reason="other", message=str(error)[:400], hint=hint).to_json())
        return 1
    except Exception as error:  # libraries of stores raise errors of many kinds
        print(explain(error, store).to_json())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
