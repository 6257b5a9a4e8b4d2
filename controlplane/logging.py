"""One line per log record: time, level, logger, message, and the fields given as `extra={"fields": {...}}`."""

from __future__ import annotations

import logging
import time

__all__ = ["LineFormatter"]


class LineFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%Y-%m-%dT%H:%M:%SZ")

    def format(self, record: logging.LogRecord) -> str:
        # A newline from the network must not look like a second record.
        record.message = record.getMessage()
        line = super().format(record)
        fields = getattr(record, "fields", None)
        if isinstance(fields, dict):
            line += " " + " ".join(f"{name}={value!r}" for name, value in fields.items())
        return line
