"""Programs that a test runs and a machine may lack: the test is then skipped with a reason, and counted."""

import shutil

import pytest


def needs(*tools: str) -> pytest.MarkDecorator:
    """Skip a test where one of these programs is not on the machine."""
    lacking = [tool for tool in tools if shutil.which(tool) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"{', '.join(lacking)} is not on this machine")
