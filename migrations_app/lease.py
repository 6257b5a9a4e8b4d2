"""Keeps a running migration's claims alive: the job's own lease and what the instances hold for it.

A thread, because a plugin call may block for longer than a lease lasts.
"""

from __future__ import annotations

import logging
import threading
import uuid
from datetime import timedelta
from types import TracebackType
from typing import Self

from django.conf import settings
from django.db import DatabaseError, connection
from django.utils import timezone

from instances.client import InstanceClient, InstanceError
from instances.models import Instance
from migrations_app.models import MigrationJob

__all__ = ["MISSES", "RECOMPUTE_MISSES", "LeaseKeeper"]

logger = logging.getLogger(__name__)

#: An instance that misses so many renewals in a row is given up. In mode `recompute` the target answers nothing while
#: it computes a long context, for as long as the clients' proxies have patience (30 s).
MISSES = 2
RECOMPUTE_MISSES = 7


class LeaseKeeper:
    """Renews until it is left as a context manager.

    `lost` is set when the job belongs to somebody else by now; `trouble` holds why an instance cannot be kept.
    """

    def __init__(
        self, job_id: uuid.UUID, attempt: int, owner: str, source: Instance, target: Instance, misses: int = MISSES
    ) -> None:
        self.lost = threading.Event()
        self.trouble: InstanceError | None = None
        #: Set by the executor once the session is open on the instances.
        self.session_open = threading.Event()
        self._job_id = job_id
        self._attempt = attempt
        self._owner = owner
        self._source = source
        self._target = target
        self._stop = threading.Event()
        self._allowed = misses
        self._misses = {source.vllm_hi_id: 0, target.vllm_hi_id: 0}
        self._thread = threading.Thread(target=self._run, name=f"lease-{job_id}", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with InstanceClient.of(self._source) as source, InstanceClient.of(self._target) as target:
                while not self._stop.wait(settings.VLLM_HI_JOB_RENEW_S):
                    self._renew_job()
                    if self.session_open.is_set() and not self.lost.is_set():
                        self._renew_session(source)
                        self._watch(target)
        finally:
            connection.close()

    def _renew_job(self) -> None:
        until = timezone.now() + timedelta(seconds=settings.VLLM_HI_JOB_LEASE_S)
        try:
            mine = MigrationJob.objects.live().filter(id=self._job_id, owner=self._owner).update(lease_until=until)
        except DatabaseError:
            # Worth a few more tries: the lease lasts for several of them.
            logger.exception("The lease of migration %s could not be renewed", self._job_id)
            return
        if not mine:
            self.lost.set()

    def _renew_session(self, source: InstanceClient) -> None:
        try:
            source.lease(str(self._job_id), self._attempt, settings.VLLM_HI_SESSION_LEASE_S)
        except InstanceError as error:
            # Leaving the session takes a moment in which the source rightly knows none.
            if self.session_open.is_set():
                self._missed(error)
        else:
            self._misses[source.vllm_hi_id] = 0

    def _watch(self, target: InstanceClient) -> None:
        try:
            target.status()
        except InstanceError as error:
            self._missed(error)
        else:
            self._misses[target.vllm_hi_id] = 0

    def _missed(self, error: InstanceError) -> None:
        self._misses[error.instance] += 1
        logger.warning("Migration %s: %s", self._job_id, error.message)
        if self._misses[error.instance] >= self._allowed:
            self.trouble = error
