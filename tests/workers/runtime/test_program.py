"""An engine command imports torch without garbage collection, and collects garbage afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest

from workers.runtime.program import fast_import


class Node:
    """An object that can be in a reference cycle."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_during_an_import_and_its_objects_are_not_searched_later():
    with fast_import():
        assert not gc.isenabled()
        imported = Node()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
    alive, after = weakref.ref(imported), Node()
    dead = weakref.ref(after)
    del imported, after
    gc.collect()
    assert alive() is not None and dead() is None


def test_a_failed_import_enables_garbage_collection_again():
    with pytest.raises(ModuleNotFoundError), fast_import():
        import workers.no_such_module  # noqa: F401
    assert gc.isenabled()
