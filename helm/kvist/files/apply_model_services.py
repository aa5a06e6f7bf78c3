"""Applies model services: `apply_model_services.py FILE HOST:PORT [CA_FILE [CERTIFICATE_FILE KEY_FILE]]`.

Ends with 1 at the first one that is refused, with the path of each wrong field, or when no controller answers in time.
"""
# ruff: noqa: INP001  A program by itself.

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from google.protobuf import json_format
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from kvist.controller.v1 import controller_pb2, controller_pb2_grpc

# The first answer may take as long as the controller takes to start and to lead.
TIME_LIMIT_SECONDS = 240.0


def open_channel(address: str, files: Sequence[str]) -> grpc.Channel:
    """A channel with TLS when there is a file of authorities, and with a certificate of its own when there is one."""
    if not files:
        return grpc.insecure_channel(address)
    authorities, certificate, key = (*(Path(file).read_bytes() for file in files), None, None)[:3]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authorities, key, certificate))


def reasons(error: grpc.RpcError) -> list[str]:
    """What a controller has against a resource."""
    lines = [f"{error.details()} ({error.code().name})"]
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            lines += [f"  {violation.field}: {violation.description}" for violation in bad_request.field_violations]
    return lines


def main(file: str, address: str, *tls_files: str) -> int:
    """Applies all resources of a JSON file and returns the exit code."""
    with open_channel(address, tls_files) as channel:
        controller = controller_pb2_grpc.ControllerServiceStub(channel)
        for plain in json.loads(Path(file).read_text()):
            name = plain["metadata"]["name"]
            request = controller_pb2.ApplyRequest()
            json_format.ParseDict(plain, request.resource)
            try:
                response = controller.Apply(request, timeout=TIME_LIMIT_SECONDS, wait_for_ready=True)
            except grpc.RpcError as error:
                sys.stderr.write("\n".join((f"{name}: refused", *reasons(error), "")))
                return 1
            result = controller_pb2.ApplyResult.Name(response.result).removeprefix("APPLY_RESULT_").lower()
            sys.stdout.write(f"{name}: {result}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
