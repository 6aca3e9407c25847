"""Offloaded optimizers: the same numbers bit for bit, states where they were asked to be, and
disk errors are reported.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from tests.workers.training.conftest import make_spec
from workers.contracts.specs.run import RunSpec
from workers.contracts.specs.train import OptimizerSpec
from workers.contracts.specs.training_support import engine_problems
from workers.metrics.memory import process_memory
from workers.training.offload import Disk, OffloadedOptimizer, copies
from workers.training.offload.disk import BUFFERS
from workers.training.optim import (
    build_optimizer,
    get_master_weights,
    get_optimizer_state,
    release,
    update,
)
from workers.training.setup import trained_module

# no width divides by 2
RAGGED = {
    "name": "ragged",
    "layers": 2,
    "hidden": 40,
    "heads": 4,
    "kv_heads": 1,
    "ffn": 51,
    "vocab": 257,
    "max_seq_len": 32,
}
RULES = {
    "adamw": {"name": "adamw", "lr": 1e-3},
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    "lion": {"name": "lion", "lr": 1e-3, "weight_decay": 0.1},
    "adafactor": {"name": "adafactor", "lr": 3e-2, "weight_decay": 0.1},
    "muon": {"name": "muon", "lr": 2e-2, "scalar_lr": 3e-3},
    "adamw8bit": {"name": "adamw8bit", "lr": 3e-3},
}
BATCH = {"micro_batch_size": 2, "global_batch_size": 4}


def test_an_update_on_the_host_uses_more_threads_and_gives_the_same_numbers(monkeypatch):
    """Ranks have one thread; a rank of a GPU shares the host's cores with those of its node."""
    used: list[int] = []
    for threads in (None, 2):
        torch.manual_seed(1)
        weights = {"w": torch.randn(300, 400, requires_grad=True)}
        weights["w"].grad = torch.randn(300, 400)
        built = build_optimizer(
            weights, OptimizerSpec(), shard_state=False, offload="optimizer", host_threads=threads
        )
        [part] = built.parts
        update_part = part.rule.step
        monkeypatch.setattr(
            part.rule, "step", lambda f=update_part: used.append(torch.get_num_threads()) or f()
        )
        before = torch.get_num_threads()
        built.step()
        assert torch.get_num_threads() == before
        used.append(float(weights["w"].detach().double().sum()))
    assert used == [1, used[1], 2, used[1]]
    monkeypatch.setattr(trained_module.os, "sched_getaffinity", lambda _: range(96))
    assert trained_module._host_threads(torch.device("cuda"), 8) == 12
    assert trained_module._host_threads(torch.device("cuda"), 200) == 1
    assert trained_module._host_threads(torch.device("cpu"), 8) is None


def spec(plan, rule="adamw", steps=6, **more):
    schedule = {"name": "constant", "warmup_steps": 3}
    plan = {**BATCH, **plan}
    return make_spec(
        RAGGED,
        plan,
        steps=steps,
        clip_norm=0.5,
        optimizer=RULES[rule],
        lr_schedule=schedule,
        **more,
    )


def ended(result):
    assert {outcome["class"] for outcome in result.outcomes} == {"ok"}, result.outcomes
    return result


@pytest.fixture(scope="module")
def plain(train, tmp_path_factory):
    """Runs without offloading, each made once."""
    made = {}

    def run(plan, rule):
        key = str((plan, rule))
        if key not in made:
            made[key] = ended(train(spec(plan, rule), tmp_path_factory.mktemp("plain")))
        return made[key]

    return run


# `test_a_device_gets_the_same_weights_back` has every rule in the host's memory and on a disk
ALONE = [
    ("adamw", "optimizer"),
    ("adamw", "all"),
    ("adamw", "nvme"),
    ("sgd", "all"),
    ("lion", "nvme"),
]
ALONE += [("adafactor", "all"), ("muon", "optimizer"), ("adamw8bit", "nvme")]


@pytest.mark.parametrize(("rule", "offload"), ALONE)
def test_one_process_learns_the_same_bit_for_bit(rule, offload, plain, train, tmp_path):
    results = ended(train(spec({"offload": offload}, rule), tmp_path))
    want = plain({}, rule)
    for name in ("loss", "grad_norm"):
        assert results.values(name) == want.values(name), name
    held = {
        name: results.values(f"memory/{name}_bytes")[-1]
        for name in ("params", "grads", "optimizer", "offloaded")
    }
    whole = {
        name: want.values(f"memory/{name}_bytes")[-1] for name in ("params", "grads", "optimizer")
    }
    assert held["optimizer"] == 0
    gone = sum(whole.values()) if offload == "all" else whole["optimizer"]
    # each state begins at a multiple of 64 bytes
    assert gone <= held["offloaded"] <= gone + 64 * 4 * 21
    assert held["params"] == held["grads"] == (0 if offload == "all" else whole["params"])
    assert whole["grads"] == whole["params"], "every parameter has a gradient"
    assert not (tmp_path / "scratch").exists() or not list((tmp_path / "scratch").iterdir())


