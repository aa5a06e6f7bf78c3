"""gRPC servers and channels as every Kvist process makes them: health, reflection, rich errors, tracing, limits."""

from kvist.grpc.client import Channels, TlsFiles, open_channel
from kvist.grpc.server import GrpcServer, Registration

__all__ = ["Channels", "GrpcServer", "Registration", "TlsFiles", "open_channel"]
