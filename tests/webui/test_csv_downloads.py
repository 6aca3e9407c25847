"""CSV files that pages make: names that users chose start no formula and add no columns."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import webui

SCRIPTS = Path(webui.__file__).parent / "static" / "webui" / "js"


def test_only_one_script_writes_csv() -> None:
    """The charts of runs wrote names of metrics as they are."""
    writers = {
        path.name for path in SCRIPTS.rglob("*.js") if 'type: "text/csv"' in path.read_text()
    }
    assert writers == {"csv.js"}
    assert "${name},${row}" not in (SCRIPTS / "charts.js").read_text()


def test_fields_are_escaped() -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    values = ["=1+1", "@x", "-x", "a,b", 'say "x"', "plain", -0.5, None, "=a,b"]
    program = (
        f"import {{ csvCell }} from {json.dumps((SCRIPTS / 'csv.js').as_uri())};"
        f"console.log(JSON.stringify({json.dumps(values)}.map(csvCell)));"
    )
    done = subprocess.run(
        [node, "--input-type=module", "-e", program], capture_output=True, text=True, check=True
    )
    expected = ["'=1+1", "'@x", "'-x", '"a,b"', '"say ""x"""', "plain", "-0.5", "", '"\'=a,b"']
    assert json.loads(done.stdout) == expected
