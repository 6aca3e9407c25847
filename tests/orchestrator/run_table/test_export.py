"""The runs table as CSV and Parquet, through REST; DuckDB reads the Parquet files."""

from __future__ import annotations

import math
import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pytest

from orchestrator.accounts.models import User
from orchestrator.run_table import export
from orchestrator.run_table.columns import Column
from orchestrator.run_table.order import MatchingRuns
from orchestrator.run_table.parquet import ParquetColumn, parquet_file
from orchestrator.runs.models import ParameterName, Run
from tests import factories

pytestmark = pytest.mark.django_db

Rows = list[dict[str, Any]]
COLUMNS = [
    ParquetColumn("id", "integer"),
    ParquetColumn("näme", "text"),
    ParquetColumn("created", "time"),
    ParquetColumn("min(loss)", "number"),
    *(ParquetColumn(f"empty {number}", "text") for number in range(20)),
]


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Reads a file's rows, and the name of each column's type."""

    def rows(content: bytes) -> tuple[Rows, dict[str, str]]:
        path = tmp_path / "runs.parquet"
        path.write_bytes(content)
        with duckdb.connect() as connection:
            connection.execute("SET TimeZone = 'UTC'")
            described = connection.execute(f"DESCRIBE SELECT * FROM '{path}'").fetchall()
            types = {name: str(type).lower() for name, type, *_ in described}
            # its times need pytz; microseconds do not
            selected = ", ".join(
                f'epoch_us("{name}")' if "time" in type else f'"{name}"'
                for name, type in types.items()
            )
            values = connection.execute(f"SELECT {selected} FROM '{path}'").fetchall()
        epoch = datetime(1970, 1, 1, tzinfo=UTC)
        return [
            {
                name: epoch + timedelta(microseconds=value)
                if "time" in type and value is not None
                else value
                for (name, type), value in zip(types.items(), row, strict=True)
            }
            for row in values
        ], types

    return rows


def test_the_table_downloads_as_csv(owner: User, runs: list[Run]) -> None:
    answer = factories.api(owner).get(
        "/api/v1/runs/csv",
        {"columns": "min(loss),lr,unknown", "sort": "-loss", "query": "loss > 1"},
    )
    lines = b"".join(answer).decode().splitlines()
    assert lines[0].endswith("created,min(loss),train.optimizer.lr")
    assert [line.split(",")[0] for line in lines[1:]] == [str(runs[0].pk), str(runs[2].pk)]
    assert lines[1].endswith(",0.0,0.001")


def test_a_wrong_order_is_refused_before_the_file_starts(owner: User, runs: list[Run]) -> None:
    """The refusal came after the first line of the CSV, in an answer with status 200."""
    for kind in ("csv", "parquet"):
        answer = factories.api(owner).get(f"/api/v1/runs/{kind}", {"sort": "notes"})
        assert answer.status_code == 422, kind


def test_the_table_downloads_as_parquet(owner: User, runs: list[Run], read: Any) -> None:
    wanted = {"columns": "min(loss),lr,loss,min(loss),duration", "sort": "-loss"}
    answer = factories.api(owner).get("/api/v1/runs/parquet", wanted)
    assert answer["Content-Type"] == "application/vnd.apache.parquet"
    assert answer["Content-Disposition"] == 'attachment; filename="runs.parquet"'
    rows, types = read(b"".join(answer))
    assert [row["id"] for row in rows] == [runs[at].pk for at in (0, 2, 1, 3)]
    assert [row["loss"] for row in rows] == [3.0, 2.0, 1.0, None]
    assert [row["min(loss)"] for row in rows] == [0.0, 0.0, 0.0, None]
    assert [row["train.optimizer.lr"] for row in rows] == [1e-3, 1e-2, 1e-4, 1e-2]
    assert rows[0]["name"] == "run 0" and rows[0]["tags"] == "all"
    assert rows[0]["created"] == runs[0].created and rows[0]["experiment"] is None
    assert {"int64", "bigint"} & {types["id"]}
    assert types["loss"] == "double" and "time" in types["created"]


def test_a_value_that_is_a_text_in_one_run_is_a_text_column(owner: User, read: Any) -> None:
    runs = [factories.run(owner, name=name) for name in ("number", "text")]
    for run, number, text in zip(runs, (64.0, None), ("64", "auto"), strict=True):
        run.parameters.create(name="custom.size", number=number, text=text)
    ParameterName.objects.create(owner=owner, name="custom.size")
    answer = factories.api(owner).get("/api/v1/runs/parquet", {"columns": "custom.size"})
    rows, _ = read(b"".join(answer))
    assert [row["custom.size"] for row in rows] == ["auto", "64"]


def test_a_number_that_becomes_a_text_while_the_table_is_written_is_left_out(
    owner: User, read: Any
) -> None:
    """The answer ended in the middle of the file."""
    runs = [factories.run(owner, name=name) for name in ("number", "changed")]
    for run in runs:
        run.parameters.create(name="custom.size", number=64.0)
    column = Column("config", "custom.size")
    parts = export.table_parquet(
        MatchingRuns(Run.objects.all(), Run.objects.all()), sort=None, columns=[column]
    )
    runs[1].parameters.update(number=None, text="auto")
    rows, types = read(b"".join(parts))
    assert [row["custom.size"] for row in rows] == [None, 64.0]
    assert types["custom.size"] == "double"


def test_no_run_gives_a_file_without_rows(owner: User, read: Any) -> None:
    rows, types = read(b"".join(factories.api(owner).get("/api/v1/runs/parquet")))
    assert rows == [] and "created" in types


@pytest.mark.parametrize("count", [1, 7, 8, 9, 2500])
def test_readers_read_every_type_and_row_group(count: int, read: Any) -> None:
    start = datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
    written = [
        [
            number - 3,
            None if number % 3 == 1 else f'rün {number}\n"=,',
            None if number % 5 == 1 else start + timedelta(days=number),
            math.nan if number % 7 == 1 else -number / 3,
            *[None] * 20,
        ]
        for number in range(count)
    ]
    groups = [written[at : at + 1000] for at in range(0, count, 1000)]
    rows, types = read(b"".join(parquet_file(COLUMNS, groups)))
    assert list(types) == [column.name for column in COLUMNS]
    assert repr([list(row.values()) for row in rows]) == repr(written)


def test_rows_leave_in_groups(
    owner: User, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server never holds the whole table. Needs no reader."""
    monkeypatch.setattr(export, "_BATCH", 1)
    monkeypatch.setattr(export, "_ROW_GROUP", 2)
    parts = list(factories.api(owner).get("/api/v1/runs/parquet"))
    assert len(parts) == 3, "two groups of rows and the footer"
    whole = b"".join(parts)
    assert whole[:4] == whole[-4:] == b"PAR1"
    (size,) = struct.unpack("<I", whole[-8:-4])
    assert len(parts[-1]) == size + 8
