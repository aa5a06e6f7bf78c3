"""One node: its workers and their events."""
