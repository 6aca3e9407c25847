"""Allocations outlive their node: the device is null, and its names are kept."""

import django.db.models.deletion
from django.db import migrations, models


def delete_without_device(apps, schema_editor):
    """On the way back: the earlier table has no rows of removed nodes."""
    apps.get_model("scheduling", "Allocation").objects.filter(device=None).delete()


class Migration(migrations.Migration):
    dependencies = [
        ("fleet", "0008_slow_devices"),
        ("scheduling", "0004_allocation_released"),
    ]

    operations = [
        migrations.AddField(
            model_name="allocation",
            name="device_index",
            field=models.PositiveSmallIntegerField(blank=True, null=True),
        ),
        migrations.AddField(
            model_name="allocation",
            name="node_name",
            field=models.CharField(blank=True, db_default="", default="", max_length=80),
        ),
        migrations.AddField(
            model_name="allocation",
            name="pool_name",
            field=models.CharField(blank=True, db_default="", default="", max_length=80),
        ),
        migrations.AlterField(
            model_name="allocation",
            name="device",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="allocations",
                to="fleet.device",
            ),
        ),
        migrations.RunPython(migrations.RunPython.noop, delete_without_device),
    ]
