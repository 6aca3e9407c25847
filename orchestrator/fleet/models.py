"""Clusters, engines, pools, nodes, devices and join tokens. `scheduling` assigns devices."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class Cluster(models.Model):
    """A group of nodes with a common network."""

    name = models.CharField(max_length=80, unique=True)

    def __str__(self) -> str:
        return self.name


class Engine(models.Model):
    """A cluster with a scheduler of its own, to which Orrery submits the runs of some pools.

    The pools without engine belong to Orrery's own scheduler and agents.
    """

    class Kind(models.TextChoices):
        """Which program schedules there."""

        SLURM = "slurm", "Slurm"
        KUBERNETES = "kubernetes", "Kubernetes"

    name = models.CharField(max_length=20, unique=True)
    kind = models.CharField(max_length=12, choices=Kind.choices, default=Kind.SLURM)
    settings = models.JSONField(default=dict)  # by kind: cluster_engines.kinds
    # encrypted JSON of the kind's credentials; see `cluster_engines.services`
    credentials = models.TextField(blank=True)
    enabled = models.BooleanField(default=True)
    created = models.DateTimeField(default=timezone.now)
    # {ok, message, time, version, partitions} of the newest contact
    status = models.JSONField(default=dict)

    def __str__(self) -> str:
        return self.name


class Pool(models.Model):
    """A named share of the fleet with its own quota and priority."""

    name = models.CharField(max_length=80, unique=True)
    max_devices_per_user = models.PositiveIntegerField(null=True, blank=True)
    priority = models.IntegerField(default=0)
    # null: Orrery's own scheduler places its runs
    engine = models.ForeignKey(
        Engine, null=True, blank=True, on_delete=models.PROTECT, related_name="pools"
    )
    # by kind of engine: cluster_engines.kinds
    engine_settings = models.JSONField(default=dict, db_default={}, blank=True)

    def __str__(self) -> str:
        return self.name


class Node(models.Model):
    """A machine with an agent."""

    class Health(models.TextChoices):
        """The node's health by the time since its last heartbeat."""

        UP = "up", "up"
        SILENT = "silent", "silent"  # no heartbeat for a while: unknown, not failed
        LOST = "lost", "lost"  # silent beyond the timeout of scheduling

    name = models.CharField(max_length=80, unique=True)
    cluster = models.ForeignKey(Cluster, on_delete=models.PROTECT, related_name="nodes")
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="nodes")
    address = models.CharField(max_length=255)  # for connections from other nodes
    hostname = models.CharField(max_length=255, blank=True)
    health = models.CharField(max_length=8, choices=Health.choices, default=Health.UP)
    drained = models.BooleanField(default=False)
    drain_reason = models.CharField(max_length=200, blank=True)
    # path in the cluster's tree of switches: row-1/rack-3; empty: unknown
    topology = models.CharField(max_length=200, blank=True, default="", db_default="")
    inventory = models.JSONField(default=dict)  # contract NodeInventory
    sample = models.JSONField(default=dict)  # newest device samples, from the last heartbeat
    # the secret is derived from token id and nonces, not stored
    join_token_id = models.CharField(max_length=32, blank=True)
    join_nonces = models.CharField(max_length=140, blank=True)
    # which server key the secret is derived from, see `selectors.key_id`
    join_key_id = models.CharField(max_length=16, blank=True, db_default="")
    joined = models.DateTimeField(default=timezone.now)
    last_heartbeat = models.DateTimeField(null=True, blank=True)
    # this node's clock minus the control plane's, from the newest heartbeat
    clock_skew_s = models.FloatField(default=0.0, db_default=0.0)
    # of the agent, from the newest heartbeat or the join; see `workers.contracts.wire.versions`
    release = models.CharField(max_length=40, default="0.1", db_default="0.1")
    wire = models.CharField(max_length=16, default="1.0", db_default="1.0")
    lost_at = models.DateTimeField(null=True, blank=True)
    # overdue, but too many nodes are: an operator must confirm that it is lost
    loss_held = models.BooleanField(default=False, db_default=False)
    loss_confirmed = models.BooleanField(default=False, db_default=False)

    def __str__(self) -> str:
        return self.name


