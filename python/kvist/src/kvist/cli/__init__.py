"""The `kvist` command. Exit codes: 0 well, 1 other, 2 usage, 4 not found, 5 network, 6 not allowed, 8 server error."""

from kvist.cli.app import main

__all__ = ["main"]
