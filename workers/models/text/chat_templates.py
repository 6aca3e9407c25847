"""Chat templates: renders a conversation as the text format that a model was trained on.

A template is untrusted code, so it runs in jinja2's sandbox, with the names that transformers
passes.
"""

from __future__ import annotations

import json
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


def render(template: str, names: Mapping[str, Any], *, where: str) -> str:
    """The rendered template. Raises WeightsError for an invalid template or refused messages."""
    try:
        return _compiled(template).render(**names)
    except jinja2.TemplateSyntaxError as error:
        raise WeightsError(
            f"{where}: its chat template is invalid: {error}; fetch the model again"
        ) from None
    except Exception as error:  # a template may raise anything
        raise WeightsError(
            f"{where}: its chat template refuses: {str(error)[:200]}; correct the messages"
        ) from None


class _Generation(Extension):
    """`{% generation %}`, which marks the model's output for training; here it is plain text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tag and its end."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(
        value, ensure_ascii=False, **how
    )
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
