"""Instances over HTTP: `/api/v1/instances`, and the calls that instances make themselves."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import mixins, viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.errors import ApiError, flatten_validation
from controlplane.permissions import IsInstance, JoinTokenAuthentication
from instances import selectors, services
from instances.api.serializers import (
    HeartbeatSerializer,
    InstanceRequestsSerializer,
    InstanceSerializer,
    RegistrationSerializer,
    SeedInstanceSerializer,
    VllmHiIdSerializer,
)
from instances.client import InstanceClient, InstanceError
from instances.models import Instance

__all__ = ["DeregisterView", "HeartbeatView", "InstanceViewSet", "RegisterView", "SeedInstancesView", "SeedStatusView"]


class InstanceViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, viewsets.GenericViewSet[Instance]):
    queryset = Instance.objects.all()
    serializer_class = InstanceSerializer
    lookup_value_regex = "[A-Za-z0-9_.-]+"

    def get_queryset(self) -> Any:
        # A single instance can be looked up after its end, too: past migrations point at it.
        return selectors.list_instances(include_destroyed=self.action != "list")

    @extend_schema(responses=InstanceRequestsSerializer)
    @action(detail=True, pagination_class=None)
    def requests(self, request: Request, pk: str) -> Response:
        """Requests in flight, asked from the instance now; 502 when it does not answer."""
        instance = self.get_object()
        try:
            with InstanceClient.of(instance) as client:
                return Response({"requests": client.requests()})
        except InstanceError as error:
            raise ApiError(error.code, error.message, None, 502) from error


class _FromInstance(APIView):
    authentication_classes = [JoinTokenAuthentication]
    permission_classes = [IsInstance]


class RegisterView(_FromInstance):
    @extend_schema(request=RegistrationSerializer, responses=dict[str, Any])
    def post(self, request: Request) -> Response:
        """Answers `{success, vllm_hi_id, error}`; 400 names the fields, 409 says why it was refused."""
        serializer = RegistrationSerializer(data=request.data)
        if not serializer.is_valid():
            problems = flatten_validation(serializer.errors)
            return _refused(
                400,
                "invalid_request",
                " ".join(f"{field}: {text}" if field else text for field, text in problems),
                fields=dict(problems),
            )
        data = {name: value for name, value in serializer.validated_data.items() if value is not None}
        try:
            instance = services.register(data)  # type: ignore[arg-type]
        except services.InstanceRefused as refusal:
            return _refused(refusal.status, refusal.code, refusal.message)
        return Response({"success": True, "vllm_hi_id": instance.vllm_hi_id, "error": None})


def _refused(status: int, code: str, message: str, **more: Any) -> Response:
    body = {"success": False, "vllm_hi_id": None, "error": f"{code}: {message}", "code": code, **more}
    return Response(body, status=status)


class HeartbeatView(_FromInstance):
    @extend_schema(request=HeartbeatSerializer, responses=dict[str, Any])
    def post(self, request: Request) -> Response:
        """Answers `{success, known}`; with `known: false` the instance registers again."""
        serializer = HeartbeatSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        known = services.heartbeat(serializer.validated_data)
        return Response({"success": True, "known": known})


class DeregisterView(_FromInstance):
    @extend_schema(request=VllmHiIdSerializer, responses=dict[str, Any])
    def post(self, request: Request) -> Response:
        serializer = VllmHiIdSerializer(data=request.data)
        serializer.is_valid(raise_exception=True)
        return Response({"success": services.deregister(serializer.validated_data["vllm_hi_id"])})


class SeedStatusView(APIView):
    @extend_schema(responses=dict[str, Any])
    def get(self, request: Request) -> Response:
        """`{active, package, role, instances}`."""
        count = selectors.list_instances().count()
        return Response({"active": True, "package": "vllm-hi", "role": "scheduler", "instances": count})


class SeedInstancesView(APIView):
    @extend_schema(responses=SeedInstanceSerializer(many=True))
    def get(self, request: Request) -> Response:
        """A bare list, as programs of the seed expect it."""
        return Response(SeedInstanceSerializer(selectors.list_instances(), many=True).data)
