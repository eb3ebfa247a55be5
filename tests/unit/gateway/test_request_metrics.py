"""What operators read of a gateway's requests."""

from prometheus_client import CollectorRegistry, generate_latest

from services.gateway.edge.http.limits import Limits, Room
from services.gateway.edge.http.middleware import Metrics


def test_each_answer_counts_once_by_status_and_once_in_the_times_of_its_route() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, Room(Limits()))
    for method, status, seconds in (
        ("POST", 201, 0.0005),
        ("POST", 201, 0.003),
        ("POST", 409, 0.004),
        ("BREW", 405, 99.0),
    ):
        metrics.observe(method, "/v1/x", status, seconds)

    lines = generate_latest(registry).decode().splitlines()

    assert 'quorumlog_http_requests_total{method="POST",route="/v1/x",status="201"} 2.0' in lines
    assert 'quorumlog_http_requests_total{method="POST",route="/v1/x",status="409"} 1.0' in lines
    times = 'quorumlog_http_request_seconds_bucket{le="%s",method="%s",route="/v1/x"} %s'
    for le, method, count in (
        ("0.0005", "POST", "1.0"),
        ("0.002", "POST", "1.0"),
        ("0.005", "POST", "3.0"),
        ("+Inf", "POST", "3.0"),
        ("10.0", "other", "0.0"),
        ("+Inf", "other", "1.0"),
    ):
        assert times % (le, method, count) in lines
    assert 'quorumlog_http_request_seconds_count{method="POST",route="/v1/x"} 3.0' in lines
    assert 'quorumlog_http_request_seconds_sum{method="other",route="/v1/x"} 99.0' in lines
