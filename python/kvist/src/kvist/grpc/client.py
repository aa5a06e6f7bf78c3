"""Channels to Kvist's gRPC servers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvist.grpc.interceptors import TraceStreamStream, TraceStreamUnary, TraceUnaryStream, TraceUnaryUnary

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Only UNAVAILABLE is tried again, and no stream after its first message.
_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
    }
)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a client.

    Attributes:
        ca_file: Authorities that sign the servers' certificates; the system's when absent.
        certificate_file: The client's own certificate, for mutual TLS.
        key_file: Key of that certificate.
    """

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None


def open_channel(
    address: str,
    *,
    tls: TlsFiles | None = None,
    retries: bool = True,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """Opens a channel; it connects at the first call and reconnects by itself.

    Args:
        address: `host:port`, or a target such as `dns:///routers:7000`.
        tls: Plain text when absent.
        retries: Try a call again that ended with UNAVAILABLE. Off for calls that may run once only.
        max_message_bytes: Largest message taken or sent.
    """
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Every channel has connections of its own: a cut of one tells nothing about another.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", int(retries)),
    ]
    if retries:
        options.append(("grpc.service_config", _SERVICE_CONFIG))
    interceptors = [TraceUnaryUnary(), TraceUnaryStream(), TraceStreamUnary(), TraceStreamStream()]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca_file),
        private_key=_read(tls.key_file),
        certificate_chain=_read(tls.certificate_file),
    )
    return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)


def _read(path: Path | None) -> bytes | None:
    return path.read_bytes() if path else None
