"""`python -m tests.client`: write the SDK's sync face anew."""

from tests.client.face import FACE, made

FACE.write_text(made())
print(f"written: {FACE.name}")
