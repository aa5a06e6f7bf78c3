"""Stubs of `kvist.router`."""
