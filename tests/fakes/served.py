"""A proxy worker for a real ASGI server: `python -m daphne tests.fakes.served:application`."""

from __future__ import annotations

import os

from proxy.app import create_proxy
from proxy.settings import ProxySettings

application = create_proxy(
    ProxySettings(
        redis_url=os.environ["REDIS_URL"],
        join_token=os.environ["VLLM_HI_TOKEN"],
        worker_id=os.environ["WORKER_ID"],
        poll_s=0.05,
    )
)
