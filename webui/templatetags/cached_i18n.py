"""Django's `i18n` tags; constant texts are looked up once per language, not at each place.

A page of 50 rows has about 500 of them, a fifth of its CPU time. Templates load it instead of
`i18n`.
"""

from __future__ import annotations

from typing import Any

from django import template
from django.template.base import Parser, Token
from django.template.context import Context
from django.templatetags import i18n
from django.utils.translation import get_language

register = template.Library()
register.tags = dict(i18n.register.tags)
register.filters = dict(i18n.register.filters)


class ConstantText(i18n.TranslateNode):
    """`{% translate "text" %}`: the same text in each rendering in one language."""

    def __init__(self, node: i18n.TranslateNode) -> None:
        super().__init__(node.filter_expression, node.noop, node.asvar, node.message_context)
        self._texts: dict[str | None, Any] = {}

    def render(self, context: Context) -> Any:
        """The text in the active language."""
        language = get_language()
        text = self._texts.get(language)
        if text is None:
            text = self._texts[language] = super().render(context)
        return text


class BlockText(i18n.BlockTranslateNode):
    """`{% blocktranslate %}` that reads its own text once."""

    def __init__(self, node: i18n.BlockTranslateNode) -> None:
        super().__init__(
            node.extra_context,
            node.singular,
            node.plural,
            node.countervar,
            node.counter,
            node.message_context,
            node.trimmed,
            node.asvar,
            getattr(node, "tag_name", "blocktranslate"),
        )
        # of singular and plural, the only lists of tokens that a node has
        self._read: dict[int, tuple[str, list[str]]] = {}

    def render_token_list(self, tokens: list[Token]) -> tuple[str, list[str]]:
        """The message and the names of its variables."""
        read = self._read.get(id(tokens))
        if read is None:
            read = self._read[id(tokens)] = super().render_token_list(tokens)
        message, names = read
        return message, list(names)


@register.tag("translate")
@register.tag("trans")
def translate(parser: Parser, token: Token) -> template.Node:
    """Django's tag."""
    node = i18n.do_translate(parser, token)
    text = node.filter_expression
    constant = not text.is_var or text.var.literal is not None
    if constant and not (text.filters or node.noop or node.asvar or node.message_context):
        return ConstantText(node)
    return node


@register.tag("blocktranslate")
@register.tag("blocktrans")
def blocktranslate(parser: Parser, token: Token) -> template.Node:
    """Django's tag."""
    return BlockText(i18n.do_block_translate(parser, token))