class Device(models.Model):
    """One accelerator, or one CPU slot of a node without accelerators."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="devices")
    index = models.PositiveSmallIntegerField()
    kind = models.CharField(max_length=8)  # gpu | cpu
    name = models.CharField(max_length=120)
    # name in the device catalogue: h100-80g, cpu, ...
    catalogue = models.CharField(max_length=40, blank=True)
    memory_bytes = models.BigIntegerField(default=0)
    uuid = models.CharField(max_length=80, blank=True)
    healthy = models.BooleanField(default=True)
    # why it is not healthy
    problem = models.CharField(max_length=200, blank=True, db_default="")
    # the newest gang that waited for it: {time, run, attempt, rank, late_s, share, runs}
    slow = models.JSONField(null=True, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["node", "index"], name="device_node_index")]

    def __str__(self) -> str:
        return f"{self.node_id}/{self.index}"


class Cordon(models.Model):
    """A node, or one device of it, that gets no work until an operator lifts the cordon.

    The control plane creates one with the measured cause, an operator with a reason.
    """

    class Cause(models.TextChoices):
        """Why it exists."""

        OPERATOR = "operator", "operator"
        FAILURES = "failures", "failures"  # attempts failed on the node in a row
        SLOW = "slow", "slow"  # gangs of several runs waited for the device
        PREFLIGHT = "preflight", "preflight"  # a probe before an attempt was below the record

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="cordons")
    device = models.ForeignKey(  # null: the whole node
        Device, null=True, blank=True, on_delete=models.CASCADE, related_name="cordons"
    )
    cause = models.CharField(max_length=12, choices=Cause.choices)
    reason = models.CharField(max_length=300, blank=True)
    data = models.JSONField(default=dict)  # measured numbers
    created = models.DateTimeField(default=timezone.now)
    created_by = models.CharField(max_length=150, blank=True)  # empty: the control plane
    lifted = models.DateTimeField(null=True, blank=True)
    lifted_by = models.CharField(max_length=150, blank=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["node"],
                condition=models.Q(device__isnull=True, lifted__isnull=True),
                name="cordon_node_once",
            ),
            models.UniqueConstraint(
                fields=["device"],
                condition=models.Q(device__isnull=False, lifted__isnull=True),
                name="cordon_device_once",
            ),
        ]
        indexes = [models.Index(fields=["node", "-id"], name="cordon_node")]

    def __str__(self) -> str:
        return f"{self.node_id}/{self.device_id}: {self.cause}"


class ProbeResult(models.Model):
    """A rate that a preflight probe measured on a node; the record of later probes."""

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="probes")
    time = models.DateTimeField(default=timezone.now)
    run = models.BigIntegerField()
    attempt = models.PositiveIntegerField()
    measure = models.CharField(max_length=20)  # contracts Measure
    device = models.PositiveSmallIntegerField(null=True)  # null: a collective
    ranks = models.PositiveIntegerField()
    value = models.FloatField()  # operations or bytes per second
    ok = models.BooleanField(default=True)  # not below the record

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["node", "run", "attempt", "measure", "device"],
                condition=models.Q(device__isnull=False),
                name="probe_device_once",
            ),
            models.UniqueConstraint(
                fields=["node", "run", "attempt", "measure"],
                condition=models.Q(device__isnull=True),
                name="probe_collective_once",
            ),
        ]
        indexes = [models.Index(fields=["node", "-time"], name="probe_node")]

    def __str__(self) -> str:
        return f"{self.node_id} {self.measure} {self.value:.3g}"


class NodeProbe(models.Model):
    """What a probe of an idle node measured for the planner: the newest of a day, or a refusal."""

    class State(models.TextChoices):
        """Of the request."""

        REQUESTED = "requested", "requested"
        DONE = "done", "done"
        FAILED = "failed", "failed"  # refused, interrupted, or the node did not answer

    node = models.ForeignKey(Node, on_delete=models.CASCADE, related_name="node_probes")
    day = models.DateField()
    state = models.CharField(max_length=10, choices=State.choices)
    requested = models.DateTimeField(default=timezone.now)
    requested_by = models.CharField(max_length=150, blank=True)  # empty: the control plane
    time = models.DateTimeField(null=True, blank=True)  # of the result in `report`
    message = models.CharField(max_length=500, blank=True)  # why the newest request failed
    report = models.JSONField(default=dict)  # contract NodeProbeReport; {}: no result
    # the planner's parameters: {device: Device as data, calibration: document}
    parameters = models.JSONField(default=dict)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["node", "day"], name="node_probe_day")]

    def __str__(self) -> str:
        return f"{self.node_id} {self.day}: {self.state}"


class EngineMember(models.Model):
    """The identity of a supervisor in a job of an engine; its secret is derived as a node's is."""

    name = models.CharField(max_length=80, unique=True)
    engine = models.ForeignKey(Engine, on_delete=models.CASCADE, related_name="members")
    attempt_id = models.BigIntegerField(db_index=True)
    nonces = models.CharField(max_length=140)
    key_id = models.CharField(max_length=16)
    created = models.DateTimeField(default=timezone.now)
    # its attempt has ended; late telemetry is accepted for a day
    ended = models.DateTimeField(null=True, blank=True)

    clock_skew_s = 0.0  # not measured: it sends no heartbeats

    class Meta:
        indexes = [models.Index(fields=["ended"], name="engine_member_ended")]

    def __str__(self) -> str:
        return self.name


class JoinToken(models.Model):
    """Lets one node join, once. Its key is derived from the server's secret and never stored."""

    id = models.CharField(max_length=32, primary_key=True)
    pool = models.ForeignKey(Pool, on_delete=models.PROTECT, related_name="+")
    created = models.DateTimeField(default=timezone.now)
    created_by = models.CharField(max_length=150, blank=True)
    expires = models.DateTimeField()
    used = models.DateTimeField(null=True, blank=True)
    node = models.ForeignKey(
        Node, null=True, blank=True, on_delete=models.SET_NULL, related_name="+"
    )

    def __str__(self) -> str:
        return self.id
