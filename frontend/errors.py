"""Errors as HTTP clients see them: OpenAI's error body, with the status and headers that go with it.

Owns: `ApiError`, the body's shape, and how the client library's errors map to it.
Does not know: routes or frameworks.
"""

from __future__ import annotations

from typing import Any

from ..protocol.errors import ColdblockError, ProtocolError, RequestFailed, RequestRefused

RETRY_AFTER_S = 1
_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "invalid_request_error", 503: "service_unavailable"}


class ApiError(Exception):
    """A request that gets an error for an answer. `param` names the field at fault, `code` is for programs."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def headers(self) -> dict[str, str]:
        """The headers that belong to the status."""
        if self.status == 503:
            return {"retry-after": str(RETRY_AFTER_S)}
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None, code: str | None = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def not_supported(what: str, param: str) -> ApiError:
    """A 400 for a known field that is not supported: silence would be worse."""
    return ApiError(400, f"{what} is not supported yet", param=param, code="unsupported_parameter")


def engine_unavailable(reason: str) -> ApiError:
    """A 503: come back soon."""
    return ApiError(503, reason, code="engine_unavailable")


def from_engine(error: ColdblockError) -> ApiError:
    """What an error of the client library means to an HTTP client."""
    if isinstance(error, RequestRefused):
        message = f"{error.field}: {error.value} is not allowed; allowed: {error.allowed}"
        return invalid(message, error.field)
    if isinstance(error, ProtocolError) and error.code == "too_large":
        return invalid(str(error), "prompt", "context_length_exceeded")
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), code="generation_failed")
    return engine_unavailable(str(error))
