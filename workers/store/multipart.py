"""Uploads one file to S3 in parts, and continues an upload that was interrupted.

A part that the store already has counts if its checksum equals that of the file's bytes there. The
object appears when all parts are complete. Memory: at most `THREADS` parts.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workers.store.access import Store

PART_BYTES = 16 << 20
MOST_PARTS = 9_000  # S3 allows 10,000
THREADS = 2


def part_size(size: int) -> int:
    """Bytes per part of a file of `size` bytes: a multiple of PART_BYTES."""
    parts = -(-size // PART_BYTES)
    return PART_BYTES * max(1, -(-parts // MOST_PARTS))


def upload(store: Store, local: Path, remote: str) -> int:
    """Upload the file; returns the bytes that were sent. Raises the store's errors."""
    size = local.stat().st_size
    bucket, key = store.fs.split_path(remote)[:2]
    if size <= PART_BYTES:
        store.fs.call_s3("put_object", Bucket=bucket, Key=key, Body=local.read_bytes())
        return size
    upload_id, known = _interrupted(store, bucket, key)
    if upload_id is None:
        upload_id = store.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
    step = part_size(size)
    sent = 0

    def send(number: int) -> tuple[dict[str, Any], int]:
        with open(local, "rb") as file:
            file.seek((number - 1) * step)
            data = file.read(step)
        tag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if known.get(number) == (tag, len(data)):
            return {"PartNumber": number, "ETag": f'"{tag}"'}, 0
        answer = store.fs.call_s3(
            "upload_part", Bucket=bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=data
        )
        return {"PartNumber": number, "ETag": answer["ETag"]}, len(data)

    with ThreadPoolExecutor(THREADS) as threads:
        parts = []
        for part, count in threads.map(send, range(1, -(-size // step) + 1)):
            parts.append(part)
            sent += count
    store.fs.call_s3(
        "complete_multipart_upload",
        Bucket=bucket,
        Key=key,
        UploadId=upload_id,
        MultipartUpload={"Parts": parts},
    )
    return sent


def _interrupted(
    store: Store, bucket: str, key: str
) -> tuple[str | None, dict[int, tuple[str, int]]]:
    """The newest unfinished upload of the key, and `{part: (checksum, bytes)}` of its parts."""
    answer = store.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)
    uploads = [each for each in answer.get("Uploads") or [] if each["Key"] == key]
    if not uploads:
        return None, {}
    newest = max(uploads, key=lambda each: str(each.get("Initiated")))
    parts: dict[int, tuple[str, int]] = {}
    marker = 0
    while True:
        page = store.fs.call_s3(
            "list_parts",
            Bucket=bucket,
            Key=key,
            UploadId=newest["UploadId"],
            PartNumberMarker=marker,
        )
        for part in page.get("Parts") or []:
            parts[int(part["PartNumber"])] = part["ETag"].strip('"'), int(part["Size"])
        if not page.get("IsTruncated"):
            return newest["UploadId"], parts
        marker = int(page["NextPartNumberMarker"])
