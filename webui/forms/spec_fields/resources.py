"""Fields of resources, schedule, tags and notes."""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

from webui.forms.spec_fields.field import ANSWERS, TRAINS, F, Section

RESOURCES = Section(
    "resources",
    _("Resources and schedule"),
    _("Devices, priority and time limit."),
    (
        F("resources.devices", _("Devices"), "int", default=_("the plan's world size")),
        F(
            "resources.min_devices",
            _("Minimum devices"),
            "int",
            _(
                "An elastic run continues on fewer devices, at least these, after a node is lost "
                "or for a waiting run. The global batch stays the same."
            ),
            default=_("a fixed number of devices"),
            kinds=("train",),
        ),
        F("resources.pool", _("Pool"), "text", default="default"),
        F("priority", _("Priority"), "int", _("Higher starts first."), default="0"),
        F(
            "resources.max_seconds",
            _("Time limit"),
            "float",
            _("Seconds. The run is stopped after this time."),
            default=_("no limit"),
        ),
    ),
    kinds=(*TRAINS, *ANSWERS, "script"),
    owns=("resources", "priority", "retries"),
    more_title=_("Device, limit and retry options"),
    more=(
        F(
            "resources.device",
            _("Device type"),
            "text",
            _("A catalog name such as h100-80g."),
            default=_("any"),
        ),
        F(
            "resources.image",
            _("Container image"),
            "text",
            _("An image with python3 and torch; runs on nodes with Docker or Apptainer."),
            default=_("none"),
        ),
        F(
            "resources.memory_gb",
            _("Memory limit"),
            "float",
            _("GB per node."),
            default=_("no limit"),
        ),
        F(
            "resources.cpus",
            _("CPU limit"),
            "float",
            _("Cores per node."),
            default=_("no limit"),
        ),
        F(
            "resources.processes",
            _("Process limit"),
            "int",
            _("Processes and threads per node."),
            default=_("no limit"),
        ),
        F(
            "resources.hang_s",
            _("Hang after"),
            "float",
            _("Seconds without progress, after which the run ends as hung; at least 10."),
            default=_("the installation's default"),
            kinds=TRAINS,
        ),
        F(
            "retries.infrastructure",
            _("Retries after infrastructure failures"),
            "int",
            default="5",
        ),
        F("retries.numerics", _("Retries after non-finite values"), "int", default="1"),
        F("retries.out_of_memory", _("Retries after out of memory"), "int", default="0"),
        F("retries.lost", _("Retries after a lost node"), "int", default="10"),
        F("retries.hang", _("Retries after a hang"), "int", default="2"),
        F("retries.user_error", _("Retries after program errors"), "int", default="0"),
    ),
)

NOTES = Section(
    "notes",
    _("Tags and notes"),
    _("Labels for search."),
    (
        F("tags", _("Tags"), "words", _("Separated by commas.")),
        F("notes", _("Notes"), "long", wide=True),
    ),
)
