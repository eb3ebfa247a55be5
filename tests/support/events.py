"""Server-Sent Events as tests compare them."""

import re


def after_retry(body: bytes) -> bytes:
    """Events without their first line, which says when a reader reconnects."""
    first, _, rest = body.partition(b"\n")
    assert re.fullmatch(rb"retry: [1-5]\d{3}", first), first
    return rest
