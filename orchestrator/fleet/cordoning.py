"""Creates and lifts cordons of nodes and devices, for operators and for measured faults.

Running attempts continue. Does not judge anything; the callers state cause and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common import clock
from orchestrator.common.errors import Refusal, missing_object
from orchestrator.common.redis import wake_scheduler
from orchestrator.fleet.cordons import has_open_cordon, open_cordons
from orchestrator.fleet.models import Cordon, Device, Node
from orchestrator.fleet.services import publish


def device_get(*, node: Node, index: int | None) -> Device | None:
    """The node's device with this index; None for no index. Raises 404."""
    if index is None:
        return None
    device = Device.objects.filter(node=node, index=index).first()
    if device is None:
        raise missing_object("device", f"{node.name}/{index}")
    return device


def node_cordon(*, node: Node, by: User, device: int | None = None, reason: str = "") -> None:
    """Cordon a node or one of its devices. Raises 403, 404, 409 if it is cordoned already."""
    accounts.require_role(by, Role.OPERATOR, "cordon nodes")
    row = device_get(node=node, index=device)
    cordon = cordon_create(
        node=node, device=row, cause=Cordon.Cause.OPERATOR, reason=reason.strip(), by=by
    )
    if cordon is None:
        raise Refusal(
            "cordoned-already",
            "It is cordoned already",
            409,
            f"{_target(node, row)} has a cordon. Lift it first to state another reason.",
        )


def node_uncordon(*, node: Node, by: User, device: int | None = None) -> None:
    """Lift the cordon of a node or of one of its devices. Raises 403, 404, 409 without one."""
    accounts.require_role(by, Role.OPERATOR, "uncordon nodes")
    row = device_get(node=node, index=device)
    with transaction.atomic():
        matches = Cordon.objects.filter(node=node, device=row, lifted=None).update(
            lifted=clock.now(), lifted_by=by.username
        )
        if not matches:
            raise Refusal(
                "not-cordoned", "It is not cordoned", 409, f"{_target(node, row)} has no cordon."
            )
        accounts.audit(
            actor=by, action="node.uncordon", target=f"node:{node.name}", data=_which(row)
        )
        publish(node)
        wake_scheduler()


def cordon_create(
    *,
    node: Node,
    device: Device | None = None,
    cause: str,
    reason: str,
    data: Mapping[str, Any] | None = None,
    by: User | None = None,
) -> Cordon | None:
    """Cordon it; None if it is cordoned already. `by` None: the control plane."""
    try:
        with transaction.atomic():
            cordon = Cordon.objects.create(
                node=node,
                device=device,
                cause=cause,
                reason=reason[:300],
                data=dict(data or {}),
                created=clock.now(),
                created_by=by.username if by else "",
            )
            accounts.audit(
                actor=by,
                action="node.cordon",
                target=f"node:{node.name}",
                data={**_which(device), "cause": str(cause), "reason": reason[:300]},
            )
            publish(node)
            wake_scheduler()
    except IntegrityError:
        return None
    return cordon


def automatic_limit_reached(node: Node) -> bool:
    """Whether a further automatic cordon of a node would leave too little of the fleet.

    At most ORRERY_LOST_SHARE of the nodes, at least one, and never the last usable node of a pool:
    then the cause is more likely a program or the network than the node.
    """
    automatic = open_cordons(device=None).exclude(cause=Cordon.Cause.OPERATOR).count()
    if automatic >= max(1, int(settings.ENV.lost_share * Node.objects.count())):
        return True
    others = Node.objects.filter(pool_id=node.pool_id, health=Node.Health.UP, drained=False)
    return not others.exclude(pk=node.pk).filter(~has_open_cordon("node")).exists()


def _which(device: Device | None) -> dict[str, Any]:
    return {} if device is None else {"device": device.index}


def _target(node: Node, device: Device | None) -> str:
    return node.name if device is None else f"Device {device.index} of {node.name}"
