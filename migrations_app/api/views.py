"""Migrations over HTTP: `/api/v1/migrations`, and the seed's calls under `/vllm_hi/`."""

from __future__ import annotations

import uuid
from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view, inline_serializer
from rest_framework import mixins, serializers, status, viewsets
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.errors import ApiError, flatten_validation
from migrations_app import selectors, services
from migrations_app.api.serializers import (
    CreateMigrationSerializer,
    EventSerializer,
    JobListSerializer,
    JobSerializer,
    MigrationPairSerializer,
    PreflightSerializer,
    RequestSerializer,
    RoundSerializer,
    SeedMigrateSerializer,
)
from migrations_app.choices import MigrationState
from migrations_app.models import MigrationJob
from migrations_app.preflight import run_preflight
from migrations_app.selection import Selection
from migrations_app.wishes import Wishes

__all__ = ["MigrationViewSet", "SeedMigrateView", "SeedMigrationStatusView"]

#: Events in one answer; a client that gets as many asks again after the last number.
EVENT_PAGE = 500


def _results(name: str, item: type[serializers.BaseSerializer[Any]]) -> Any:
    return inline_serializer(name, {"results": item(many=True)})


@extend_schema_view(
    list=extend_schema(
        parameters=[
            OpenApiParameter("state", enum=MigrationState.values),
            OpenApiParameter("instance", description="vllm_hi_id of the source or the target"),
        ],
        responses=JobListSerializer(many=True),
    )
)
class MigrationViewSet(mixins.ListModelMixin, mixins.RetrieveModelMixin, viewsets.GenericViewSet[MigrationJob]):
    queryset = MigrationJob.objects.all()
    lookup_value_regex = "[0-9a-fA-F-]{36}"

    def get_queryset(self) -> Any:
        if self.action != "list":
            return selectors.list_jobs()
        wanted = {name: self.request.query_params.get(name) for name in ("state", "instance")}
        return selectors.list_jobs(wanted)

    def get_serializer_class(self) -> Any:
        return JobListSerializer if self.action == "list" else JobSerializer

    @extend_schema(request=CreateMigrationSerializer, responses={201: JobSerializer})
    def create(self, request: Request) -> Response:
        """Starts a migration. 404 `unknown_instance`, 400 `same_instance`, 409 when one of them is not ready, 422
        `selection_needs_keep_source_active`."""
        wish = CreateMigrationSerializer(data=request.data)
        wish.is_valid(raise_exception=True)
        try:
            job = services.create_migration(
                wish.validated_data["source"],
                wish.validated_data["target"],
                wish.validated_data["migration_type"],
                request.user,
                mode=wish.validated_data["mode"],
                tn=wish.validated_data["tn"],
                target_tp=wish.validated_data.get("target_tp"),
                target_pp=wish.validated_data.get("target_pp"),
                target_gpu_memory_utilization=wish.validated_data.get("target_gpu_memory_utilization"),
                target_model=wish.validated_data.get("target_model") or "",
                selection=Selection.of(wish.validated_data.get("selection")),
                drain_deadline_s=wish.validated_data.get("drain_deadline_s"),
            )
        except services.MigrationRefused as refusal:
            raise _api_error(refusal) from refusal
        return Response(JobSerializer(selectors.get_job(job.id)).data, status=status.HTTP_201_CREATED)

    @extend_schema(request=MigrationPairSerializer, responses=PreflightSerializer)
    @action(detail=False, methods=["post"])
    def preflight(self, request: Request) -> Response:
        """Compares two instances and predicts what a migration costs. Changes nothing."""
        pair = MigrationPairSerializer(data=request.data)
        pair.is_valid(raise_exception=True)
        try:
            source, target = services.check_pair(pair.validated_data["source"], pair.validated_data["target"])
        except services.MigrationRefused as refusal:
            raise _api_error(refusal) from refusal
        data = pair.validated_data
        wishes = Wishes(
            data.get("target_tp"),
            data.get("target_pp"),
            data.get("target_gpu_memory_utilization"),
            data.get("target_model") or "",
        )
        selection = Selection.of(data.get("selection"))
        deadline = data.get("drain_deadline_s")
        found = run_preflight(source, target, data["mode"], wishes, selection=selection, drain_deadline_s=deadline)
        return Response(found.as_dict())

    @extend_schema(
        parameters=[OpenApiParameter("after", int, description="number of the last event you have")],
        responses=_results("EventPage", EventSerializer),
    )
    @action(detail=True, pagination_class=None)
    def events(self, request: Request, pk: str) -> Response:
        """Events with a number above `after`, at most 500."""
        text = request.query_params.get("after", "0")
        if not text.isdecimal():
            raise ApiError("invalid_request", "after must be the number of an event, 0 or more.", "after", 400)
        events = selectors.events_after(self.get_object(), int(text), EVENT_PAGE)
        return Response({"results": EventSerializer(events, many=True).data})

    @extend_schema(responses=_results("RoundList", RoundSerializer))
    @action(detail=True, pagination_class=None)
    def rounds(self, request: Request, pk: str) -> Response:
        return Response({"results": RoundSerializer(selectors.rounds(self.get_object()), many=True).data})

    @extend_schema(responses=_results("RequestList", RequestSerializer))
    @action(detail=True, pagination_class=None)
    def requests(self, request: Request, pk: str) -> Response:
        return Response({"results": RequestSerializer(selectors.request_rows(self.get_object()), many=True).data})

    @extend_schema(request=None, responses=JobSerializer)
    @action(detail=True, methods=["post"])
    def abort(self, request: Request, pk: str) -> Response:
        """Asks a migration to stop; what has moved by then stays moved."""
        try:
            job = services.request_abort(self.get_object(), request.user)
        except services.MigrationRefused as refusal:
            raise _api_error(refusal) from refusal
        return Response(JobSerializer(selectors.get_job(job.id)).data)


