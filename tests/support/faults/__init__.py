"""Faults of tests/chaos: each takes a scene, does harm, and returns when it is healed."""
