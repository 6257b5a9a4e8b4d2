"""The form that starts a migration, for browsers with and without JavaScript."""

from __future__ import annotations

from django import forms

from migrations_app.choices import MigrationType

__all__ = ["MigrateForm"]


class MigrateForm(forms.Form):
    """Checks the shape only. Whether the wish can be fulfilled is for `services.create_migration` to say."""

    target = forms.CharField(max_length=64, error_messages={"required": "Choose the instance to migrate to."})
    migration_type = forms.ChoiceField(
        choices=[
            (MigrationType.PRESERVE_SOURCE.value, MigrationType.PRESERVE_SOURCE.label),
            (MigrationType.DESTROY_SOURCE.value, MigrationType.DESTROY_SOURCE.label),
        ],
        error_messages={"required": "Choose what becomes of the source."},
    )
    tn = forms.IntegerField(min_value=1, max_value=64)
