"""Adds the id of the server key that a node's secret is derived from."""

from django.conf import settings
from django.db import migrations, models


def set_current_key(apps, schema_editor):
    """Existing nodes joined under the key of this installation."""
    from orchestrator.fleet.selectors import key_id

    joined = apps.get_model("fleet", "Node").objects.exclude(join_token_id="")
    joined.update(join_key_id=key_id(settings.SECRET_KEY))


class Migration(migrations.Migration):

    dependencies = [
        ("fleet", "0002_node_liveness"),
    ]

    operations = [
        migrations.AddField(
            model_name="node",
            name="join_key_id",
            field=models.CharField(blank=True, max_length=16),
        ),
        migrations.RunPython(set_current_key, migrations.RunPython.noop),
    ]
