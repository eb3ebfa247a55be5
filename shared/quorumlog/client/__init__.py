"""The Python SDK: talks to the gateway only."""
