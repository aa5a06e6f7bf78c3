"""Stubs of `kvist.controller`."""
