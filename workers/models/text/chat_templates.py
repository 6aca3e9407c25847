"""Chat templates: renders a conversation as the text format that a model was trained on.

A template is untrusted code, so it runs in jinja2's sandbox, with the names that transformers
passes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workers.models.errors import WeightsError

# noncharacters of Unicode, which no text contains: bounds of `{% generation %}` when marked
OPEN, CLOSE = "\ufdd0", "\ufdd1"


def render(template: str, names: Mapping[str, Any], *, where: str, marked: bool = False) -> str:
    """The rendered template; with `marked` generated spans are between OPEN and CLOSE.

    Raises WeightsError for an invalid template or refused messages.
    """
    try:
        return _compiled(template, marked).render(**names)
    except jinja2.TemplateSyntaxError as error:
        raise WeightsError(
            f"{where}: its chat template is invalid: {error}; fetch the model again"
        ) from None
    except Exception as error:  # a template may raise anything
        raise WeightsError(
            f"{where}: its chat template refuses: {str(error)[:200]}; correct the messages"
        ) from None


def marks_generation(template: str) -> bool:
    """Whether the template marks what the model generates by `{% generation %}`."""
    return _GENERATION.search(template) is not None


_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


class _Generation(Extension):
    """`{% generation %}`, which marks the model's output for training; here it is plain text."""

    tags = {"generation"}
    bounds: tuple[str, str] | None = None

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tag and its end, with their bounds if requested."""
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if self.bounds is None:
            return body
        before, after = (nodes.Output([nodes.TemplateData(bound)]) for bound in self.bounds)
        return [before, *body, after]


class _MarkedGeneration(_Generation):
    bounds = (OPEN, CLOSE)


@lru_cache(maxsize=16)
def _compiled(template: str, marked: bool) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _MarkedGeneration if marked else _Generation],
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(
        value, ensure_ascii=False, **how
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
