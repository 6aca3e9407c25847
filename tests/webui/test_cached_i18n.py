"""Texts of templates: cached per language, as Django renders them."""

from __future__ import annotations

import pytest
from django.template import Context, Engine, engines
from django.templatetags import i18n
from django.utils import translation

TEXTS = [
    '{% translate "Runs" %}',
    "{% translate 'Search names, notes, models, tags' %}",
    '{% translate "100 %% of <b>" %}',
    '{% translate name %}{% translate name|lower %}{% translate "Runs" as word %}{{ word }}',
    '{% translate "Runs" noop %}{% translate "Run" context "verb" %}',
    "{% blocktranslate with name=name %}run {{ name }} 5%{% endblocktranslate %}",
    "{% blocktranslate count n=n %}{{ n }} run waits{% plural %}{{ n }} runs wait"
    "{% endblocktranslate %}",
]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_as_django_renders_them(text: str) -> None:
    ours = engines["django"].from_string("{% load cached_i18n %}" + text)
    plain = Engine(libraries={"i18n": "django.templatetags.i18n"})
    theirs = plain.from_string("{% load i18n %}" + text)
    for language in ("en", "de", "en"):
        for n in (1, 2):
            values = {"name": "Runs <i>", "n": n}
            with translation.override(language):
                assert ours.render(dict(values)) == theirs.render(Context(dict(values)))


def test_a_constant_text_is_looked_up_once_per_language(monkeypatch: pytest.MonkeyPatch) -> None:
    page = engines["django"].from_string('{% load cached_i18n %}{% translate "Runs" %}')
    with translation.override("en"):
        assert page.render({}) == "Runs"
        monkeypatch.setattr(i18n.TranslateNode, "render", None)
        assert page.render({}) == "Runs"
    with translation.override("de"), pytest.raises(TypeError):  # a text of its own
        page.render({})
