"""Logging in a program: user name and password for a bearer token."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import authenticate
from drf_spectacular.utils import extend_schema
from knox.models import get_token_model
from rest_framework import serializers, status
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from controlplane.errors import ApiError

__all__ = ["TokenView"]


class CredentialsSerializer(serializers.Serializer[Any]):
    username = serializers.CharField(max_length=150)
    password = serializers.CharField(max_length=1000, trim_whitespace=False)


class TokenSerializer(serializers.Serializer[Any]):
    token = serializers.CharField()
    expiry = serializers.DateTimeField()


class TokenView(APIView):
    # Reached without a login; failed tries count towards the same lockout as the login page.
    authentication_classes: list[Any] = []
    permission_classes = [AllowAny]

    @extend_schema(request=CredentialsSerializer, responses={201: TokenSerializer})
    def post(self, request: Request) -> Response:
        """A new token for `Authorization: Bearer`. It is shown once; only its hash is kept."""
        credentials = CredentialsSerializer(data=request.data)
        credentials.is_valid(raise_exception=True)
        user = authenticate(request._request, **credentials.validated_data)
        if user is None:
            raise ApiError("wrong_credentials", "User name or password is wrong.", None, 401)
        instance, token = get_token_model().objects.create(user=user)
        return Response({"token": token, "expiry": instance.expiry}, status=status.HTTP_201_CREATED)
