"""The one error that a migration operation answers with."""

from __future__ import annotations

from typing import Any

__all__ = ["MigrationError"]


class MigrationError(Exception):
    """`status`: HTTP status; `code`: for machines; `message`: one sentence with the remedy; `param`: the field to
    blame."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param

    def as_dict(self) -> dict[str, Any]:
        return {
            "error": {"code": self.code, "message": self.message, "param": self.param, "status": self.status},
        }
