"""Stubs of `kvist.agent`."""
