"""One model on two ranks: the same tokens as one process, whatever the attention."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.workers.inference.test_engine import MIXED, SHAPES, finished, model_of, prompts
from workers.contracts.exits import UserError
from workers.inference.build import build
from workers.inference.load import Loaded
from workers.inference.parallel import Team, follow, shard
from workers.inference.scheduler import Limits

TRIED = ("gqa", "mha-learned", "mla", "mfa", "int8")
GIVEN = [(prompt, MIXED[number % len(MIXED)]) for number, prompt in enumerate(prompts(8))]


def main() -> None:
    """A rank of two; rank 0 compares."""
    team = Team()
    for name in TRIED:
        loaded = loaded_of(name)
        shard(loaded.decoder, team)
        if team.rank:
            follow(loaded, team)
        else:
            with team.led():
                engine = build(loaded, blocks=40, limits=Limits(step_tokens=24, sequences=6), team=team)
                together = finished(engine, GIVEN)
            alone = finished(build(loaded_of(name), blocks=40, limits=Limits()), GIVEN)
            assert [each.new_tokens for each in together] == [each.new_tokens for each in alone], name
            print(name, "equal", flush=True)
    team.leave()


def loaded_of(name: str) -> Loaded:
    decoder = model_of(**SHAPES.get(name, {})).requires_grad_(False)
    return Loaded(decoder, None, ()).kept_in("int8" if name == "int8" else None)


def test_two_ranks_give_the_tokens_of_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    around = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __name__], env={**around, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    told = [each.communicate(timeout=240)[0] for each in ranks]
    assert told[0].split() == [word for name in TRIED for word in (name, "equal")]
    assert [each.returncode for each in ranks] == [0, 0]


class Pair:
    rank, size = 0, 2


@pytest.mark.parametrize(
    ("shape", "says"),
    [({"kv_heads": 1}, "has 1 kv_heads, which 2 ranks cannot share"), (SHAPES["moe"], "does not spread experts")],
)
def test_what_ranks_cannot_share_is_refused(shape: dict[str, Any], says: str):
    pair: Any = Pair()
    with pytest.raises(UserError, match=says), torch.no_grad():
        shard(model_of(**shape), pair)


if __name__ == "__main__":
    main()
