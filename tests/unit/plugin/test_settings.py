from __future__ import annotations

import pytest

from vllm_plugin.settings import PluginSettings, migration_requested

BASE = {"VLLM_HI_TYPE": "A", "VLLM_HI_TOKEN": "secret-token", "VLLM_HI_HOST": "127.0.0.1:8002"}


def test_defaults():
    settings = PluginSettings.from_env(BASE)
    assert (settings.instance_type, settings.panel_url, settings.bind) == ("A", "http://127.0.0.1:8002", "127.0.0.1")
    assert (settings.data_port, settings.control_port, settings.transfer_backend) == (0, 0, None)
    assert (settings.max_incr_rounds, settings.incr_stall_rounds, settings.enable_faults) == (8, 2, False)


def test_every_variable_is_read():
    settings = PluginSettings.from_env(
        BASE
        | {
            "VLLM_HI_TYPE": "b",
            "VLLM_HI_DATA_PORT": "9000",
            "VLLM_HI_CONTROL_PORT": "9001",
            "VLLM_HI_BIND": "127.0.0.2",
            "VLLM_HI_TRANSFER_BACKEND": "tcp_shm",
            "VLLM_HI_TRANSFER_MB_PER_S": "200",
            "VLLM_HI_STAGING_MB": "64",
            "VLLM_HI_NAP_US": "500",
            "VLLM_HI_REQUEST_FILTER": "my.filters.Short",
            "VLLM_HI_MAX_INCR_ROUNDS": "3",
            "VLLM_HI_INCR_STALL_ROUNDS": "4",
            "VLLM_HI_ENABLE_FAULTS": "1",
            "VLLM_HI_STANDBY": "cold",
        }
    )
    ports, transfer = (9000, 9001), ("tcp_shm", 200e6, 64 * 1024**2)
    assert settings == PluginSettings(
        "B",
        "127.0.0.1",
        8002,
        "secret-token",
        *ports,
        "127.0.0.2",
        *transfer,
        "my.filters.Short",
        0.0005,
        3,
        4,
        True,
        "cold",
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VLLM_HI_TYPE", "C"),
        ("VLLM_HI_TYPE", ""),
        ("VLLM_HI_TOKEN", ""),
        ("VLLM_HI_HOST", ""),
        ("VLLM_HI_HOST", "127.0.0.1"),
        ("VLLM_HI_HOST", "http://127.0.0.1:8002"),
        ("VLLM_HI_HOST", "127.0.0.1:0"),
        ("VLLM_HI_HOST", "127.0.0.1:65536"),
        ("VLLM_HI_HOST", ":8002"),
        ("VLLM_HI_DATA_PORT", "-1"),
        ("VLLM_HI_DATA_PORT", "70000"),
        ("VLLM_HI_CONTROL_PORT", "x"),
        ("VLLM_HI_BIND", "0.0.0.0"),
        ("VLLM_HI_BIND", "eth0"),
        ("VLLM_HI_TRANSFER_BACKEND", "carrier-pigeon"),
        ("VLLM_HI_TRANSFER_MB_PER_S", "0"),
        ("VLLM_HI_TRANSFER_MB_PER_S", "fast"),
        ("VLLM_HI_STAGING_MB", "-1"),
        ("VLLM_HI_NAP_US", "0.5"),
        ("VLLM_HI_NAP_US", "10001"),
        ("VLLM_HI_REQUEST_FILTER", "Short"),
        ("VLLM_HI_REQUEST_FILTER", "os.system('x')"),
        ("VLLM_HI_MAX_INCR_ROUNDS", "0"),
        ("VLLM_HI_INCR_STALL_ROUNDS", "1.5"),
        ("VLLM_HI_STANDBY", "lukewarm"),
    ],
)
def test_bad_value_names_the_variable(name: str, value: str):
    with pytest.raises(ValueError, match=name):
        PluginSettings.from_env(BASE | {name: value})


@pytest.mark.parametrize(
    ("instance_type", "standby", "kept"),
    [
        ("A", "", False),
        ("A", "warm", False),
        ("A", "cold", True),
        ("B", "", True),
        ("B", "cold", True),
        ("B", "warm", False),
    ],
)
def test_who_has_a_standby_around_its_engine(instance_type: str, standby: str, kept: bool):
    settings = PluginSettings.from_env(BASE | {"VLLM_HI_TYPE": instance_type, "VLLM_HI_STANDBY": standby})
    assert settings.has_standby_process == kept


def test_the_token_is_not_printed():
    assert "secret-token" not in repr(PluginSettings.from_env(BASE))


def test_ipv6_panel():
    settings = PluginSettings.from_env(BASE | {"VLLM_HI_HOST": "[::1]:8002"})
    assert (settings.host, settings.panel_url, settings.bind) == ("::1", "http://[::1]:8002", "::1")


def test_not_requested_without_type():
    assert not migration_requested({"VLLM_HI_HOST": "127.0.0.1:8002"})
    assert migration_requested({"VLLM_HI_TYPE": "B"})
