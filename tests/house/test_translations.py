"""Translation marks in templates, and the English message catalogs."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from django.template import engines
from django.template.loader import get_template
from django.test import Client
from django.utils import translation
from django.utils.translation import trans_real

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "webui" / "templates"
CATALOGS = ROOT / "webui" / "locale" / "en" / "LC_MESSAGES"
ATTRIBUTES = ("title", "aria-label", "placeholder", "alt", "data-label", "data-opens")
# units, formats, names of fields and metrics, letters of buttons, and the product's name
ALLOWED = {"Orrery", "· Orrery", "ms", "s", "x", "MFU", "JSON", "tokens/s", "GiB", "W"}
ALLOWED |= {"kWh", "kg", "UTC", "dp", "B", "I", "H", "loss", "tokens_per_s", "-val_loss"}
ALLOWED |= {
    "train.optimizer.lr",
    "state, model, train.optimizer.lr, min(val_loss)",
    "model = llama-15m and val_loss 2",
}
_TEMPLATE_TAG = r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}"
_HTML_TAG = re.compile(
    rf"""</?[a-zA-Z!](?:{_TEMPLATE_TAG}|"(?:{_TEMPLATE_TAG}|[^"])*"|"""
    rf"""'(?:{_TEMPLATE_TAG}|[^'])*'|[^<>"'])*>""",
    re.DOTALL,
)
_TRANSLATED = re.compile(
    r"\{%\s*blocktranslate.*?\{%\s*endblocktranslate\s*%\}|\{%\s*comment.*?\{%\s*endcomment\s*%\}"
    r"|\{%\s*block body_attributes.*?\{%\s*endblock\s*%\}"
    r"|<(pre|code|kbd|script|style)\b.*?</\1>|<!--.*?-->",
    re.DOTALL,
)


def unmarked(source: str) -> list[str]:
    """Returns visible text and attributes outside of translation tags."""
    source = _TRANSLATED.sub("", source)
    texts = re.split(_TEMPLATE_TAG, _HTML_TAG.sub("{##}", source), flags=re.DOTALL)
    for tag in _HTML_TAG.findall(source):
        for name in ATTRIBUTES:
            value = re.search(rf'\s{name}="((?:{_TEMPLATE_TAG}|[^"])*)"', tag, re.DOTALL)
            texts += re.split(_TEMPLATE_TAG, value[1], flags=re.DOTALL) if value else []
    plain = (" ".join(re.sub(r"&#?\w+;", "", text).split()) for text in texts)
    return [text for text in plain if re.search(r"[A-Za-z]", text) and text not in ALLOWED]


def test_unmarked_text_is_detected() -> None:
    source = '<p title="Hint">Text <b>{% translate "ok" %}</b> {{ name }} more &nbsp;</p>'
    assert unmarked(source) == ["Text", "more", "Hint"]
    assert not unmarked("{% blocktranslate %}Text {{ a }}{% endblocktranslate %} <i>ms</i>")


@pytest.mark.parametrize(
    "path", sorted(TEMPLATES.rglob("*.html")), ids=lambda path: str(path.relative_to(TEMPLATES))
)
def test_template_text_is_marked(path: Path) -> None:
    assert unmarked(path.read_text()) == []


def _messages(catalog: str) -> set[tuple[str, ...]]:
    entries = re.findall(r'^msgid(?:_plural)? ((?:".*"\n)+)', catalog, re.MULTILINE)
    return {tuple(re.findall(r'"(.*)"', entry)) for entry in entries}


@pytest.mark.parametrize("domain", ["django", "djangojs"])
def test_catalog_is_current(tmp_path: Path, domain: str) -> None:
    if not shutil.which("xgettext"):
        assert not os.environ.get("CI"), "CI needs gettext: run tools/system.py"
        pytest.skip("gettext is not installed")
    copy = tmp_path / "webui"
    shutil.copytree(ROOT / "webui", copy, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [
            ROOT / ".venv" / "bin" / "python",
            "-m",
            "django",
            "makemessages",
            "-d",
            domain,
            "-l",
            "en",
            "--add-location",
            "file",
            "--no-wrap",
        ],
        cwd=copy,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "", "PYTHONPATH": ""},
        check=True,
        capture_output=True,
    )
    expected = _messages((copy / "locale" / "en" / "LC_MESSAGES" / f"{domain}.po").read_text())
    assert _messages((CATALOGS / f"{domain}.po").read_text()) == expected, "run make messages"


def test_another_language_changes_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = trans_real.translation("en")
    monkeypatch.setattr(catalog, "gettext", lambda text: f"«{text}»")
    source = (TEMPLATES / "webui" / "planner" / "actions.html").read_text()
    page = engines["django"].from_string(source)  # its texts are looked up once
    context = {"plan": {"run": "{}", "query": "", "mood": "good"}}
    with translation.override("en"):
        assert "«Export»" in page.render(context)
    monkeypatch.undo()
    page = engines["django"].from_string(source)
    with translation.override("en"):
        assert "«" not in page.render(context)


def test_scripts_have_the_texts_of_another_language(client: Client) -> None:
    with translation.override("de"):
        page = get_template("webui/login.html").render({"form": {}})
        assert '<html lang="de">' in page and "/texts.js" in page
    with translation.override("en"):
        assert "/texts.js" not in get_template("webui/login.html").render({"form": {}})
    script = client.get("/texts.js")
    assert script.status_code == 200 and "ngettext" in script.content.decode()


_DISPLAY_CALLS = {"success", "error", "warning", "info", "redirect_with_message"}


@pytest.mark.parametrize(
    "path",
    sorted(path for name in ("views", "tabs") for path in (ROOT / "webui" / name).rglob("*.py")),
    ids=lambda path: path.name,
)
def test_messages_in_views_are_marked(path: Path) -> None:
    """`messages.success(request, "…")` and the like must not receive bare literals."""
    bare = [
        f"{path.name}:{call.lineno}"
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and getattr(call.func, "attr", getattr(call.func, "id", "")) in _DISPLAY_CALLS
        and len(call.args) > 1
        and (
            isinstance(call.args[1], ast.JoinedStr)
            or (isinstance(call.args[1], ast.Constant) and isinstance(call.args[1].value, str))
        )
    ]
    assert not bare
