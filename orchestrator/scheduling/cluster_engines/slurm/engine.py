"""Slurm as an engine: sbatch, scancel, sinfo, and per pass one squeue or request to slurmrestd.

Does not depend on the database. A job is identified by its name; Slurm may reuse its number.
"""

from __future__ import annotations

import contextlib
import logging
import pwd
from collections.abc import Collection, Iterable, Mapping
from typing import NoReturn

from orchestrator.fleet.cluster_engines.settings import SlurmSettings
from orchestrator.scheduling.cluster_engines.interface import (
    Capacity,
    EngineUnavailable,
    JobView,
    Order,
    SubmissionDelayed,
    SubmissionRefused,
    SubmissionUnclear,
)
from orchestrator.scheduling.cluster_engines.slurm import parse, reasons, script
from orchestrator.scheduling.cluster_engines.slurm.commands import CommandFailed, Commands, TimedOut
from orchestrator.scheduling.cluster_engines.slurm.rest import RestFailed, SlurmRest

log = logging.getLogger(__name__)
_AT_ONCE = 200  # job numbers per scancel
_FIRST_USER = 1000  # smaller numbers are root and the accounts of services


class Slurm:
    """One Slurm cluster."""

    def __init__(self, settings: SlurmSettings, token: str | None = None) -> None:
        self.settings = settings
        self._commands = Commands(settings)
        self._rest = None
        if settings.rest:
            self._rest = SlurmRest(
                settings.rest,
                user=settings.rest_user,
                token=token,
                timeout_s=settings.timeout_s,
                ca=settings.rest_ca,
            )

    @property
    def problem(self) -> str:
        """Why jobs are read by squeue though slurmrestd is set; else empty."""
        if self._rest is None or not self._rest.problem:
            return ""
        return f"Jobs are read by squeue, because {self._rest.problem}"

    def close(self) -> None:
        """End the connection to slurmrestd."""
        if self._rest is not None:
            self._rest.close()

    def submit(self, order: Order) -> str:
        """The job's number. Raises the interface's Submission errors."""
        words = ["sbatch", *script.options(order, self.settings)]
        if self.settings.identity == "submitter":
            account = _personal_account(order.owner)
            # without the group the job would have that of the control plane: root
            words += [f"--uid={account.pw_name}", f"--gid={account.pw_gid}"]
        try:
            output = self._commands.run(*words, stdin=script.batch_script(order, self.settings))
        except TimedOut as error:
            raise SubmissionUnclear(str(error)) from None
        except EngineUnavailable as error:
            # sbatch also says so if only the answer was lost
            raise SubmissionUnclear(str(error)) from None
        except CommandFailed as error:
            if reasons.is_temporary(error.text):
                raise SubmissionDelayed(error.text) from None
            raise SubmissionRefused(error.text, reasons.refusal_hint(error.text)) from None
        number = output.strip().splitlines()[-1].split(";")[0] if output.strip() else ""
        if not number.isdigit():
            raise SubmissionUnclear(f"sbatch answered {output[:200]!r}")
        return number

    def cancel(self, numbers: Collection[str], *, kill: bool = False) -> None:
        """scancel; SIGTERM, then SIGKILL after Slurm's KillWait, or at once with `kill`."""
        listed = sorted(numbers)
        for start in range(0, len(listed), _AT_ONCE):
            part = listed[start : start + _AT_ONCE]
            if kill:
                self._stop("--full", "--signal=KILL", *part)
            self._stop("--quiet", *part)

    def _stop(self, *words: str) -> None:
        """scancel; an error that does not say that the job has ended is logged."""
        try:
            self._commands.run("scancel", *words)
        except CommandFailed as error:
            lines = error.text.split("; ")
            if failed := [line for line in lines if not reasons.has_ended(line)]:
                log.warning("Jobs may not have been cancelled: %s", "; ".join(failed))

    def watch(self) -> dict[str, JobView]:
        """All of Orrery's jobs that slurmctld remembers, by name."""
        by_name: dict[str, JobView] = {}
        for job in self._jobs():
            before = by_name.get(job.name)
            if before is None or before.phase == "ended":
                by_name[job.name] = job
        return by_name

    def _jobs(self) -> Iterable[JobView]:
        """By slurmrestd if it is set and answers, else by squeue."""
        if self._rest is not None:
            with contextlib.suppress(RestFailed):
                return self._rest.jobs()
        try:
            text = self._commands.run(
                "squeue", "--noheader", "--all", "--states=all", f"--format={parse.SQUEUE_FORMAT}"
            )
        except CommandFailed as error:
            raise EngineUnavailable(error.text) from None
        return parse.jobs(text)

    def lookup(self, *, number: str, name: str) -> JobView | None:
        """By slurmrestd if it is set, scontrol, else by sacct if accounting is configured."""
        if self._rest is not None:
            with contextlib.suppress(RestFailed):
                job = self._rest.job(number) if number else None
                if job is not None and job.name == name:
                    return job
        with contextlib.suppress(CommandFailed):
            fields = parse.job_fields(self._commands.run("scontrol", "show", "job", "-o", number))
            if fields.get("JobName") == name:
                return parse.view(
                    name,
                    number,
                    fields.get("JobState", ""),
                    fields.get("Reason", ""),
                    fields.get("NodeList", ""),
                )
        with contextlib.suppress(CommandFailed, EngineUnavailable):
            words = ("sacct", "-nPX", f"--name={name}", f"--format={parse.SACCT_FORMAT}")
            rows = parse.accounted(self._commands.run(*words, "--starttime=now-7days"))
            if rows:
                return rows[-1]
        return None

    def capacity(self) -> Capacity:
        """By sinfo and scontrol."""
        try:
            version = self._commands.run("sinfo", "--version").split()[-1]  # "slurm-wlm 22.05.8"
            nodes = self._commands.run(
                "sinfo", "--noheader", "--all", f"--format={parse.SINFO_FORMAT}"
            )
            listing = self._commands.run("scontrol", "show", "nodes", "-o")
        except CommandFailed as error:
            _unavailable(error)
        return Capacity(version, tuple(parse.partitions(nodes)), parse.addresses(listing))

    def explain(self, view: JobView, pool: Mapping[str, object]) -> str:
        """Why a pending job waits."""
        sentence = reasons.waiting(view.reason, str(pool.get("partition", "")))
        words = f" (Slurm: {view.reason})" if view.reason else ""
        return f"Job {view.number} waits in Slurm: {sentence}{words}."


def _personal_account(name: str) -> pwd.struct_passwd:
    """Raises SubmissionRefused for a name without a Unix account, or with that of a service."""
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        raise SubmissionRefused(
            f"there is no Unix account {name} on the control plane's machine",
            "Create it as on the cluster, or set the engine's identity to service.",
        ) from None
    if account.pw_uid < _FIRST_USER:
        raise SubmissionRefused(
            f"{name} is the account of the system (uid {account.pw_uid}), and jobs run as people",
            "Submit as another user, or set the engine's identity to service.",
        )
    return account


def _unavailable(error: CommandFailed) -> NoReturn:
    raise EngineUnavailable(error.text)
