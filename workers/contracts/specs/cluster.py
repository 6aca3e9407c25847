"""ClusterSpec: the number and kind of devices of a cluster, and their links.

Does not depend on the real fleet; the planner's cluster may be hypothetical.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from workers.contracts.base import Contract
from workers.contracts.catalog.devices import Device, check_device, device
from workers.contracts.specs.model import Degree

Rate = Annotated[float, Field(gt=0)]


class ClusterSpec(Contract):
    """`nodes` x `devices_per_node` devices of one kind.

    Bandwidths are per device and direction, in GB/s (10^9). `host_gib_per_device` is a node's host
    memory per device in GiB, which offloading uses; None: unknown.
    """

    device: Annotated[str, AfterValidator(check_device)] = "cpu"
    nodes: Degree = 1
    devices_per_node: Degree = 1
    intra_node_gb_per_s: Rate | None = None
    inter_node_gb_per_s: Rate | None = None
    usd_per_device_hour: Annotated[float, Field(ge=0)] | None = None
    host_gib_per_device: Rate | None = None

    @property
    def devices(self) -> int:
        """Number of devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def entry(self) -> Device:
        """The catalogue entry of the device."""
        return device(self.device)

    @property
    def intra_gb_per_s(self) -> float:
        """Bandwidth within a node, by default the catalogue's."""
        return self.intra_node_gb_per_s or self.entry.intra_node_gb_per_s

    @property
    def inter_gb_per_s(self) -> float:
        """Bandwidth between nodes, by default the catalogue's."""
        return self.inter_node_gb_per_s or self.entry.inter_node_gb_per_s

    @property
    def usd_per_hour(self) -> float:
        """Price of one device-hour, by default the catalogue's typical price."""
        return (
            self.entry.usd_per_hour
            if self.usd_per_device_hour is None
            else self.usd_per_device_hour
        )
