"""Answers that keep to a form: a JSON schema, a regular expression or a grammar, by masks over the
next token.
"""
