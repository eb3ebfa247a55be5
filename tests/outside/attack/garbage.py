"""Tables of what nobody should send: bodies, values of parameters and headers, and bytes that are no HTTP."""

from typing import Final

DEEP: Final = 100_000

BODIES: Final = (
    b"", b"{", b"}", b"[", b"null", b"true", b"0", b'""', b"[]", b"[[[]]]", b"{}", b"{}{}", b"nonsense",
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf{}", b"\x1f\x8b\x08", b"\xed\xa0\x80", b"-", b"1e999999", b"NaN",
    b"-Infinity", b"9" * 5000, b"-" + b"9" * 400, b"1" + b"0" * 100_000, b'"' + b"x" * 100_000,
    b"[" * DEEP, b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    b'{"a":1,"a":2}', b'{"":0}', b'{"a":NaN}', b'{"\\u0000":"\\u0000"}', b'{"a":"\\ud800"}',
    b'{"entries":[]}', b'{"entries":[' + b"{}," * 20_000 + b"{}]}", b'{"entries":{}}',
    b'{"entries":[{"text":"a"},{"data":"?"}]}', b'{"text":1}', b'{"text":"\\ud800"}', b'{"data":"="}',
    b'{"text":"a","key":1}', b'{"text":"a","headers":{"a":1}}', b'{"text":"a","timestamp":-1}',
    b'{"text":"a","timestamp":' + b"9" * 400 + b"}", b'{"json":1e400}', b'{"json":-0.0}',
    b"\xff\xff\xff\xff", b"\0\0\0\0", b"\0\0\0\1", b"\0\0\0\2a", b"\0\0\0\1a\0", b"\0\0\0\0" * 20_000,
    b"a=1&b=2", b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--x--\r\n", b"ARROW1\0\0",
    b"\xff\xff\xff\xff\x10\0\0\0" + b"\0" * 64, b'{"text":"a"}\n{"text":', b"\n\n\n",
)  # fmt: skip

MEDIA: Final = (
    "application/json", "application/octet-stream", "application/vnd.quorumlog.frames",
    "application/x-ndjson", "application/vnd.apache.arrow.stream", "text/plain", "nonsense", ";;;", "",
    "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/json; charset=x",
    "application/json;" * 50, "application/\xff",
)  # fmt: skip

VALUES: Final = (
    "", "0", "-0", "00", "-1", "1.0", "1e3", "0x1", "+1", " 1", "%201", "1%00", "%00", "%", "%zz", "%ff",
    "%ED%A0%80", "%F0%9F%92%A9", "%D9%A1", "NaN", "null", "true", "[]", "{}", "..", ".", "%2e%2e%2f%2e",
    "..%2f..%2fetc%2fpasswd", "a%0d%0aX-Evil:1", "a%20b", "'", "%22", "';--", "${jndi:x}", "%25s%25n",
    "9223372036854775807", "9223372036854775808", "-9223372036854775809", "18446744073709551616",
    "9" * 400, "-" + "9" * 400, "9" * 5000, "a" * 300, "a" * 7000, "1,2", "1;2", "*", "@", "b@1",
    "bookie-1", "bookie-1@1", "b@" + "9" * 30, "earliest", "latest", "text", "frames", "2147483648",
    "60001", "10001", "67108865", "%C2%B2", "A" * 200, "a/b", "%E2%80%AE", "99999999999", "0.1e-5",
)  # fmt: skip
"""Of a path or a query. Nothing here is a long wait."""

HEADERS: Final = (
    ("X-Request-Id", "x" * 65), ("X-Request-Id", "a b"), ("X-Request-Id", "\xff"), ("X-Request-Id", ""),
    ("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"), ("traceparent", "\xff" * 50),
    ("traceparent", "ff-xyz"), ("Accept", "*/*;q=2"), ("Accept", ";"), ("Accept", "a/b" + ",a/b" * 1000),
    ("Accept", "text/html;q=0"), ("Accept", "\xff/\xff"), ("Accept", "application/x-ndjson"),
    ("Accept", "application/vnd.quorumlog.frames"), ("Accept", "application/vnd.apache.arrow.stream"),
    ("Accept-Encoding", "br;q=1, *;q=0"), ("Content-Encoding", "gzip"), ("Content-Encoding", "\xff"),
    ("Range", "bytes=0-0,-1," + "1-," * 500), ("If-Match", '"' + "9" * 400 + '"'), ("If-Match", "*"),
    ("If-None-Match", "*"), ("If-Modified-Since", "never"), ("Expect", "200-ok"), ("Cookie", "a=" * 2000),
    ("Expect", "100-continue, 200"), ("Origin", "http://evil.example"), ("Origin", "null"),
    ("Authorization", "Basic " + "=" * 3000), ("Transfer-Encoding", "identity"), ("Upgrade", "h2c"),
    ("Upgrade", "websocket"), ("Sec-WebSocket-Key", "\xff"), ("Sec-WebSocket-Version", "9" * 400),
    ("Connection", "Upgrade"), ("Connection", "close, keep-alive"), ("Connection", "host"),
    ("Last-Event-ID", "9" * 400), ("Last-Event-ID", "\xff"), ("Last-Event-ID", "-2"),
    ("Idempotency-Key", "x" * 256), ("Idempotency-Key", "\xff"), ("Ledger-Password", "\xff"),
    ("Ledger-Password", "x" * 5000), ("Producer-Id", "\xff"), ("Producer-Id", "x" * 5000),
    ("Producer-Epoch", "-1"), ("Producer-Epoch", "9" * 400), ("Producer-Seq", "1.5"),
    ("Producer-Since", "9" * 400), ("Writer-Token", "9" * 5000), ("Writer-Token", "\xff"),
    ("X-Forwarded-Writer", "\xff"), ("X-Forwarded-Writer", "x" * 5000), ("X-Ledger-Key", "AAAA"),
    ("X-Ledger-Key", "\xff"), ("X-Member", "b@" + "9" * 30), ("X-Member", "\xff"), ("Forwarded", "for=_"),
    ("X-Witness", "\xff"), ("Witnesses", "9" * 5000), ("X-Long", "x" * 8000), ("X-Empty", ""),
    ("Max-Forwards", "0"), ("TE", "trailers, x"), ("Trailer", "Content-Length"), ("Via", "1.1 x" * 900),
)  # fmt: skip

