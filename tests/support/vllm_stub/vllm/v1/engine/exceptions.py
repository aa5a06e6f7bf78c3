"""Stub."""

from vllm.exceptions import VLLMServerError


class EngineGenerateError(VLLMServerError): ...


class EngineDeadError(VLLMServerError): ...
