"""What happens around each call: errors become rich statuses, calls are counted and traced."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.context import attach
from opentelemetry.propagate import extract, inject
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvist import _core, errors, names, telemetry
from kvist.grpc.limits import CallLimits

_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


class ServerCalls(grpc.aio.ServerInterceptor):
    """Guards, counts, times and traces the calls of a server, and turns exceptions into rich statuses.

    With rules, a call that the role in its caller's certificate may not make is refused before its handler begins.

    An error of the catalogue keeps its code and text. Any other exception is a fault: it is logged with its traceback,
    and the caller sees `INTERNAL` without the text.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        rules: _core.DoorRules | None = None,
        limits: CallLimits | None = None,
    ) -> None:
        self._rules = rules
        self._limits = limits
        self._log = telemetry.logger("kvist.grpc")
        self._tracer = trace.get_tracer("kvist.grpc")
        self._calls = Counter(names.GRPC_SERVER_CALLS, "Calls that ended.", ["method", "code"], registry=registry)
        self._durations = Histogram(
            names.GRPC_SERVER_CALL_DURATION,
            "Duration of calls that ended.",
            ["method"],
            buckets=_BUCKETS_SECONDS,
            registry=registry,
        )
        self._active = Gauge(names.GRPC_SERVER_ACTIVE_CALLS, "Calls that run.", ["method"], registry=registry)

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Wraps the handler of a call."""
        handler = await continuation(handler_call_details)
        if handler is None:  # An unknown method: the server answers UNIMPLEMENTED.
            return handler
        method = handler_call_details.method.removeprefix("/")
        metadata = {
            key: value for key, value in handler_call_details.invocation_metadata or () if isinstance(value, str)
        }
        behaviour: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def unary(request: Any, context: Any) -> Any:
            async with self._call(method, metadata, context):
                return await behaviour(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._call(method, metadata, context):
                result = behaviour(request, context)
                if hasattr(result, "__aiter__"):
                    # Closed with the call: a handler whose client has gone ends now and not when it is collected.
                    async with aclosing(result):
                        async for response in result:
                            yield response
                else:  # A handler that writes to its context.
                    await result

        make: Any = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[bool(handler.request_streaming), bool(handler.response_streaming)]
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(
            stream if handler.response_streaming else unary,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return wrapped

    @asynccontextmanager
    async def _call(self, method: str, metadata: dict[str, str], context: Any) -> AsyncIterator[None]:
        started = time.monotonic()
        code = "CANCELLED"
        active = self._active.labels(method)
        active.inc()
        span = self._tracer.start_span(
            method,
            context=extract(metadata),
            kind=trace.SpanKind.SERVER,
            attributes={names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: method},
        )
        # Never detached: each call has a task, and with it a context, of its own. A stream whose client hangs up is
        # closed from another one, where detaching would fail.
        attach(trace.set_span_in_context(span))
        try:
            self._check(method, context)
            # After the check: whoever may not call uses up nobody's share.
            with self._limits.call(method, _host(context.peer())) if self._limits else nullcontext():
                yield
            code = "OK"
        except errors.KvistError as failure:
            code = failure.entry.grpc
            span.set_attribute(names.ERROR_TYPE, failure.code)
            if code == "INTERNAL":
                self._log.exception("grpc_call_failed", method=method)
            if code == "PERMISSION_DENIED":
                self._log.warning("call_refused", method=method, reason=failure.message)
            await errors.abort(context, failure)
        except grpc.aio.AbortError:
            set_code = context.code()
            code = set_code.name if isinstance(set_code, grpc.StatusCode) else "UNKNOWN"
            raise
        except NotImplementedError:
            code = "UNIMPLEMENTED"
            await errors.abort(context, errors.UnsupportedError(f"{method} is not supported"))
        except Exception:  # noqa: BLE001  The root of a call: logged, counted and answered.
            code = "INTERNAL"
            span.set_attribute(names.ERROR_TYPE, code)
            self._log.exception("grpc_call_failed", method=method)
            await errors.abort(context, errors.InternalError("Kvist has a fault; its log says more"))
        finally:
            span.set_attribute(names.RPC_RESPONSE_STATUS_CODE, code)
            active.dec()
            self._calls.labels(method, code).inc()
            self._durations.labels(method).observe(time.monotonic() - started)
            span.end()

    def _check(self, method: str, context: Any) -> None:
        if self._rules is None:
            return
        uris = [uri.decode(errors="replace") for uri in context.auth_context().get("peer_uri", ())]
        with errors.core_errors():
            self._rules.check(method, uris)


def _host(peer: str) -> str:
    """The host of a peer such as `ipv4:10.0.0.7:1234`."""
    return peer.rpartition(":")[0]


def _with_trace(details: Any) -> Any:
    carrier: dict[str, str] = {}
    inject(carrier)
    if not carrier:
        return details
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    for key, value in carrier.items():
        metadata[key] = value
    return details._replace(metadata=metadata)


class TraceUnaryUnary(grpc.aio.UnaryUnaryClientInterceptor):
    """Sends the trace context along."""

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Adds the metadata."""
        return await continuation(_with_trace(client_call_details), request)


class TraceUnaryStream(grpc.aio.UnaryStreamClientInterceptor):
    """Sends the trace context along."""

    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Adds the metadata."""
        return await continuation(_with_trace(client_call_details), request)


class TraceStreamUnary(grpc.aio.StreamUnaryClientInterceptor):
    """Sends the trace context along."""

    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Adds the metadata."""
        return await continuation(_with_trace(client_call_details), request_iterator)


class TraceStreamStream(grpc.aio.StreamStreamClientInterceptor):
    """Sends the trace context along."""

    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        """Adds the metadata."""
        return await continuation(_with_trace(client_call_details), request_iterator)