NUMBERS: Final = ("-1", "1.5", "9" * 400, "9" * 5000)
"""Where a number is asked for, or something else."""

METHODS: Final = (
    "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND", "get", "PURGE", "X" * 300, "M-SEARCH",
)  # fmt: skip

_UPGRADE: Final = b" HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
_CHANNEL: Final = (
    b"GET /v1/channel HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: quorumlog-channel/1\r\n"
    b"Connection: Upgrade\r\n\r\n"
)
_POST: Final = b"POST /v1/ledgers/0/entries HTTP/1.1\r\nHost: 127.0.0.1\r\n"
_OCTETS: Final = _POST + b"Content-Type: application/octet-stream\r\n"

FORBIDDEN: Final = (
    _OCTETS + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    _OCTETS + b"Content-Length: 1, 2\r\n\r\nab",
    _OCTETS + b"Content-Length: +1\r\n\r\na",
    _OCTETS + b"Content-Length: -1\r\n\r\na",
    _OCTETS + b"Content-Length: 0x1\r\n\r\na",
    _OCTETS + b"Content-Length: 1_0\r\n\r\n0123456789",
    _OCTETS + b"Content-Length: " + b"9" * 400 + b"\r\n\r\na",
    _OCTETS + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nX",
    _OCTETS + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    _OCTETS + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: chunked\r\n\r\n-1\r\na\r\n0\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: chunked\r\n\r\n1_0\r\na\r\n0\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 40 + b"\r\na\r\n0\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: chunked\r\n\r\nnonsense",
    b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nX : 1\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n folded\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nX: a\0b\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n: empty\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nno colon\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\n\r\n",
    b"GET /health/live\r\n\r\n",
    b"GET /health/live\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /health/live HTTP/0.9\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /health/live HTTP/2.0\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /health/live HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /health/live HTTP/1.1 extra\r\nHost: 127.0.0.1\r\n\r\n",
    b"G\0T /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"G@T(/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /health/live FTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: 1\r\n" * 500 + b"\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
    b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(range(256)) * 2,
    b"\0\0\0\x08\x04\xd2\x16\x2f",
    b"*1\r\n$4\r\nPING\r\n",
    b"SSH-2.0-x\r\n",
    b"EHLO x\r\n\r\n",
    b"\r\n" * 1000 + b"nonsense\r\n\r\n",
    bytes(range(256)) * 40,
    b"\0" * 20_000,
    b"x" * 200_000,
)
"""What a server must not do as if it were right (RFC 9110, RFC 9112)."""

ODD: Final = (
    b"GET * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"CONNECT h:1 HTTP/1.1\r\nHost: h:1\r\n\r\n",
    b"GET http://evil.example/v1/ledgers HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET //v1/ledgers HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET http://h:99999/ HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET ? HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /%00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /health/live HTTP/1.0\r\n\r\n",
    b"GET /health/live HTTP/1.1\nHost: 127.0.0.1\n\n",
    b"GET /health/live HTTP/1.1\r\nHost: \xff\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: h:99999999\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: [::1\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET /v1/ledgers/0/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"GET /v1/ledgers/0/ws"
    + _UPGRADE
    + b"Sec-WebSocket-Version: 8\r\nSec-WebSocket-Key: x\r\n\r\n",
    b"GET /v1/channel" + _UPGRADE + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x\r\n\r\n",
    _CHANNEL,
    _CHANNEL + b"\0" * 12,
    _CHANNEL + b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    _OCTETS + b"Expect: 100-continue\r\nContent-Length: 1\r\n\r\nx",
    _OCTETS + b"Expect: nonsense\r\nContent-Length: 1\r\n\r\nx",
    _OCTETS + b"Content-Length: 99999999999\r\n\r\nx",
    _OCTETS + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 5000 + b"\r\na\r\n0\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"T: x\r\n" * 300 + b"\r\n",
    _OCTETS + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: CHUNKED\r\n\r\n0\r\n\r\n",
    _OCTETS + b"Content-Length: 1\r\n\r\naGET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 500,
)
"""What may be right or wrong, but gets an answer or an end."""

UNFINISHED: Final = (
    b"G",
    b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n",
    _OCTETS + b"Content-Length: 10\r\n\r\nabc",
    _OCTETS + b"Content-Length: 10\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: chunked\r\n\r\n",
    _OCTETS + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
    _OCTETS + b"Transfer-Encoding: chunked\r\n\r\n5",
    _POST + b"Content-Type: application/json\r\nContent-Length: 70000000\r\n\r\n",
)
"""What promises more than it sends: each connection ends all the same."""
