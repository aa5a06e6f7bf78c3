"""The control plane: resources, placement, registry."""
