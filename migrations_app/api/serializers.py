"""What migrations look like in the API and on the websockets."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from migrations_app import selectors
from migrations_app.choices import MAX_DRAIN_DEADLINE_S, HandoverMode, MigrationType
from migrations_app.models import MigrationEvent, MigrationJob, MigrationRequest, MigrationRound
from migrations_app.selection import Selection

__all__ = [
    "CreateMigrationSerializer",
    "EventSerializer",
    "JobSerializer",
    "MigrationPairSerializer",
    "PreflightSerializer",
    "RequestSerializer",
    "RoundSerializer",
    "SeedMigrateSerializer",
    "SelectionSerializer",
]


_POLICY_ERRORS: dict[str, Any] = {
    "invalid_choice": f'There is no policy "{{input}}"; use {", ".join(MigrationType.values)}.'
}


class JobSerializer(serializers.ModelSerializer[MigrationJob]):
    """A job with its derived numbers; `bytes_total` and `gap_*` are null-free only once something moved."""

    source = serializers.CharField(source="source_id", read_only=True)  # type: ignore[assignment]
    target = serializers.CharField(source="target_id", read_only=True)
    new_active_instance = serializers.CharField(source="new_active_instance_id", read_only=True, allow_null=True)
    created_by = serializers.SerializerMethodField()
    state_label = serializers.CharField(source="get_state_display", read_only=True)
    state_tone = serializers.CharField(read_only=True)
    is_terminal = serializers.BooleanField(read_only=True)
    duration_s = serializers.FloatField(read_only=True, allow_null=True)
    bytes_total = serializers.IntegerField(read_only=True)
    round_count = serializers.IntegerField(read_only=True)
    gaps = serializers.SerializerMethodField()

    class Meta:
        model = MigrationJob
        fields = [
            "id", "source", "target", "migration_type", "mode", "selection", "tn", "max_increment_rounds",
            "stall_rounds", "drain_deadline_s", "state", "state_label", "state_tone", "is_terminal", "abort_requested",
            "attempt", "last_seq", "created_by", "created_at", "started_at", "finished_at", "duration_s", "error_code",
            "error", "total_requests", "moved_requests", "bytes_total", "round_count", "gaps", "new_active_instance",
            "preflight",
        ]  # fmt: skip
        read_only_fields = fields

    def get_created_by(self, job: MigrationJob) -> str | None:
        return job.created_by.get_username() if job.created_by else None

    def get_gaps(self, job: MigrationJob) -> dict[str, float | None]:
        """`gap_ms_p50`, `gap_ms_p99` and the same in multiples of the median time between tokens."""
        return selectors.gap_summary(job)


class JobListSerializer(JobSerializer):
    """As in a list: without what costs a query per row or is long."""

    class Meta(JobSerializer.Meta):
        fields = [name for name in JobSerializer.Meta.fields if name not in ("gaps", "preflight")]
        read_only_fields = fields


class EventSerializer(serializers.ModelSerializer[MigrationEvent]):
    class Meta:
        model = MigrationEvent
        fields = [
            "seq", "created_at", "kind", "step", "round_index", "data_size_bytes", "block_count", "message", "data",
        ]  # fmt: skip


class RoundSerializer(serializers.ModelSerializer[MigrationRound]):
    class Meta:
        model = MigrationRound
        fields = [
            "round_index", "kind", "blocks", "bytes", "hit_blocks", "dirty_blocks", "duration_ms", "started_at",
        ]  # fmt: skip


class RequestSerializer(serializers.ModelSerializer[MigrationRequest]):
    outcome_tone = serializers.CharField(read_only=True)

    class Meta:
        model = MigrationRequest
        fields = [
            "request_id", "stream_id", "prompt_tokens", "output_tokens", "kv_blocks", "outcome", "outcome_tone", "way",
            "code", "message", "tail_blocks", "tail_bytes", "gap_ms", "itl_ms", "stages",
        ]  # fmt: skip


class SelectionSerializer(serializers.Serializer[Any]):
    """Which requests move; all conditions must hold. Only with `keep_source_active`."""

    request_ids = serializers.ListField(
        child=serializers.CharField(max_length=255), min_length=1, max_length=1000, required=False, allow_null=True
    )
    min_tokens = serializers.IntegerField(min_value=0, required=False, allow_null=True)
    max_tokens = serializers.IntegerField(min_value=0, required=False, allow_null=True)
    min_age_s = serializers.FloatField(min_value=0, required=False, allow_null=True)
    max_age_s = serializers.FloatField(min_value=0, required=False, allow_null=True)
    min_kv_blocks = serializers.IntegerField(min_value=0, required=False, allow_null=True)
    max_kv_blocks = serializers.IntegerField(min_value=0, required=False, allow_null=True)
    model = serializers.CharField(max_length=255, required=False, allow_null=True)
    api_key = serializers.CharField(max_length=255, required=False, allow_null=True)

    def to_internal_value(self, data: Any) -> Any:
        # A condition with a wrong name would let every request through.
        unknown = sorted(set(data) - set(self.fields)) if isinstance(data, dict) else []
        if unknown:
            known = ", ".join(self.fields)
            raise serializers.ValidationError({unknown[0]: f"There is no such condition; there are {known}."})
        return super().to_internal_value(data)

    def validate(self, attrs: Any) -> Any:
        if (problem := Selection.of(attrs).problem()) is not None:
            raise serializers.ValidationError({problem[0]: problem[1]})
        return attrs


def drain_deadline() -> serializers.FloatField:
    """Null and left out: what the settings say."""
    return serializers.FloatField(min_value=0, max_value=MAX_DRAIN_DEADLINE_S, required=False, allow_null=True)


class MigrationPairSerializer(serializers.Serializer[Any]):
    source = serializers.CharField(max_length=64)  # type: ignore[assignment]
    target = serializers.CharField(max_length=64)
    mode = serializers.ChoiceField(choices=HandoverMode.choices, default=HandoverMode.ROLLING)
    #: Of a target that has no engine yet: how it is brought up. Null: as it was started, else as the source is.
    target_tp = serializers.IntegerField(min_value=1, max_value=1024, required=False, allow_null=True)
    target_pp = serializers.IntegerField(min_value=1, max_value=1024, required=False, allow_null=True)
    target_gpu_memory_utilization = serializers.FloatField(min_value=0, max_value=1, required=False, allow_null=True)
    target_model = serializers.CharField(max_length=255, required=False, allow_blank=True, allow_null=True)
    selection = SelectionSerializer(required=False, allow_null=True)
    drain_deadline_s = drain_deadline()


class CreateMigrationSerializer(MigrationPairSerializer):
    migration_type = serializers.ChoiceField(
        choices=MigrationType.choices, default=MigrationType.PRESERVE_SOURCE, error_messages=_POLICY_ERRORS
    )
    tn = serializers.IntegerField(min_value=1, max_value=100, default=2)


class SeedMigrateSerializer(serializers.Serializer[Any]):
    """Body of `/vllm_hi/migrate`."""

    src_vllm_hi_id = serializers.CharField(max_length=64)
    dst_vllm_hi_id = serializers.CharField(max_length=64)
    target_tp = serializers.IntegerField(min_value=1, max_value=1024, required=False, allow_null=True)
    target_pp = serializers.IntegerField(min_value=1, max_value=1024, required=False, allow_null=True)
    target_gpu_memory_utilization = serializers.FloatField(min_value=0, max_value=1, required=False, allow_null=True)
    target_model = serializers.CharField(max_length=255, required=False, allow_blank=True, allow_null=True)
    migration_type = serializers.ChoiceField(
        choices=MigrationType.choices, default=MigrationType.DESTROY_SOURCE, error_messages=_POLICY_ERRORS
    )
    mode = serializers.ChoiceField(choices=HandoverMode.choices, default=HandoverMode.ROLLING)
    tn = serializers.IntegerField(min_value=1, max_value=100, default=2)
    selection = SelectionSerializer(required=False, allow_null=True)
    drain_deadline_s = drain_deadline()


class CheckSerializer(serializers.Serializer[Any]):
    name = serializers.CharField()
    source_value = serializers.CharField(allow_blank=True)
    target_value = serializers.CharField(allow_blank=True)
    level = serializers.ChoiceField(choices=["ok", "warning", "error"])
    remedy = serializers.CharField(allow_blank=True)


class EstimateSerializer(serializers.Serializer[Any]):
    requests = serializers.IntegerField()
    blocks = serializers.IntegerField()
    bytes = serializers.IntegerField()
    rounds = serializers.IntegerField()
    seconds = serializers.FloatField()
    gap_ms = serializers.FloatField(allow_null=True)
    bytes_per_s = serializers.FloatField()
    dirty_bytes_per_s = serializers.FloatField()
    converges = serializers.BooleanField()


class PreflightSerializer(serializers.Serializer[Any]):
    level = serializers.ChoiceField(choices=["ok", "warning", "error"])
    checks = CheckSerializer(many=True)
    estimate = EstimateSerializer(allow_null=True)
