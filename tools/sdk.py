"""Generates the Python SDK `orrery_sdk` with typed models from the OpenAPI document.

The document is that of this checkout, or of a running server (`--url`). openapi-python-client does
the work; the result is an installable package that depends on httpx and attrs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = {
    "project_name_override": "orrery-sdk",
    "package_name_override": "orrery_sdk",
    "post_hooks": [],  # the generated code needs no formatting
    "content_type_overrides": {
        "application/x-ndjson": "application/octet-stream",
        "application/vnd.apache.parquet": "application/octet-stream",
        "application/zip": "application/octet-stream",
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "sdk", help="folder of the package")
    parser.add_argument("--url", help="a server, such as http://127.0.0.1:8000; default: this code")
    args = parser.parse_args()
    generate(document_of_server(args.url) if args.url else document_of_code(), args.out)
    print(f"sdk: {args.out}; install it with: pip install {args.out}")
    return 0


def document_of_server(url: str) -> dict[str, object]:
    """The OpenAPI document of a running server."""
    address = f"{url.rstrip('/')}/api/v1/openapi.json"
    with urllib.request.urlopen(address, timeout=60) as response:
        document: dict[str, object] = json.load(response)
    return document


def document_of_code() -> dict[str, object]:
    """The OpenAPI document that this checkout serves."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "orchestrator.config.settings")
    sys.path.insert(0, str(ROOT))
    import django

    django.setup()
    from orchestrator.api.root import api

    document: dict[str, object] = json.loads(json.dumps(api.get_openapi_schema(), default=str))
    return document


def generate(document: dict[str, object], out: Path) -> None:
    """Write the package for the document to the folder `out`; replaces an earlier one."""
    with tempfile.TemporaryDirectory() as folder:
        config, source = Path(folder) / "config.json", Path(folder) / "openapi.json"
        config.write_text(json.dumps(CONFIG))
        source.write_text(json.dumps(document))
        command = [
            *(sys.executable, "-m", "openapi_python_client", "generate", "--meta", "setup"),
            *("--overwrite", "--fail-on-warning"),
            *("--path", str(source), "--config", str(config), "--output-path", str(out)),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"sdk: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main())
