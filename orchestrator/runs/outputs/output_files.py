"""Opens files that runs write: below a run's folder or a data root, never outside by a link."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

from django.conf import settings

from orchestrator.common.checked_files import open_resolved, resolved_below


def open_output_file(path: Path) -> BinaryIO:
    """Open a file in its run's folder or below a data root; links may not lead out of these.

    Raises OSError.
    """
    runs = Path(settings.ENV.media_runs)
    if path.is_relative_to(runs) and path != runs:
        places = [runs / path.relative_to(runs).parts[0]]
    else:
        places = list(settings.DATA_ROOTS)
    for place in places:
        if (resolved := resolved_below(path, place)) is not None:
            return open_resolved(resolved)
    raise FileNotFoundError(errno.ENOENT, "not in the run's folder or below a data root", str(path))
