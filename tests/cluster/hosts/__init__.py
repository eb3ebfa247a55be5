"""Three hosts as an operator makes them from docs/learn/production.md, each in namespaces of its own (`make hosts`)."""
