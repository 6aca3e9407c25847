"""Output of Slurm 22.05's commands as recorded, and what is sent to sbatch."""

from __future__ import annotations

import pwd

import pytest

from orchestrator.fleet.cluster_engines.settings import SlurmPool, SlurmSettings
from orchestrator.scheduling.cluster_engines.interface import Order, SubmissionRefused, even_nodes
from orchestrator.scheduling.cluster_engines.slurm import parse, reasons, script
from orchestrator.scheduling.cluster_engines.slurm.commands import Commands
from orchestrator.scheduling.cluster_engines.slurm.engine import Slurm
from workers.contracts.exit_classes import ExitClass
from workers.contracts.wire.cluster_engines.jobs import JobMember, JobTicket

SQUEUE = """\
job.sh|2|PENDING|N/A||None
orrery-7-1-0a1b2c3d|1|RUNNING|2026-11-24T16:51:22|n[1-2]|None
orrery-8-1-1a1b2c3d|3|PENDING|2026-11-24T17:00:00||Resources
orrery-9-2-2a1b2c3d|4|PENDING|N/A||(Nodes required for job are DOWN, DRAINED or reserved for jobs)
orrery-10-1-3a1b2c3d|5|CANCELLED|2026-11-24T16:51:22|n1|None
orrery-11-1-4a1b2c3d|6|COMPLETING|2026-11-24T16:51:22|n1|a|b
"""
SINFO = """\
low|up|2|0/2/0/2|4|1|infinite|(null)
gpu|up|4|1/3/0/4|64|515000|1-12:00:00|gpu:h100:8(S:0-1)
gpu|up|2|0/1/1/2|64|257000|1-12:00:00|gpu:h100:4
closed|down|1|0/0/1/1|4|1|30:00|(null)
"""
NODES = (
    "NodeName=n1 Arch=x86_64 CPUTot=4 Gres=(null) NodeAddr=10.0.0.1 NodeHostName=vm Port=17818\n"
    "NodeName=n2 Arch=x86_64 CPUTot=4 Gres=(null) NodeAddr=10.0.0.2 NodeHostName=vm Port=17819\n"
)
JOB = (
    "JobId=1 JobName=orrery-1-1-abcd UserId=root(0) GroupId=root(0) MCS_label=N/A JobState=FAILED "
    "Reason=NonZeroExitCode Dependency=(null) ExitCode=7:0 Partition=low NodeList=n[1-2] "
    "Comment=orrery run 1 attempt 1 StdErr=/tmp/out.1 Power="
)


def test_squeue_gives_orrerys_jobs_with_hosts_and_whole_reasons() -> None:
    views = {view.number: view for view in parse.jobs(SQUEUE)}
    assert sorted(views) == ["1", "3", "4", "5", "6"]
    assert views["1"].phase == "active" and views["1"].hosts == ("n1", "n2")
    assert views["1"].reason == "" and views["1"].expected_start is None
    assert views["3"].phase == "pending" and views["3"].expected_start is not None
    assert views["4"].reason.startswith("Nodes required for job are DOWN, DRAINED or reserved")
    assert views["5"].phase == "ended" and views["5"].exit_class is ExitClass.CANCELLED
    assert views["6"].phase == "active" and views["6"].reason == "a|b"


def test_a_state_of_a_later_release_concludes_nothing() -> None:
    assert parse.view("orrery-1-1-x", "1", "EXPEDITING").phase == "active"


def test_partitions_merge_lines_and_read_gpus_and_limits() -> None:
    low, gpu, closed = parse.partitions(SINFO)
    assert (low.nodes, low.nodes_idle, low.cpus_per_node, low.limit_s) == (2, 2, 4, None)
    assert (gpu.nodes, gpu.nodes_idle, gpu.gpus_per_node, gpu.gpu_type) == (6, 4, 8, "h100")
    assert gpu.limit_s == 36 * 3600 and gpu.memory_mb == 515000
    assert not closed.up and closed.limit_s == 1800


def test_nodes_and_jobs_of_scontrol() -> None:
    assert parse.addresses(NODES) == {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    fields = parse.job_fields(JOB)
    assert fields["JobName"] == "orrery-1-1-abcd" and fields["JobState"] == "FAILED"
    assert fields["Reason"] == "NonZeroExitCode" and fields["NodeList"] == "n[1-2]"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("n[1-2,07],x3", ["n1", "n2", "n07", "x3"]),
        ("rack[1-2]n[08-10]", [f"rack{r}n{n}" for r in (1, 2) for n in ("08", "09", "10")]),
    ],
)
def test_node_lists(text: str, names: list[str]) -> None:
    assert parse.hostnames(text) == names


