"""Keys of serve runs that were stored readable become what they are checked by."""

from __future__ import annotations

from django.apps.registry import Apps
from django.db import migrations
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

from workers.contracts.specs.api_key_hash import hash_key


def hide(apps: Apps, editor: BaseDatabaseSchemaEditor) -> None:
    runs = apps.get_model("runs", "Run").objects.using(editor.connection.alias)
    for run in runs.filter(kind="serve").only("pk", "spec").iterator():
        key = ((run.spec or {}).get("serve") or {}).get("api_key")
        if isinstance(key, str) and key:
            spec = {**run.spec, "serve": {**run.spec["serve"], "api_key": hash_key(key)}}
            runs.filter(pk=run.pk).update(spec=spec)


class Migration(migrations.Migration):
    dependencies = [("runs", "0002_run_rewinds")]

    operations = [migrations.RunPython(hide, migrations.RunPython.noop)]
