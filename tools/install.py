"""Installs the dependencies into the running virtual environment, torch for this machine first.

`--test` adds the test dependencies. Versions and hashes come from requirements/*.lock. Does not
import the project.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
TRITON = "3.6.0"  # works with NumPy below 2.4; CUDA wheels of torch include triton
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--test", action="store_true", help="add the dependencies of tests and checks"
    )
    args = parser.parse_args()
    lock = ROOT / "requirements" / ("test.lock" if args.test else "run.lock")
    if is_done(lock):
        install_command_line()
        if args.test:
            install_page_checker()
        return 0
    say(
        f"installing from {lock.relative_to(ROOT)} into {sys.prefix} (takes a few minutes, the "
        "first time only)"
    )
    # torch without its dependencies shares no files with the other packages
    with ThreadPoolExecutor(max_workers=1) as executor:
        torch_installed = executor.submit(install_torch_alone)
        pip("install", "--no-deps", "--require-hashes", "-r", str(lock))
    if not torch_installed.result():
        install_torch_with_dependencies()
    if args.test or not (stamp("test.lock")).exists():
        stamp(lock.name).write_text(digest(lock))
    if args.test:  # test.lock contains run.lock
        run_lock = ROOT / "requirements" / "run.lock"
        stamp(run_lock.name).write_text(digest(run_lock))
    install_command_line()
    if args.test:
        install_page_checker()
    return 0


def is_done(lock: Path) -> bool:
    mark = stamp(lock.name)
    return mark.exists() and mark.read_text() == digest(lock)


def install_torch_alone() -> bool:
    """Installs torch without CUDA packages if this machine has no NVIDIA GPU; true on success."""
    if installed("torch"):
        return True
    if has_nvidia_gpu():
        return False
    plain_wheel_is_cpu = sys.platform == "darwin" or platform.machine() not in ("x86_64", "AMD64")
    if plain_wheel_is_cpu:
        done = pip("install", "--no-deps", f"torch=={TORCH}", check=False)
    else:
        say(f"no NVIDIA GPU: the CPU wheel of torch {TORCH}")
        wheel = f"torch=={TORCH}+cpu"
        candidates = [
            ["install", "--no-deps", wheel],  # from the configured index
            [
                "install",
                "--no-deps",
                "--retries",
                "0",
                "--timeout",
                "15",
                "--index-url",
                PYTORCH_CPU_INDEX,
                wheel,
            ],
        ]
        done = any(pip(*arguments, check=False) for arguments in candidates)
    if done:
        install_triton()
    return done


def install_torch_with_dependencies() -> None:
    if has_nvidia_gpu():
        say(f"NVIDIA GPU found: torch {TORCH} with CUDA")
        pip("install", f"torch=={TORCH}")
        return
    say("found no CPU wheel of torch; installing the default build with its CUDA packages")
    pip("install", f"torch=={TORCH}")
    install_triton()


def install_triton() -> None:
    if sys.platform == "linux":  # kernels compile without a GPU
        pip("install", "--no-deps", f"triton=={TRITON}", check=False)


def install_command_line() -> None:
    """Installs `orrery`, the client in deploy/cli, from this checkout; once, as it is a link."""
    mark, source = stamp("orrery-cli"), ROOT / "deploy" / "cli"
    if mark.exists() and mark.read_text() == str(source):
        return
    if pip("install", "--no-deps", "--no-build-isolation", "-e", str(source), check=False):
        mark.write_text(str(source))


def install_page_checker() -> None:
    """Installs the accessibility checker of the tests if npm is available; else they skip it.

    Without changes in package-lock.json nothing is done.
    """
    npm, mark = shutil.which("npm"), stamp("page-checker")
    wanted = digest(ROOT / "package-lock.json")
    known = mark.read_text() if mark.exists() and (ROOT / "node_modules").exists() else ""
    if npm is None or known == wanted:
        return
    done = subprocess.run(
        [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode != 0:
        say("npm could not install the accessibility checker; its tests are skipped")
        return
    mark.write_text(wanted)


def has_nvidia_gpu() -> bool:
    if os.environ.get("ORRERY_TORCH") in ("cpu", "cuda"):
        return os.environ["ORRERY_TORCH"] == "cuda"
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def installed(package: str) -> bool:
    probe = f"import importlib.metadata as m; m.version({package!r})"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0


def pip(*arguments: str, check: bool = True) -> bool:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, "-q"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL)
    if check and done.returncode != 0:
        raise SystemExit(
            f"install: `{' '.join(command)}` failed; read its output above, then run make again"
        )
    return done.returncode == 0


def digest(lock: Path) -> str:
    return hashlib.sha256(lock.read_bytes() + TORCH.encode() + TRITON.encode()).hexdigest()


def stamp(name: str) -> Path:
    return Path(sys.prefix) / f".{name}.installed"


def say(text: str) -> None:
    print(f"install: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
