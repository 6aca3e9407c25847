"""Bundled scripts and styles, and the chart bundle."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from django.conf import settings
from django.contrib.staticfiles import finders
from django.test import Client

from webui.bundling.finder import files
from webui.bundling.modules import bundle

ROOT = Path(__file__).parents[2]
PLOTLY = ROOT / "webui" / "static" / "plotly"
SOURCES = {
    "page": 'import { text } from "./words.js";\nexport const seen = [text()];\n',
    "words": 'export function text() { return "a"; }\nexport const count = [0];\n',
    "lines": 'import { count } from "./words.js";\ncount[0] += 1;\nexport class Line {}\n',
    "one": 'import { count as n } from "./words.js";\nimport "./lines.js";\n'
    'import { seen } from "./page.js";\nconsole.log(n[0], seen[0]);\n',
    "two": 'import { Line } from "./lines.js";\nimport { count } from "./words.js";\n'
    "console.log(count[0], new Line().constructor.name);\n",
    "plain": "window.early = true;\n",
}


def test_modules_run_once_and_share_their_state(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node")
    for name, text in bundle(SOURCES).items():
        (tmp_path / f"{name}.js").write_text(text)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "all.js").write_text('import "./page.js"; import "./one.js"; import "./two.js";')
    done = subprocess.run([node, "all.js"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "1 a\n1 Line\n", done.stderr


def test_a_page_loads_two_scripts() -> None:
    served = bundle(SOURCES)
    assert served["plain"] == SOURCES["plain"]
    for name in ("one", "two"):
        assert re.findall(r"^import .*", served[name], re.M) == [
            'import { $modules, $use } from "./page.js";'
        ]
    assert "import" not in served["page"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('import all from "./words.js";\n', "x.js, line 1: this form of import"),
        ("\nexport default 1;\n", "x.js, line 2: this form of import, export or await"),
        ("await 1;\n", "x.js, line 1"),
        ('import { lost } from "./words.js";\n', "x.js imports lost from words.js, which does not"),
        ('import "./lost.js";\n', "x.js imports lost.js, which does not exist"),
        ('import "./x.js";\n', "circular import: x → x"),
    ],
)
def test_a_form_that_cannot_be_bundled_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        bundle({**SOURCES, "x": text})


def test_scripts_and_styles_of_a_page_are_bundled_and_compressed() -> None:
    content = files()
    site = content["webui/css/site.css"]
    assert b"--surface" in site and b".button" in site
    for name in ("webui/js/page.js", "webui/css/site.css", "django_htmx/htmx-2.min.js"):
        path = finders.find(name)
        assert Path(path).read_bytes() == content[name]
        assert gzip.decompress(Path(f"{path}.gz").read_bytes()) == content[name]
    answer = Client().get("/static/webui/js/page.js", headers={"Accept-Encoding": "gzip"})
    assert answer["Content-Encoding"] == "gzip" and answer["Vary"] == "Accept-Encoding"
    assert gzip.decompress(answer.getvalue()) == content["webui/js/page.js"]


def test_brotli_is_preferred_to_gzip() -> None:
    brotli = pytest.importorskip("brotli")
    content = files()
    for name in ("webui/js/page.js", "webui/css/site.css"):
        path = Path(finders.find(name))
        short = path.with_name(f"{path.name}.br").read_bytes()
        assert brotli.decompress(short) == content[name]
        assert len(short) < len(path.with_name(f"{path.name}.gz").read_bytes())
        forms = {}
        for accepted, encoding in (("gzip, deflate, br", "br"), ("gzip", "gzip"), ("", None)):
            answer = Client().get(f"/static/{name}", headers={"Accept-Encoding": accepted})
            assert answer.get("Content-Encoding") == encoding
            assert answer["Vary"] == "Accept-Encoding"
            forms[encoding] = answer.getvalue()
        assert forms["br"] == short and forms[None] == content[name]


def test_the_chart_bundle_has_its_forms_licenses_and_traces() -> None:
    known = json.loads((PLOTLY / "bundle.json").read_text())
    for name, digest in known["sha256"].items():
        assert hashlib.sha256((PLOTLY / name).read_bytes()).hexdigest() == digest, name
    script = (PLOTLY / settings.PLOTLY_BUNDLE).read_bytes()
    assert gzip.decompress((PLOTLY / f"{settings.PLOTLY_BUNDLE}.gz").read_bytes()) == script
    assert len((PLOTLY / f"{settings.PLOTLY_BUNDLE}.gz").read_bytes()) < 370_000
    assert b'description:["' not in script  # documentation of attributes, which no page reads
    package = json.loads((ROOT / "tools" / "plotly" / "package.json").read_text())
    assert package["devDependencies"]["plotly.js"] == known["version"]
    assert f"plotly.js {known['version']}" in (PLOTLY / "LICENSES.txt").read_text()


def test_pages_draw_only_traces_of_the_chart_bundle() -> None:
    known = set(json.loads((PLOTLY / "bundle.json").read_text())["traces"])
    of_plotly = (
        r"scatter\w*|bar\w*|box|violin|pie|heatmap|histogram\w*|contour\w*|par(?:coord|cat)s"
    )
    of_plotly += r"|table|image|treemap|sunburst|splom|surface|funnel\w*|waterfall|candlestick"
    for path in (ROOT / "webui" / "static" / "webui" / "js").glob("*.js"):
        used = set(re.findall(rf'\btype: "({of_plotly})"', path.read_text()))
        assert used <= known, f"{path.name} draws {used - known}; add it in tools/plotly"
