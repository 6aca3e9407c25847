from django.db import migrations


def clear_default_model(apps, schema_editor):
    """Earlier releases named the default model of specs for programs that Orrery does not know."""
    runs = apps.get_model("runs", "Run").objects.filter(kind__in=("external", "script"))
    for run in runs.filter(model_name="llama-tiny").only("pk", "spec").iterator(chunk_size=500):
        if "model" not in (run.spec or {}):
            runs.filter(pk=run.pk).update(model_name="")


class Migration(migrations.Migration):

    dependencies = [("runs", "0014_data_sets")]

    operations = [migrations.RunPython(clear_default_model, migrations.RunPython.noop)]
