"""The one-machine cluster."""