PLANS = [
    ({"zero": 0, "offload": "optimizer"}, "adamw"),
    ({"zero": 1, "offload": "nvme", "precision": "bf16"}, "lion"),
    ({"zero": 2, "offload": "optimizer"}, "muon"),
    ({"zero": 3, "offload": "all"}, "adamw8bit"),
    ({"zero": 3, "offload": "nvme"}, "adafactor"),
    (
        {"zero": 3, "offload": "nvme", "precision": "fp16", "loss_scale": {"initial": 2.0**20}},
        "adamw",
    ),
]


@pytest.mark.parametrize(("plan", "rule"), PLANS, ids=lambda each: str(each).replace("'", "")[1:60])
def test_two_ranks_learn_the_same_bit_for_bit(plan, rule, plain, train, tmp_path):
    plan = {"dp": 2, **plan}
    results = ended(train(spec(plan, rule), tmp_path))
    want = plain({name: value for name, value in plan.items() if name != "offload"}, rule)
    for name in ("loss", "grad_norm"):
        # of overflows both have infinities
        assert str(results.values(name)) == str(want.values(name)), name
    if "loss_scale" in plan:
        skipped = [event for event in results.events() if event["type"] == "overflow_skipped_step"]
        assert skipped, "the scale must overflow for this test to mean something"
    for rank in (0, 1):
        gone = [
            "optimizer",
            *(["params", "grads"] if plan["zero"] == 3 and plan["offload"] != "optimizer" else []),
        ]
        least = sum(want.values(f"memory/{name}_bytes", rank)[-1] for name in gone)
        assert least <= results.values("memory/offloaded_bytes", rank)[-1] <= least + 64 * 4 * 21


@pytest.mark.parametrize(
    ("before", "after", "rule"),
    [
        ({"offload": "nvme"}, {}, "adamw"),
        ({}, {"offload": "nvme"}, "adafactor"),
        (
            {"dp": 2, "zero": 3, "offload": "nvme"},
            {"dp": 2, "zero": 1, "offload": "optimizer"},
            "muon",
        ),
        ({"dp": 2, "zero": 1, "offload": "nvme"}, {"offload": "all"}, "adamw8bit"),
    ],
    ids=str,
)
def test_checkpoints_hold_the_states_and_load_under_any_other_offload(
    before, after, rule, plain, train, tmp_path
):
    checkpoint = {"every_steps": 3, "async": True}
    ended(train(spec(before, rule, steps=3, checkpoint=checkpoint), tmp_path))
    results = ended(train(spec(after, rule, checkpoint=checkpoint), tmp_path))
    assert "checkpoint_restored" in [event["type"] for event in results.events()]
    want = plain({}, rule).values("loss")
    assert results.values("loss") == (
        want if "dp" not in {**before, **after} else pytest.approx(want, rel=1e-5)
    )


def parameters(count, size):
    generator = torch.Generator().manual_seed(0)
    return {f"w{i}": torch.randn(size, generator=generator).requires_grad_() for i in range(count)}


def stepped(optimizer, given, steps=2):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for each in given.values():
            each.grad = torch.randn(each.shape, generator=generator)
        optimizer.step()
    return [each.detach() for each in given.values()]


def test_states_on_disk_are_not_in_memory(tmp_path):
    """256 MB of states on disk, 3 buffers of 24 MB of them in memory: measured by the process's
    resident memory.
    """
    rule = OptimizerSpec.from_dict(RULES["adamw"])
    ours, theirs = parameters(32, (1000, 1000)), parameters(32, (1000, 1000))
    optimizer = build_optimizer(ours, rule, shard_state=False, offload="nvme", scratch=tmp_path)
    assert isinstance(optimizer, OffloadedOptimizer) and optimizer.disk is not None
    for each in ours.values():
        each.grad = torch.ones_like(each)
    before, _ = process_memory(torch.device("cpu"))
    results = stepped(optimizer, ours)
    after, _ = process_memory(torch.device("cpu"))
    states = 2 * sum(each.nbytes for each in ours.values())
    assert optimizer.disk.bytes >= states == 256_000_000
    assert optimizer.disk.largest * BUFFERS < states / 4
    assert after - before < states / 2, "resident memory grew by what should be on the disk"
    assert os.listdir(tmp_path) == [], (
        "the file has no name, and goes with the process however that ends"
    )
    for one, other in zip(
        results, stepped(build_optimizer(theirs, rule, shard_state=False), theirs), strict=True
    ):
        assert torch.equal(one, other)
    held = get_optimizer_state(optimizer)
    assert all(torch.equal(held[each]["step"], torch.tensor(2.0)) for each in ours.values())
    release(optimizer)
    release(optimizer)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("offload", ["optimizer", "nvme"])
