"""The chat template of models without one: role names on lines of their own, no special tokens.

`### user` and a line break start a turn; the assistant's turn ends with the end-of-text token. Does
not depend on a tokenizer.
"""

from __future__ import annotations

DEFAULT_TEMPLATE = """\
{%- if tools -%}
{{- '### tools\\n' + (tools | tojson) + '\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '### ' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '### call\\n' + (call | tojson) -}}
{%- endfor -%}
{{- eos_token -}}
{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- message.content + '\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '### assistant\\n' -}}
{%- endif -%}
"""
# models of raw bytes: ASCII's end of transmission ends a turn, one byte that texts do not contain
BYTES_END = "\x04"
BYTES_END_ID = 4
# the end-of-text tokens of published tokenizers, in the order of preference
END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|end▁of▁sentence|>",
    "[SEP]",
)
