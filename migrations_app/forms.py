"""The form that starts a migration, for browsers with and without JavaScript."""

from __future__ import annotations

from django import forms

from migrations_app.choices import MAX_DRAIN_DEADLINE_S, HandoverMode, MigrationType

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
    mode = forms.ChoiceField(choices=HandoverMode.choices, initial=HandoverMode.ROLLING, required=False)
    tn = forms.IntegerField(min_value=1, max_value=64)
    drain_deadline_s = forms.FloatField(min_value=0, max_value=MAX_DRAIN_DEADLINE_S, required=False)

    def clean_mode(self) -> str:
        """Programs that know nothing of modes leave it out."""
        return str(self.cleaned_data["mode"] or HandoverMode.ROLLING)