def test_reasons_are_sentences_with_slurms_words_known_by_their_start() -> None:
    assert "too few free devices" in reasons.waiting("Resources", "low")
    down = "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher partitions"
    assert "down, drained or reserved" in reasons.waiting(down, "low")
    assert reasons.waiting("NewReason", "low") == "Slurm gives a reason of its own"


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("Batch job submission failed: Invalid partition name specified", "partition"),
        ("invalid account or account/partition combination specified", "account"),
        ("Batch job submission failed: Invalid qos specification", "QOS"),
        ("Invalid --uid specification", "Unix user"),
        ("Batch job submission failed: User's group not permitted to use this partition", "user"),
    ],
)
def test_refusals_have_hints(message: str, word: str) -> None:
    assert word in reasons.refusal_hint(message)
    assert not reasons.is_temporary(message)


def test_devices_are_spread_evenly() -> None:
    assert even_nodes(8, 8) == (1, 8)
    assert even_nodes(12, 8) == (2, 6)
    assert even_nodes(7, 4) == (7, 1)
    assert even_nodes(1, 0) == (1, 1)


def _order(**more: object) -> Order:
    ticket = JobTicket(
        home="$HOME/orrery",
        members=[JobMember(name="hpc.job1.0", secret="ab", redis="redis://x:y@h:1/0")],
    )
    pool = SlurmPool(partition="gpu", account="lab", qos="long", options=["--exclusive"])
    values: dict[str, object] = {
        "name": "orrery-1-1-abcd",
        "run": 1,
        "attempt": 1,
        "owner": "ada",
        "nodes": 2,
        "per_node": 4,
        "gpu": True,
        "ticket": ticket.to_text(),
        "pool": pool.to_dict(),
    }
    return Order(**{**values, **more})  # type: ignore[arg-type]


def test_options_name_pool_devices_and_limits() -> None:
    settings = SlurmSettings(identity="submitter", stop_grace_s=60)
    words = script.options(_order(max_seconds=3600, memory_gb=2.5), settings)
    for word in (
        "--partition=gpu",
        "--account=lab",
        "--qos=long",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gres=gpu:4",
        "--time=66",
        "--mem=2500M",
        "--exclusive",
    ):
        assert word in words, words
    cpu = script.options(_order(gpu=False), SlurmSettings())
    assert "--cpus-per-task=4" in cpu and not any(word.startswith("--gres") for word in cpu)


@pytest.mark.parametrize("identity", ["service", "submitter"])
def test_a_job_has_the_submitters_user_and_group(
    identity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the user alone, its group would be that of the control plane."""
    person = pwd.getpwuid(65534)
    runs: list[tuple[str, ...]] = []

    def run(_: Commands, *words: str, stdin: str) -> str:
        runs.append(words)
        return "7"

    monkeypatch.setattr(Commands, "run", run)
    slurm = Slurm(SlurmSettings.from_dict({"identity": identity}))
    assert slurm.submit(_order(owner=person.pw_name)) == "7"
    given = [word for word in runs[0] if word.startswith(("--uid", "--gid"))]
    own = [f"--uid={person.pw_name}", f"--gid={person.pw_gid}"]
    assert given == (own if identity == "submitter" else [])


@pytest.mark.parametrize(
    ("owner", "message"),
    [("root", "account of the system"), ("no-such-account", "no Unix account")],
)
def test_jobs_run_as_people_only(owner: str, message: str) -> None:
    """Before any command runs: an account of Orrery may have the name of a service."""
    slurm = Slurm(SlurmSettings(identity="submitter", commands="/nonexistent"))
    with pytest.raises(SubmissionRefused, match=message):
        slurm.submit(_order(owner=owner))


def test_the_ticket_survives_the_script() -> None:
    order = _order()
    text = script.batch_script(order, SlurmSettings())
    assert f"={order.ticket}\n" in text and "exec srun" in text
    assert JobTicket.from_text(order.ticket).members[0].name == "hpc.job1.0"


@pytest.mark.parametrize("option", ["-N 3", "--uid=root", "--array=1-9", "exclusive", "--a\nb"])
def test_options_that_orrery_sets_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match="option"):
        SlurmPool.from_dict({"partition": "low", "options": [option]})


def test_settings_cannot_break_out_of_the_script() -> None:
    for bad in ("/tmp/a'b", '/tmp/"; rm', "relative", "/tmp/`id`", "/tmp/$(id)"):
        with pytest.raises(ValueError, match="absolute path"):
            SlurmSettings(home=bad)
