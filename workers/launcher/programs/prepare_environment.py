"""Prepares the packages of a script run, then becomes its program; a plain file.

Runs under the run's user: building a package may execute its code. Loads modules, builds an
environment with uv or uses the one that is there, and reports in a file. Standard library only and
no project imports.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

USER_ERROR, INFRASTRUCTURE = "user_error", "infrastructure"
CODES = {USER_ERROR: 64, INFRASTRUCTURE: 69}
MODULE_LIMIT_S, BUILD_LIMIT_S = 300, 3600
COMPLETE = "complete.json"  # exists when all packages are installed
NO_MODULES = 87  # exit code of the shell without `module`
# prints the variables before and after; the shell function exists in login shells only
LOAD = f"""type module >/dev/null 2>&1 || exit {NO_MODULES}
env -0; printf -- '--\\0'
for name in "$@"; do module load "$name" >&2 || exit 88; done
env -0"""
OWN = ("ORRERY_", "CUDA_VISIBLE_DEVICES", "TORCHELASTIC_")  # modules do not change these
# in uv's messages: the lock is right, but the node cannot get the packages now
UNREACHABLE = (
    "error sending request",
    "dns error",
    "timed out",
    "connection",
    "status server error",
    "no space left",
    "temporary failure",
)


class PreparationFailed(Exception):
    """The environment cannot be prepared: exit class and reason."""

    def __init__(self, exit_class: str, reason: str) -> None:
        super().__init__(reason)
        self.exit_class = exit_class


def main() -> NoReturn:
    """Prepare what the first argument requests, then execute the words after `--`."""
    request, words = json.loads(sys.argv[1]), sys.argv[3:]
    started = time.time()
    report: dict[str, Any] = {"modules": request["modules"]}
    try:
        if request["modules"]:
            load_modules(request["modules"])
        if request.get("lock"):
            report |= environment(request)
            use(Path(request["folder"]))
        check_torch(words[0], locked=bool(request.get("lock")))
    except (PreparationFailed, OSError) as error:
        exit_class = error.exit_class if isinstance(error, PreparationFailed) else INFRASTRUCTURE
        print(f"environment: {error}", file=sys.stderr, flush=True)
        write(request["report"], {"state": "failed", "class": exit_class, "reason": str(error)})
        sys.exit(CODES[exit_class])
    report |= {"state": "ready", "seconds": round(time.time() - started, 3)}
    write(request["report"], report)
    os.execvpe(words[0], words, os.environ)


def load_modules(names: list[str]) -> None:
    """Set the variables that `module load` sets. Raises PreparationFailed."""
    try:
        done = subprocess.run(
            ["bash", "-lc", LOAD, "load", *names],
            capture_output=True,
            timeout=MODULE_LIMIT_S,
        )
    except FileNotFoundError:
        raise PreparationFailed(
            INFRASTRUCTURE, "This node has no bash, which loads modules."
        ) from None
    except subprocess.TimeoutExpired:
        message = f"module load did not end within {MODULE_LIMIT_S} s."
        raise PreparationFailed(INFRASTRUCTURE, message) from None
    errors = done.stderr.decode(errors="replace")
    print(errors, end="", file=sys.stderr, flush=True)
    if done.returncode == NO_MODULES:
        message = "This node has no environment modules (Lmod or Tcl), so it cannot load "
        raise PreparationFailed(INFRASTRUCTURE, message + ", ".join(names) + ".")
    # Tcl modules print an error and exit with 0
    if done.returncode or "ERROR:" in errors:
        raise PreparationFailed(
            USER_ERROR, f"Modules {', '.join(names)} cannot be loaded: {last(errors)}"
        )
    before, _, after = done.stdout.partition(b"--\0")
    old, new = variables(before), variables(after)
    for name in old.keys() - new.keys():
        if not name.startswith(OWN):
            os.environ.pop(name, None)
    for name, value in new.items():
        if old.get(name) != value and not name.startswith(OWN):
            os.environ[name] = value


def variables(text: bytes) -> dict[str, str]:
    """The variables that `env -0` prints."""
    pairs = (os.fsdecode(each).partition("=") for each in text.split(b"\0") if each)
    return {name: value for name, _, value in pairs}


def environment(request: dict[str, Any]) -> dict[str, Any]:
    """Build the environment, or use it if another attempt has; what was used."""
    folder = Path(request["folder"])
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    complete = folder / COMPLETE
    with open(folder.with_suffix(".build"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # a second attempt waits, then finds it built
        # torchrun inherits this one: an environment in use is not deleted
        used = os.open(folder.with_suffix(".use"), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(used, fcntl.LOCK_SH)
        os.set_inheritable(used, True)
        built = not complete.is_file()
        if built:
            shutil.rmtree(folder, ignore_errors=True)
            build(request, folder)
            facts = {"packages": packages(folder), "python": version(folder)}
            write(complete, facts)
            delete_unused(folder.parent, request["keep_days"])
        os.utime(complete)
    facts = json.loads(complete.read_text())
    return {**facts, "fingerprint": request["fingerprint"], "built": built}


def delete_unused(top: Path, days: float) -> None:
    """Delete the user's environments that no attempt uses, and none started for this long."""
    if days <= 0:
        return
    for complete in top.glob(f"*/{COMPLETE}"):
        folder = complete.parent
        with contextlib.suppress(OSError), open(folder.with_suffix(".use"), "w") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - complete.stat().st_mtime > days * 86400:
                complete.unlink()
                shutil.rmtree(folder, ignore_errors=True)
                print(f"environment: deleted {folder.name}, unused", file=sys.stderr)


