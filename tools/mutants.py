"""The mutants of a module: cosmic-ray's, without those that cannot change behavior."""

from __future__ import annotations

import ast
import difflib

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names


def find_mutants(source: str) -> list[tuple[str, int, int]]:
    """`(operator, occurrence, line)` of all mutants that can change behavior."""
    lines = source.splitlines()
    nodes, skipped, results = list(ast_nodes(get_ast(source))), spans_without_effect(source), []
    for name in operator_names():
        operator = get_operator(name)
        if operator.arguments():  # replaces variables that one would have to name
            continue
        places = [place for node in nodes for place in operator().mutation_positions(node)]
        for number, (start, _) in enumerate(places):
            marker = lines[start[0] - 1][start[1] :].startswith("*,")  # of keyword-only parameters
            if not marker and not any(first <= start < last for first, last in skipped):
                results.append((name.removeprefix("core/"), number, start[0]))
    return results


def spans_without_effect(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """`(start, end)` of annotations, options of dataclasses and arguments of log calls."""
    parts: list[ast.expr | ast.keyword | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg | ast.AnnAssign):
            parts.append(node.annotation)
        elif isinstance(node, ast.FunctionDef):
            parts.append(node.returns)
        elif isinstance(node, ast.ClassDef):
            parts += [
                option
                for item in node.decorator_list
                if isinstance(item, ast.Call)
                for option in item.keywords
            ]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
            parts += node.args
    return [
        ((part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0))
        for part in parts
        if part is not None
    ]


def make_mutant(source: str, operator: str, number: int) -> tuple[str | None, str]:
    """The mutated source, None if it does not compile, and its changed lines."""
    code = mutate_code(source, get_operator(f"core/{operator}")(), number)
    try:
        compile(code, operator, "exec")
    except SyntaxError:
        return None, ""
    lines = difflib.unified_diff(source.splitlines(), code.splitlines(), n=0, lineterm="")
    return code, "\n".join(line for line in lines if line[:3] not in ("---", "+++", "@@ "))
