"""Kvist: a gRPC mesh that serves language models."""

__version__ = "0.1.0"
