"""The cluster-wide index as a service."""
