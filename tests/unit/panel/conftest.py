from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from knox.models import get_token_model
from rest_framework.test import APIClient

from controlplane.redis import connection
from vllm_plugin.wire import PROTOCOL_VERSION

JOIN_TOKEN = "join-token-for-tests"


@pytest.fixture(autouse=True)
def clean_redis() -> Iterator[None]:
    """The tests' own database of a real Redis, empty."""
    connection().flushdb()
    yield
    connection().flushdb()


@pytest.fixture
def viewer(db: None) -> User:
    user = User.objects.create_user("vera", password="a-long-password")
    user.groups.add(Group.objects.get(name="viewer"))
    return user


@pytest.fixture
def operator(db: None) -> User:
    user = User.objects.create_user("otto", password="a-long-password")
    user.groups.add(Group.objects.get(name="operator"))
    return user


def bearer(user: User) -> APIClient:
    client = APIClient()
    _, token = get_token_model().objects.create(user=user)
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {token}")
    return client


@pytest.fixture
def operator_api(operator: User) -> APIClient:
    return bearer(operator)


@pytest.fixture
def viewer_api(viewer: User) -> APIClient:
    return bearer(viewer)


@pytest.fixture
def anonymous_api(db: None) -> APIClient:
    return APIClient()


@pytest.fixture
def instance_api(db: None) -> APIClient:
    """Speaks as an instance."""
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {JOIN_TOKEN}")
    return client


@pytest.fixture
def registration() -> dict[str, Any]:
    return {
        "ip": "127.0.0.1",
        "port": 8000,
        "instance_type": "A",
        "served_model_name": "smollm2",
        "inference_params": {"max_model_len": 2048},
        "topology": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "data_port": 9000,
        "control_port": 9100,
        "protocol_version": PROTOCOL_VERSION,
        "plugin_version": "0.1.0",
        "factors": {"dtype": "float32"},
        "capabilities": {"supported": True, "missing_probes": []},
        "pid": 4711,
    }
