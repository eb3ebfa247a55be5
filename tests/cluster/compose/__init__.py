"""The cluster of compose.yaml.

`test_compose.py` reads the files. `python -m tests.cluster.compose` (`make e2e-compose`) runs them on a real engine: it hurts every
container, the engine and its networks while clients write, and judges what they saw.
"""
