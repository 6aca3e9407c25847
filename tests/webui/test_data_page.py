"""The data page and its REST calls: previews by a process, errors, and who may read files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from orchestrator.accounts.models import User
from tests import factories

pytestmark = pytest.mark.django_db
LINES: list[dict[str, Any]] = [
    {"prompt": f"{n}+1=", "completion": f"{n + 1}<b>"} for n in range(20)
]


@pytest.fixture
def client(owner: User) -> Client:
    return factories.client_for(owner)


def write(folder: Path, lines: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "sums.jsonl").write_text(text, encoding="utf-8")


def test_a_file_is_shown_as_the_model_sees_it(client: Client, data_root: Path) -> None:
    write(data_root, [*LINES, LINES[0]])
    page = client.get("/data/", {"path": "sums.jsonl", "seq_len": "64"}).content.decode()
    assert "21 examples" in page and 'class="trained">1</span>' in page
    assert "&lt;</span>" in page, "texts are escaped"
    assert "lines</span>" not in page and "1, 21" in page, "duplicates are named by line"
    assert "data-histogram-values" in page and "<rect" in page


def test_rest_gives_the_same_numbers(client: Client, data_root: Path) -> None:
    write(data_root, LINES)
    assert client.get("/api/v1/data/files").json() == {"items": ["sums.jsonl"]}
    query = {"path": "sums.jsonl", "seq_len": "64", "packing": "false"}
    answer = client.get("/api/v1/data/preview", query).json()
    assert answer["format"] == "prompt_completion" and answer["statistics"]["rows"] == 20
    [document] = answer["samples"][0]["documents"]
    assert document["pieces"][0] == {"use": "read", "tokens": list("0+1=")}
    assert document["pieces"][1] == {"use": "trained", "tokens": [*"1<b>", "^D"]}


def test_bad_lines_and_requests_are_named(client: Client, data_root: Path) -> None:
    write(data_root, [LINES[0], {"prompt": "x", "completion": 3}])
    page = client.get("/data/", {"path": "sums.jsonl"}).content.decode()
    assert "1 line cannot be trained on" in page and "<strong>Line 2</strong>" in page
    for query, message in (
        ({"path": "missing.jsonl"}, "does not exist"),
        ({"path": "/etc/passwd"}, "not under the allowed folders"),
        ({"path": "sums.jsonl", "seq_len": "none"}, "integer"),
        ({"path": "sums.jsonl", "template": "{% if %}"}, "cannot be trained on"),
    ):
        assert message in client.get("/data/", query).content.decode()
    assert client.get("/api/v1/data/preview", {"path": "/etc/passwd"}).status_code == 422


def test_an_empty_folder_names_where_files_belong(client: Client, data_root: Path) -> None:
    assert str(data_root) in client.get("/data/").content.decode()
