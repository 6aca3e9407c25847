"""The engine's transforms and their declarations in the contracts agree."""

from __future__ import annotations

from workers.contracts.specs.training_rules.exclusions import EXCLUSIONS
from workers.contracts.specs.training_rules.techniques import TECHNIQUES
from workers.contracts.specs.training_rules.transforms import TRANSFORMS as RULES
from workers.training.parallel.transforms import SHARDING, TRANSFORMS


def test_declared_and_implemented_transforms_are_the_same_in_the_same_order():
    assert list(TRANSFORMS) == [rule.name for rule in RULES]
    assert {rule.name for rule in RULES} >= set(SHARDING)


def test_a_transform_comes_after_those_it_depends_on():
    earlier: set[str] = set()
    for rule in RULES:
        assert set(rule.after) <= earlier, rule.name
        earlier.add(rule.name)


def test_exclusions_name_known_techniques():
    for row in EXCLUSIONS:
        assert set(row.techniques) <= TECHNIQUES.keys(), row.label
    excludes = {rule.name: rule.excludes for rule in RULES}
    assert excludes["compile"] >= {"block_fp8", "pipedream", "split_backward", "quantize_aware"}
    assert excludes["fp8"] == {
        "adapter",
        "pipedream",
        "quantize_aware",
        "reference",
    }
    assert excludes["cast"] == frozenset()
