"""Stub."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


class VLLMError(Exception): ...


class VLLMClientError(VLLMError): ...


class VLLMServerError(VLLMError): ...


class VLLMValidationError(VLLMClientError):
    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)


class VLLMNotFoundError(VLLMClientError): ...


class GracefulHTTPError(VLLMError):
    def __init__(self, message: str, http_status: HTTPStatus) -> None:
        super().__init__(message)
