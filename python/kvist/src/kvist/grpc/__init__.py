"""gRPC servers and channels as every Kvist process makes them: health, reflection, rich errors, tracing, limits."""

from kvist.grpc.client import open_channel
from kvist.grpc.server import GrpcServer, Registration

__all__ = ["GrpcServer", "Registration", "open_channel"]
