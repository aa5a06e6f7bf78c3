"""By which address a worker is reached: from its own node, and from others."""

import ipaddress

from kvist.settings import is_loopback, join_address, split_address


def reached_here(address: str) -> str:
    """The address for this node, given the one that the worker listens at."""
    host, port = split_address(address)
    parsed = ipaddress.ip_address(host)
    if not parsed.is_unspecified:
        return address
    return join_address("127.0.0.1" if parsed.version == 4 else "::1", port)  # noqa: PLR2004  IPv4.


def reached_from_elsewhere(address: str, *, advertised_host: str) -> str:
    """The address for everybody, given the one that the worker listens at.

    A worker on loopback keeps its own, since nobody else reaches it anyway.
    """
    host, port = split_address(address)
    if not advertised_host or is_loopback(host):
        return address
    return join_address(advertised_host, port)
