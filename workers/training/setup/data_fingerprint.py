"""A fingerprint of a run's data: equal for the same rows in the same order.

Checkpoints store it, so that a resumed run does not continue on other data unnoticed. Does not
depend on ranks or batches.
"""

from __future__ import annotations

import hashlib

import numpy as np

from workers.training.data.rows import RowSource

_ROWS = 64


def fingerprint_rows(samples: RowSource) -> str:
    """SHA-256 of the number of rows and sources, and of 64 rows spread over the epoch.

    Finds other text, added or removed text, and another order, packing or mixture; the names of
    files do not count. Does not find a change that keeps the number of rows and lies between the
    rows that are read.
    """
    count = min(_ROWS, samples.windows)
    digest = hashlib.sha256(repr((samples.windows, samples.seq_len, len(samples.names))).encode())
    for index in np.linspace(0, samples.windows - 1, count, dtype=np.int64).tolist():
        row = samples.row(index)
        digest.update(repr((samples.source(index), row.starts, row.segments)).encode())
        digest.update(np.ascontiguousarray(row.ids, dtype=np.int64).tobytes())
        digest.update(np.ascontiguousarray(row.weights, dtype=np.float32).tobytes())
    return digest.hexdigest()