def build(request: dict[str, Any], folder: Path) -> None:
    """Install exactly what the lock names."""
    lock, base = Path(request["lock"]), request["base"]
    os.environ.setdefault("UV_CACHE_DIR", str(folder.parent / "cache"))
    os.environ["UV_PYTHON_DOWNLOADS"] = "never"
    print(f"environment: building from {lock.name}", file=sys.stderr, flush=True)
    if lock.name == "uv.lock":
        os.environ["UV_PROJECT_ENVIRONMENT"] = str(folder)
        only = ("--frozen", "--no-install-project", "--no-dev")
        uv("sync", *only, "--project", lock.parent, "--python", base)
    else:
        uv("venv", "--no-project", "--python", base, folder)
        python = folder / "bin" / "python"
        uv("pip", "install", "--strict", "--python", python, "--requirement", lock)
    for site in folder.glob("lib/python*/site-packages"):
        # searched last, so a package of the lock comes before the node's
        if request["node_packages"]:
            lines = "\n".join(request["node_packages"])
            (site / "orrery_node_packages.pth").write_text(lines + "\n")


def uv(*words: object) -> str:
    """Run uv, whose progress goes to the log; its output. Raises PreparationFailed."""
    program = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
    command = [program, *map(str, words), "--no-progress", "--color", "never"]
    try:
        running = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        message = "This node has no uv, which installs packages: pip install uv there."
        raise PreparationFailed(INFRASTRUCTURE, message) from None
    limit = threading.Timer(BUILD_LIMIT_S, running.kill)
    limit.start()
    with running, ThreadPoolExecutor(1) as reader:
        output = reader.submit(running.stdout.read if running.stdout else str)
        lines = []
        for line in running.stderr or ():
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line)
        code = running.wait()
    limit.cancel()
    if code == -signal.SIGKILL:
        message = f"uv was ended; it may take {BUILD_LIMIT_S} s."
        raise PreparationFailed(INFRASTRUCTURE, message)
    if code:
        text = "".join(lines)
        unreachable = any(each in text.lower() for each in UNREACHABLE)
        reason = f"The packages cannot be installed: {summary(text)}"
        raise PreparationFailed(INFRASTRUCTURE if unreachable else USER_ERROR, reason)
    return output.result()


def packages(folder: Path) -> list[str]:
    """What is installed, as `name==version`."""
    python = folder / "bin" / "python"
    listed = json.loads(uv("pip", "list", "--python", python, "--format", "json") or "[]")
    return [f"{each['name']}=={each['version']}" for each in listed]


def version(folder: Path) -> str:
    """The version in the environment's own description."""
    for line in (folder / "pyvenv.cfg").read_text().splitlines():
        name, _, value = line.partition("=")
        if name.strip() in ("version_info", "version"):
            return value.strip()
    return ""


def use(folder: Path) -> None:
    """Programs of the environment come first on the PATH."""
    os.environ["VIRTUAL_ENV"] = str(folder)
    os.environ["PATH"] = os.pathsep.join([str(folder / "bin"), os.environ.get("PATH", "")])


def check_torch(python: str, *, locked: bool) -> None:
    """Check that this Python has torch, which starts the ranks. Raises PreparationFailed."""
    probe = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    try:
        missing = subprocess.run([python, "-c", probe], stdin=subprocess.DEVNULL).returncode
    except FileNotFoundError:
        raise PreparationFailed(
            USER_ERROR, f"There is no {python} on the PATH of the modules."
        ) from None
    if missing and locked:
        message = "The environment has no torch, which starts the ranks: add it to the lock, or "
        raise PreparationFailed(USER_ERROR, message + "set script.environment.node_packages.")
    if missing:
        message = f"{python} has no torch, which starts the ranks: load a module that has it."
        raise PreparationFailed(USER_ERROR, message)


def summary(text: str) -> str:
    """uv's error without its progress, in one line."""
    lines = [line.strip(" ×╰─▶├│·") for line in text.splitlines()]
    start = next((n for n, line in enumerate(lines) if line.startswith("error")), None)
    first = next((n for n, line in enumerate(text.splitlines()) if "×" in line), None)
    begin = first if first is not None else start if start is not None else max(0, len(lines) - 3)
    return " ".join(line for line in lines[begin:] if line)[:800]


def last(text: str) -> str:
    """The last line that has text."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")[:400]


def write(path: "str | Path", data: dict[str, Any]) -> None:
    """Write JSON in one step; a full disk is reported by the supervisor."""
    temporary = Path(f"{path}.{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(data))
        os.replace(temporary, path)


if __name__ == "__main__":
    main()
