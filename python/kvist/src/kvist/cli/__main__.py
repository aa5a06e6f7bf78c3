"""Runs the command: `python -m kvist.cli`."""

from kvist.cli.app import main

main()