def _api_error(refusal: services.MigrationRefused) -> ApiError:
    return ApiError(refusal.code, refusal.message, refusal.param, refusal.status)


class SeedMigrateView(APIView):
    #: Names of the seed for the fields of a refusal.
    _PARAMS = {"source": "src_vllm_hi_id", "target": "dst_vllm_hi_id"}

    @extend_schema(request=SeedMigrateSerializer, responses=dict[str, Any])
    def post(self, request: Request) -> Response:
        """Starts a migration and answers at once with its result so far."""
        wish = SeedMigrateSerializer(data=request.data)
        if not wish.is_valid():
            problems = flatten_validation(wish.errors)
            message = " ".join(f"{field}: {text}" if field else text for field, text in problems)
            return self._refused(400, "invalid_request", message, problems[0][0])
        data = wish.validated_data
        try:
            job = services.create_migration(
                data["src_vllm_hi_id"],
                data["dst_vllm_hi_id"],
                data["migration_type"],
                request.user,
                mode=data["mode"],
                tn=data["tn"],
                selection=Selection.of(data.get("selection")),
                drain_deadline_s=data.get("drain_deadline_s"),
                target_tp=data.get("target_tp"),
                target_pp=data.get("target_pp"),
                target_gpu_memory_utilization=data.get("target_gpu_memory_utilization"),
                target_model=data.get("target_model") or "",
            )
        except services.MigrationRefused as refusal:
            param = self._PARAMS.get(refusal.param or "", refusal.param)
            return self._refused(refusal.status, refusal.code, refusal.message, param)
        return Response(selectors.seed_status(job))

    def _refused(self, status_code: int, code: str, message: str, param: str | None) -> Response:
        body: dict[str, Any] = {
            "migration_id": None,
            "status": "failed",
            "new_active_instance": None,
            "error": f"{code}: {message}",
            "code": code,
            "param": param,
            "step_history": [],
        }
        return Response(body, status=status_code)


class SeedMigrationStatusView(APIView):
    @extend_schema(responses=dict[str, Any])
    def get(self, request: Request, migration_id: str) -> Response:
        """The migration result so far; 404 `{"error": "migration_not_found"}`."""
        try:
            job = selectors.get_job(uuid.UUID(migration_id))
        except (ValueError, MigrationJob.DoesNotExist):
            return Response({"error": "migration_not_found"}, status=status.HTTP_404_NOT_FOUND)
        return Response(selectors.seed_status(job))
