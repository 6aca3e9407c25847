"""Chat templates: a conversation to the text that a model was taught to read.

A template is a stranger's program, so it runs in jinja2's sandbox, with the names that transformers
gives it.
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
    """Raises WeightsError, naming `where`, for a template that is none or that refuses what it is
    given.
    """
    try:
        return _compiled(template).render(**names)
    except jinja2.TemplateSyntaxError as error:
        raise WeightsError(
            f"{where}: its chat template is none: {error}; fetch the model again"
        ) from None
    except Exception as error:  # a template may do anything wrong
        raise WeightsError(
            f"{where}: its chat template refuses: {str(error)[:200]}; mend the messages"
        ) from None


class _Generation(Extension):
    """`{% generation %}` marks what the model itself wrote, for training; here it only holds text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    room = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    room.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    room.globals["raise_exception"] = _refuse
    room.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return room.from_string(template)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
