"""Orders of operations: those that torch.distributed.pipelining runs, and messages of refusals."""

import pytest
from torch.distributed.pipelining import schedules as theirs

from orchestrator.planner.schedules.orders import (
    Operation,
    device_of_stage,
    device_orders,
    problem_of,
)

CLASSES = {
    "gpipe": theirs.ScheduleGPipe,
    "1f1b": theirs.Schedule1F1B,
    "interleaved_1f1b": theirs.ScheduleInterleaved1F1B,
    "zb1p": theirs.ScheduleInterleavedZeroBubble,
    "zbv": theirs.ScheduleZBVZeroBubble,
    "dualpipev": theirs.ScheduleDualPipeV,
}
KINDS = {
    theirs.FORWARD: "F",
    theirs.FULL_BACKWARD: "B",
    theirs.BACKWARD_INPUT: "I",
    theirs.BACKWARD_WEIGHT: "W",
}
COUNTS = {
    "gpipe": (1,),
    "1f1b": (1,),
    "interleaved_1f1b": (2, 3, 5),
    "zb1p": (2, 3, 5),
    "zbv": (2,),
    "dualpipev": (2,),
}


def torch_orders(name: str, pp: int, v: int, m: int) -> list[list[Operation]]:
    """What torch generates, asked of a schedule object that has the counts but no stages to run."""
    schedule = object.__new__(CLASSES[name])
    rounds = max(1, m // pp)
    vars(schedule).update(
        pp_group_size=pp,
        _n_microbatches=m,
        _num_stages=pp * v,
        num_stages=pp * v,
        n_local_stages=v,
        number_of_rounds=rounds,
        microbatches_per_round=m // rounds,
    )
    if name in ("gpipe", "1f1b"):
        actions = schedule._get_pipeline_order()
    else:
        actions = {
            device: schedule._calculate_single_rank_operations(device) for device in range(pp)
        }
    if name == "zb1p":
        schedule.pipeline_order = actions
        actions = schedule._add_bubbles_to_actions(pp * v)
    return [
        [_operation(a) for a in actions[d] if a and a.computation_type != theirs.REDUCE_GRAD]
        for d in range(pp)
    ]


def _operation(action: theirs._Action) -> Operation:
    if action.sub_actions:
        forward, backward = action.sub_actions
        assert (forward.computation_type, backward.computation_type) == (
            theirs.FORWARD,
            theirs.FULL_BACKWARD,
        )
        return Operation("FB", *forward[::2][:2], *backward[::2][:2])
    return Operation(KINDS[action.computation_type], action.stage_index, action.microbatch_index)


@pytest.mark.parametrize("name", CLASSES)
def test_orders_are_those_of_torch(name):
    compared = 0
    for pp in (1, 2, 3, 4, 5, 8):
        for v in COUNTS[name]:
            for m in range(1, 3 * pp + 4):
                # torch refuses the latter, we run it
                if problem_of(name, pp, v, m) or (name == "1f1b" and m < pp):
                    continue
                expected, ours = torch_orders(name, pp, v, m), device_orders(name, pp, v, m)
                # torch's listing counts the last device's forwards from 1; what it runs does not
                if name == "1f1b":
                    expected[-1] = [
                        o._replace(micro_batch=o.micro_batch - (o.kind == "F"))
                        for o in expected[-1]
                    ]
                assert ours == expected, (pp, v, m)
                compared += 1
    assert compared >= 40


@pytest.mark.parametrize("name", ["naive", "1f1b", "pipedream", "gpipe"])
def test_every_micro_batch_passes_every_stage_once_each_way(name):
    for pp, m in ((1, 1), (4, 1), (4, 3), (3, 7)):
        for device, order in enumerate(device_orders(name, pp, 1, m)):
            for kind in "FB":
                assert [o.micro_batch for o in order if o.kind == kind] == list(range(m))
            assert {o.stage for o in order} == {device}


def test_stages_lie_round_after_round_or_folded():
    assert [device_of_stage("interleaved_1f1b", 3, s) for s in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [device_of_stage("dualpipev", 3, s) for s in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 0, 1, 4), "pp is 0"),
        (("1f1b", 4, 1, 0), "micro-batches is 0"),
        (("gpipe", -2, 1, 4), "pp is -2"),
        (("dualpipev", 4, 2, 7), "at least 2 x pp = 8"),
        (("zbv", 4, 3, 8), "virtual_stages must be 2"),
        (("zb1p", 4, 1, 8), "at least 2"),
        (("1f1b", 4, 2, 8), "interleaved_1f1b"),
        (("interleaved_1f1b", 4, 2, 9), "2 equal rounds"),
        (("spiral", 4, 1, 8), "unknown schedule"),
    ],
)
def test_what_cannot_run_is_refused_in_words(arguments, message):
    with pytest.raises(ValueError, match=message):
        device_orders(*arguments)
