"""What instances look like in the API, and what they send."""

from __future__ import annotations

import re
from typing import Any

from rest_framework import serializers

from instances.choices import InstanceType
from instances.models import Instance

__all__ = [
    "HeartbeatSerializer",
    "InstanceRequestsSerializer",
    "InstanceSerializer",
    "RegistrationSerializer",
    "SeedInstanceSerializer",
    "VllmHiIdSerializer",
]

_HOST = re.compile(r"^[A-Za-z0-9_.:-]{1,255}$")
_ID = re.compile(r"^[A-Za-z0-9_.-]{1,64}$")


def _adapters() -> serializers.ListField:
    """Names of the LoRA adapters that an instance serves."""
    return serializers.ListField(child=serializers.CharField(max_length=255), max_length=10_000, required=False)


class InstanceSerializer(serializers.ModelSerializer[Instance]):
    base_url = serializers.CharField(read_only=True)
    alias_name = serializers.CharField(read_only=True)
    is_alive = serializers.BooleanField(read_only=True)
    is_busy = serializers.BooleanField(read_only=True)
    state = serializers.CharField(read_only=True)

    class Meta:
        model = Instance
        fields = [
            "vllm_hi_id", "ip", "port", "base_url", "instance_type", "status", "state", "routed", "alias_name",
            "is_alive", "is_busy", "served_model_name", "inference_params", "topology", "data_port", "control_port",
            "protocol_version", "plugin_version", "factors", "capabilities", "kv", "requests", "adapters", "engine",
            "registered_at", "last_heartbeat_at",
        ]  # fmt: skip


class SeedInstanceSerializer(serializers.ModelSerializer[Instance]):
    """The shape of the seed's `/vllm_hi/instances`; `registered_at` is a Unix time."""

    registered_at = serializers.SerializerMethodField()

    class Meta:
        model = Instance
        fields = [
            "vllm_hi_id", "ip", "port", "instance_type", "served_model_name", "inference_params", "status",
            "registered_at", "topology", "data_port",
        ]  # fmt: skip

    def get_registered_at(self, instance: Instance) -> float:
        return instance.registered_at.timestamp()


class RegistrationSerializer(serializers.Serializer[Any]):
    """Body of `/vllm_hi/register`."""

    ip = serializers.CharField(max_length=255)
    port = serializers.IntegerField(min_value=1, max_value=65535)
    instance_type = serializers.ChoiceField(choices=InstanceType.choices)
    served_model_name = serializers.CharField(max_length=255)
    inference_params = serializers.DictField(default=dict)
    topology = serializers.DictField(default=dict)
    data_port = serializers.IntegerField(min_value=0, max_value=65535, default=0)
    vllm_hi_id = serializers.CharField(max_length=64, required=False, allow_blank=True, allow_null=True)
    control_port = serializers.IntegerField(min_value=0, max_value=65535, required=False)
    protocol_version = serializers.IntegerField(min_value=0, required=False)
    plugin_version = serializers.CharField(max_length=64, required=False, allow_blank=True)
    factors = serializers.DictField(required=False)
    capabilities = serializers.DictField(required=False)
    adapters = _adapters()
    engine = serializers.DictField(required=False)
    pid = serializers.IntegerField(min_value=0, required=False, allow_null=True)

    def validate_ip(self, value: str) -> str:
        if not _HOST.match(value):
            raise serializers.ValidationError("Must be an IP address or a host name.")
        return value

    def validate_vllm_hi_id(self, value: str | None) -> str | None:
        if value and not _ID.match(value):
            raise serializers.ValidationError("May hold letters, digits, dot, dash and underscore only.")
        return value


class HeartbeatSerializer(serializers.Serializer[Any]):
    vllm_hi_id = serializers.CharField(max_length=64)
    role = serializers.CharField(max_length=16, required=False)
    role_held_s = serializers.FloatField(min_value=0, required=False)
    kv = serializers.DictField(required=False)
    requests = serializers.DictField(required=False)
    factors = serializers.DictField(required=False)
    adapters = _adapters()
    engine = serializers.DictField(required=False)
    control_port = serializers.IntegerField(min_value=0, max_value=65535, required=False)


class VllmHiIdSerializer(serializers.Serializer[Any]):
    vllm_hi_id = serializers.CharField(max_length=64)


class InstanceRequestsSerializer(serializers.Serializer[Any]):
    """Requests in flight, as the instance itself lists them."""

    requests = serializers.ListField(child=serializers.DictField())
