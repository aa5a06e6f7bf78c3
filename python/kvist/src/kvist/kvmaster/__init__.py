"""Stubs of `kvist.kvmaster`."""
