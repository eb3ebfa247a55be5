"""The async driver and the clients of the services."""
