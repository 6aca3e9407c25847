"""A checkpoint of 1 GB to the S3 protocol: the upload is killed in the middle and resumed while a
rank trains.

The stall of a step is a paired comparison: the copying process is stopped and continued every two
seconds, and steps of both kinds of intervals are compared. moto's server runs at low priority,
because a real store is another machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.bench.record import record
from tests.flows.embedded import free_port
from workers.contracts.wire.maintenance.store import StoreAccess, copy_key
from workers.contracts.wire.maintenance.store_work import StoreLogin, StoreWork
from workers.store import copies
from workers.store.access import Store, open_store

SIZE = 1_000_000_000
ROOT = Path(__file__).resolve().parents[2]
INTERVAL_S = 2.0
SERVER = """
import os, sys, time
os.nice(10)
from moto.server import ThreadedMotoServer
ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False).start()
time.sleep(36000)
"""


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="orrery-bench-store-"))
    port = free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], **quiet)  # type: ignore[call-overload]
    try:
        access = StoreAccess(
            url="s3://bench", endpoint=f"http://127.0.0.1:{port}", region="us-east-1"
        )
        store = open_store(
            url=access.url, endpoint=access.endpoint, region=access.region, key="k", secret="s"
        )
        _wait(store)
        store.fs.call_s3("create_bucket", Bucket="bench")
        measure(folder, store, access)
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


def measure(folder: Path, store: Store, access: StoreAccess) -> None:
    previous = _checkpoint(folder / "step-00000001", 1_000_000)
    index = copies.describe(previous, kind="checkpoint", about={})
    previous_key = copy_key("1", "checkpoint", previous.name, index.fingerprint)
    copies.put(store, previous, previous_key, index)
    source = _checkpoint(folder / "step-00000002", SIZE)
    key = copy_key(
        "1",
        "checkpoint",
        source.name,
        copies.describe(source, kind="checkpoint", about={}).fingerprint,
    )
    training = _train(folder / "run")
    first = _uploader(access, source)
    while _parts(store, key) < SIZE // (16 << 20) // 2:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert copies.read_index(store, key) is None, "the interrupted copy must not exist"
    copies.get(store, previous_key, folder / "previous")
    started = time.perf_counter()
    second = _uploader(access, source)
    windows = _alternate(second)
    assert second.stdout is not None
    done = json.loads(second.stdout.readline())["stored"]
    seconds = time.perf_counter() - started
    second.wait()
    training.terminate()
    training.wait()
    resumed = done["sent_bytes"] / SIZE
    record(
        "store",
        what="resumed upload sends",
        value=resumed,
        unit="of the bytes",
        figure="<= 0.55",
        seconds=round(seconds, 1),
    )
    copied, without = _steps(folder / "run", windows)
    stall = statistics.median(copied) / statistics.median(without) - 1
    record(
        "store",
        what="stall of the step while copying",
        value=stall * 100,
        unit="%",
        figure="<= 5",
        steps=len(copied) + len(without),
        median_ms=round(statistics.median(without) * 1000, 2),
    )
    copies.get(store, key, folder / "whole")


def _checkpoint(folder: Path, size: int) -> Path:
    folder.mkdir(parents=True)
    block = os.urandom(1 << 20)
    with open(folder / "weights", "wb") as file:
        for number in range(0, size, len(block)):
            file.write(number.to_bytes(8, "big") + block[8 : min(len(block), size - number)])
    digest = copies.file_digest(folder / "weights")
    entry = {"bytes": (folder / "weights").stat().st_size, "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps({"version": 1, "files": {"weights": entry}}))
    return folder


def _train(folder: Path) -> subprocess.Popen[bytes]:
    spec = {
        "kind": "train",
        "plan": {},
        "train": {"steps": 100_000, "seq_len": 128},
        "data": {"preset": "shakespeare"},
    }
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(spec))
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "workers.training.main"),
            *("--spec", str(folder / "run.json"), "--dir", str(folder)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    while not (folder / "rank-0" / "points.jsonl").exists():
        assert child.poll() is None, "training ended"
        time.sleep(0.2)
    return child


def _uploader(access: StoreAccess, source: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-m", "workers.store.uploader"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    work = StoreWork(
        number=1,
        kind="checkpoint",
        source=str(source),
        run="1",
        name=source.name,
        about={"step": 2},
    )
    assert child.stdin is not None
    login = StoreLogin(access=access, key="k", secret="s")
    child.stdin.write(f"{login.to_json()}\n{work.to_json()}\n\n")
    child.stdin.flush()
    return child


def _alternate(child: subprocess.Popen[str]) -> list[tuple[float, float, bool]]:
    """Intervals `(from, to, whether it copied)`; the process is stopped in every other one."""
    windows = []
    copying = True
    while child.poll() is None and not _has_output(child):
        start = time.time()
        time.sleep(INTERVAL_S)
        windows.append((start, time.time(), copying))
        copying = not copying
        child.send_signal(signal.SIGCONT if copying else signal.SIGSTOP)
    child.send_signal(signal.SIGCONT)
    return windows[:-1]  # it ended within the last one


def _has_output(child: subprocess.Popen[str]) -> bool:
    import select

    return bool(select.select([child.stdout], [], [], 0)[0])


def _steps(
    folder: Path, windows: list[tuple[float, float, bool]]
) -> tuple[list[float], list[float]]:
    """Seconds per step while copying and while not, of steps within one interval."""
    lines = (folder / "rank-0" / "points.jsonl").read_text().splitlines()
    times = [json.loads(line)["time"] for line in lines if line.endswith("}")]
    by_kind: dict[bool, list[float]] = {True: [], False: []}
    for before, after in pairwise(times):
        for start, end, copying in windows:
            if start <= before and after <= end:
                by_kind[copying].append(after - before)
    return by_kind[True], by_kind[False]


def _parts(store: Store, key: str) -> int:
    remote = f"{store.root}/{key}/weights"
    bucket, name = store.fs.split_path(remote)[:2]
    answer: Any = store.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=name)
    uploads = answer.get("Uploads") or []
    if not uploads:
        return 0
    parts = store.fs.call_s3("list_parts", Bucket=bucket, Key=name, UploadId=uploads[0]["UploadId"])
    return len(parts.get("Parts") or [])


def _wait(store: Store) -> None:
    for _ in range(600):
        try:
            store.fs.call_s3("list_buckets")
            return
        except Exception:  # the library's own classes
            time.sleep(0.1)
    raise TimeoutError("moto's server did not start")


if __name__ == "__main__":
    main()
