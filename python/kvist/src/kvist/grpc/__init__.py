"""gRPC servers and channels as every Kvist process makes them: health, reflection, rich errors, tracing, limits."""

from kvist.grpc.client import Channels, open_channel
from kvist.grpc.server import GrpcServer, Registration
from kvist.tls_files import TlsFiles

__all__ = ["Channels", "GrpcServer", "Registration", "TlsFiles", "open_channel"]
