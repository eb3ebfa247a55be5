"""Three hosts as an operator makes them from docs/operations.md, each in namespaces of its own (`make hosts`)."""
