"""Variables of scripts with a name of a secret, such as HF_TOKEN, are encrypted."""

from __future__ import annotations

from django.apps.registry import Apps
from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

from orchestrator.runs.submission import script_secrets


def encrypt(apps: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    runs = apps.get_model("runs", "Run").objects.using(editor.connection.alias)
    for row in runs.filter(kind="script").only("pk", "spec").iterator():
        spec, values = script_secrets.split(row.spec or {})
        if values:
            rows = apps.get_model("runs", "RunSecret").objects.using(editor.connection.alias)
            script_secrets.store_values(rows, row.pk, values)
            stored = dict.fromkeys(values, script_secrets.reference(row.pk))
            script = {**spec["script"], "secrets": stored}
            runs.filter(pk=row.pk).update(spec={**spec, "script": script})


class Migration(migrations.Migration):
    dependencies = [("runs", "0006_run_secret")]

    operations = [migrations.RunPython(encrypt, migrations.RunPython.noop)]
