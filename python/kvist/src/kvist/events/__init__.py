"""Stubs of `kvist.events`."""
