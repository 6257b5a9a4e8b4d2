"""The form that starts a migration, for browsers with and without JavaScript."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from django import forms

from migrations_app.choices import MAX_DRAIN_DEADLINE_S, HandoverMode, MigrationType
from migrations_app.selection import Selection

__all__ = ["MigrateForm"]

SELECTION_FIELDS = frozenset(field.name for field in fields(Selection))


class MigrateForm(forms.Form):
    """Checks the shape only. Whether the wish can be fulfilled is for `services.create_migration` to say."""

    target = forms.CharField(max_length=64, error_messages={"required": "Choose the instance to migrate to."})
    migration_type = forms.ChoiceField(
        choices=MigrationType.choices,
        error_messages={"required": "Choose what becomes of the source."},
    )
    mode = forms.ChoiceField(choices=HandoverMode.choices, initial=HandoverMode.ROLLING, required=False)
    tn = forms.IntegerField(min_value=1, max_value=64)
    drain_deadline_s = forms.FloatField(min_value=0, max_value=MAX_DRAIN_DEADLINE_S, required=False)
    #: Of a target that has no engine yet.
    target_tp = forms.IntegerField(min_value=1, max_value=1024, required=False)
    target_pp = forms.IntegerField(min_value=1, max_value=1024, required=False)
    target_gpu_memory_utilization = forms.FloatField(min_value=0, max_value=1, required=False)
    # The selection: what is left empty does not matter.
    min_tokens = forms.IntegerField(min_value=0, required=False, label="Tokens, at least")
    max_tokens = forms.IntegerField(min_value=0, required=False, label="Tokens, at most")
    min_age_s = forms.FloatField(min_value=0, required=False, label="Seconds old, at least")
    max_age_s = forms.FloatField(min_value=0, required=False, label="Seconds old, at most")
    min_kv_blocks = forms.IntegerField(min_value=0, required=False, label="KV blocks, at least")
    max_kv_blocks = forms.IntegerField(min_value=0, required=False, label="KV blocks, at most")
    model = forms.CharField(max_length=255, required=False, label="Model or adapter")
    api_key = forms.CharField(max_length=255, required=False, label="API key (its id)")
    request_ids = forms.CharField(required=False, label="Request ids, separated by spaces")

    def clean_mode(self) -> str:
        """Programs that know nothing of modes leave it out."""
        return str(self.cleaned_data["mode"] or HandoverMode.ROLLING)

    def clean_request_ids(self) -> list[str] | None:
        """Ids that are separated by spaces, commas or lines."""
        ids = str(self.cleaned_data["request_ids"]).replace(",", " ").split()
        return ids or None

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        if not self.errors and (problem := self.selection().problem()) is not None:
            self.add_error(*problem)
        return cleaned

    def selection_fields(self) -> list[forms.BoundField]:
        return [self[name] for name in self.fields if name in SELECTION_FIELDS]

    def selection(self) -> Selection:
        """Which requests the operator has chosen."""
        values = {name: self.cleaned_data.get(name) for name in SELECTION_FIELDS}
        return Selection.of({name: None if value == "" else value for name, value in values.items()})
