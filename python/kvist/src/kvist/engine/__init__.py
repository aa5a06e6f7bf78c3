"""Stubs of `kvist.engine`."""
