"""The query language: trees, and the position and hint of every error. Needs no database."""

from __future__ import annotations

import pytest

from orchestrator.run_table.columns import ColumnNames, read_columns
from orchestrator.run_table.language import Comparison, Group, Node, QueryError, parse

NAMES = ColumnNames(
    frozenset({"loss", "val_loss", "reward/mean"}),
    frozenset({"train.optimizer.lr", "train.seq_len", "eval.seq_len"}),
)


def written(node: Node | None) -> str:
    """The tree in prefix form."""
    if isinstance(node, Comparison):
        name = f"{node.aggregate}({node.name})" if node.aggregate else node.name
        return f"{name} {node.operator} {'|'.join(value.text for value in node.values)}"
    assert isinstance(node, Group)
    return f"{node.word}[{', '.join(written(part) for part in node.parts)}]"


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        (
            'lr > 1e-4 and val_loss < 2 and model = "llama-15m"',
            "and[lr > 1e-4, val_loss < 2, model = llama-15m]",
        ),
        ("a=1 or b=2 and not c=3", "or[a = 1, and[b = 2, not[c = 3]]]"),
        ("(a=1 or b=2) AND c>=-3", "and[or[a = 1, b = 2], c >= -3]"),
        ("min(val_loss)<1.9", "min(val_loss) < 1.9"),
        ("state in (failed, 'cancelled')", "state in failed|cancelled"),
        ("`my metric` != 2", "my metric != 2"),
        ("reward/mean == 1", "reward/mean = 1"),
        ("name ~ 'a b'", "name ~ a b"),
    ],
)
def test_queries_become_trees(text: str, tree: str) -> None:
    assert written(parse(text)) == tree


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("lr > 1e-4 adn val_loss < 2", 10, "'adn' is not expected here"),
        ("lr >", 4, "a value is expected"),
        ("lr > and", 5, "a value is expected"),
        ("lr 3", 3, "an operator is expected after 'lr'"),
        ("(lr > 3", 0, "this parenthesis is not closed"),
        ('model = "tiny', 8, "this quote is not closed"),
        ("lr > 3 and", 10, "a name is expected, not the end"),
        ("mode(loss) < 2", 0, "'mode' is not an aggregate"),
        ("state in failed", 9, '"(" is expected after "in"'),
        ("a ! b", 2, "'!' is not expected here"),
        ("(" * 40 + "a=1", 21, "the parentheses are nested too deeply"),
    ],
)
def test_errors_name_their_place(text: str, at: int, message: str) -> None:
    with pytest.raises(QueryError) as caught:
        parse(text)
    assert (caught.value.at, caught.value.message) == (at, message)


def test_an_empty_query_selects_everything() -> None:
    assert parse("  ") is None


def test_a_name_may_be_the_last_part_of_a_path() -> None:
    assert NAMES.column("lr").key == "train.optimizer.lr"
    assert NAMES.column("val_loss", "min").key == "min(val_loss)"
    assert NAMES.column("loss").key == "loss"
    assert NAMES.column("config.lr").source == "config"
    with pytest.raises(QueryError, match=r"eval\.seq_len or train\.seq_len"):
        NAMES.column("seq_len")
    with pytest.raises(QueryError) as caught:
        NAMES.column("val_los", at=7)
    assert (caught.value.at, caught.value.hint) == (7, "Use 'val_loss'.")
    with pytest.raises(QueryError, match="one value per run"):
        NAMES.column("lr", "min")


def test_columns_of_a_url() -> None:
    columns, unknown = read_columns("state, max(reward/mean),lr,nothing,lr", NAMES)
    assert [column.key for column in columns] == ["state", "max(reward/mean)", "train.optimizer.lr"]
    assert unknown == ["nothing"]