def test_a_device_gets_the_same_weights_back(rule, offload, tmp_path, monkeypatch):
    """Masters apart from weights, as with a GPU, here without one: streams do nothing, copies are
    made at once.
    """

    class Stream:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait_stream(self, other):
            pass

        record_event = synchronize = lambda self: self

    monkeypatch.setattr(copies, "_on_device", lambda tensor: True)
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    traveled = []
    monkeypatch.setattr(
        copies, "_to_host", lambda tensor: traveled.append(tensor.shape) or tensor.clone()
    )
    spec = OptimizerSpec.from_dict(RULES[rule])
    ours, theirs = (
        {f"blocks.{name}": each for name, each in parameters(5, (70, 100)).items()}
        for _ in range(2)
    )
    optimizer = build_optimizer(ours, spec, shard_state=False, offload=offload, scratch=tmp_path)
    assert isinstance(optimizer, OffloadedOptimizer) and len(optimizer.parts) > 2
    plain = build_optimizer(theirs, spec, shard_state=False)
    for turn in range(3):
        if turn == 2:  # someone else writes the weights, as a checkpoint that is read does
            for given in (ours, theirs):
                with torch.no_grad():
                    given["blocks.w1"].mul_(0.5)
        for one, other in zip(stepped(optimizer, ours, 2), stepped(plain, theirs, 2), strict=True):
            assert torch.equal(one, other)
        assert {each: len(entry) for each, entry in get_optimizer_state(optimizer).items()} == {
            ours[name]: len(get_optimizer_state(plain)[each]) for name, each in theirs.items()
        }
    optimizer.zero_grad()
    plain.zero_grad()
    # a backward pass that makes what the update takes; then one whose update is skipped, and one
    # that is added to
    for final, made, skipped, factor in (
        (True, 5, False, 0.5),
        (True, 5, True, 1.0),
        (False, 0, False, 0.25),
    ):
        traveled.clear()
        for given, rule_of in ((ours, optimizer), (theirs, plain)):
            getattr(rule_of, "set_gradients_final", lambda final: None)(final)
            sum(
                (each * (index + turn)).square().sum() for index, each in enumerate(given.values())
            ).backward()
            if rule_of is optimizer:
                assert len(traveled) == (made if offload == "optimizer" else 0), (
                    "during the backward pass"
                )
            if not skipped:
                gradients = [each.grad for each in given.values()]
                update(rule_of, gradients, norm=1.0, limit=None, scale=1 / factor)
            rule_of.zero_grad()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    held = sum(each.nbytes for each in get_master_weights(optimizer))
    assert held == (5 * 70 * 100 * 4 if offload == "optimizer" else 0)
    release(optimizer)


def test_a_full_disk_is_reported_with_what_to_try(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    given = parameters(2, (10, 10))
    optimizer = build_optimizer(
        given,
        OptimizerSpec.from_dict(RULES["adamw"]),
        shard_state=False,
        offload="nvme",
        scratch=tmp_path,
    )
    with pytest.raises(
        OSError, match=r"cannot be reserved.*No space left.*bytes are free.*ORRERY_SCRATCH"
    ) as reported:
        stepped(optimizer, given)
    assert reported.value.errno == errno.ENOSPC and str(tmp_path) in str(reported.value)
    release(optimizer)


@pytest.mark.parametrize(
    ("call", "message"), [("preadv", "cannot be read"), ("pwritev", "cannot be written")]
)
def test_a_failing_disk_is_reported(call, message, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    given = parameters(40, (100, 100))
    optimizer = build_optimizer(
        given,
        OptimizerSpec.from_dict(RULES["adamw"]),
        shard_state=False,
        offload="nvme",
        scratch=tmp_path,
    )
    stepped(optimizer, given, steps=1)
    monkeypatch.setattr(os, call, broken)
    with pytest.raises(
        OSError, match=f"bytes at .*{message}.*Input/output error.*offload optimizer"
    ):
        stepped(optimizer, given, steps=1)
    monkeypatch.undo()
    release(optimizer)


def test_a_folder_that_cannot_be_made_is_reported(train, tmp_path):
    (tmp_path / "file").write_text("")
    result = train(
        spec({"offload": "nvme"}),
        tmp_path / "run",
        ORRERY_SCRATCH=str(tmp_path / "file" / "scratch"),
    )
    [outcome] = result.outcomes
    assert outcome["class"] == "infrastructure"
    assert (
        "a scratch file cannot be created" in outcome["reason"]
        and "ORRERY_SCRATCH" in outcome["reason"]
    )


def test_scratch_goes_where_it_is_reported(tmp_path):
    disk = Disk(tmp_path / "far" / "away")
    extent = disk.reserve(5000)
    buffer = disk.buffer(5000)
    buffer[:5000] = torch.arange(5000).to(torch.uint8)
    disk.write(extent, buffer)
    disk.wait()
    assert torch.equal(disk.read(extent).result()[:5000], torch.arange(5000).to(torch.uint8))
    mapped = disk.mapped(extent)
    mapped[7] = 255
    assert disk.read(extent).result()[7] == 255, "what is written to mapped states counts"
    disk.close()
    assert Path(tmp_path / "far" / "away").is_dir()


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"dp": 2, "zero": 1, "offload": "all"}, "zero 1 replicates them"),
        (
            {"pp": 2, "schedule": "pipedream", "offload": "optimizer", "global_batch_size": 4},
            "after every micro-batch",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(plan, message):
    problems = engine_problems(RunSpec.from_dict(spec(plan)))
    [results] = [each for each in problems if each.field == "plan.offload"]
    assert message in results.message and results.hint
