"""How the jobs are called: what they refuse at once, and what their exit status means."""

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("pyspark", reason="PySpark is not installed: make setup-spark")

from pyspark.errors import PythonException

from quorumlog.spark.jobs import archive, ingest, job, retention_stats, scrub

JOBS = {
    "archive": archive.app,
    "ingest": ingest.app,
    "retention_stats": retention_stats.app,
    "scrub": scrub.app,
}
GATEWAY = ("--gateway", "http://127.0.0.1:1")


@pytest.mark.parametrize("name", JOBS)
def test_a_job_says_what_it_takes(name: str) -> None:
    done = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(JOBS[name], ["--help"])

    assert done.exit_code == 0
    for option in ("--gateway", "--dry-run", "--json"):
        assert option in done.output


@pytest.mark.parametrize(
    ("name", "arguments", "what"),
    [
        ("scrub", (), "--gateway"),
        ("scrub", ("--gateway", "127.0.0.1:8080"), "not a list of URLs"),
        ("scrub", (*GATEWAY, "--sample", "2"), "--sample"),
        ("scrub", (*GATEWAY, "--repair", "metadata"), "not a list of URLs"),
        ("archive", (*GATEWAY, "--log", "a"), "--path"),
        (
            "archive",
            (*GATEWAY, "--log", "a", "--path", "/x", "--through", "1", "--older-than", "1"),
            "either --through",
        ),
        ("ingest", (*GATEWAY, "--log", "a"), "either --path or --query"),
        ("ingest", (*GATEWAY, "--log", "a", "--path", "x", "--query", "y"), "either --path"),
        ("ingest", (*GATEWAY, "--log", "a", "--path", "x", "--app", "y"), "or neither"),
        ("ingest", (*GATEWAY, "--log", "a", "--path", "x", "--setting", "y=1"), "needs --create"),
        (
            "ingest",
            (*GATEWAY, "--log", "a", "--path", "x", "--create", "--setting", "y"),
            "not a setting",
        ),
        ("ingest", (*GATEWAY, "--log", "a", "--path", "x", "--option", "y"), "name=value"),
        ("ingest", (*GATEWAY, "--log", "a", "--path", "x", "--stream"), "and --checkpoint"),
        (
            "ingest",
            (*GATEWAY, "--log", "a", "--path", "x", "--checkpoint", "y"),
            "needs --stream",
        ),
        (
            "ingest",
            (*GATEWAY, "--log", "a", "--path", "x", "--stream", "--checkpoint", "y", "--app", "z"),
            "conflicts with --stream",
        ),
    ],
)
def test_a_job_that_is_called_wrongly_ends_with_2_before_there_is_a_session(
    name: str, arguments: tuple[str, ...], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUORUMLOG_GATEWAY", raising=False)
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})

    done = runner.invoke(JOBS[name], list(arguments))

    assert done.exit_code == 2, done.output
    assert what in " ".join(done.output.split())


TOLD = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "writing.py", line 1, in write_task
    yield
quorumlog.errors.TransactionAborted: The transaction is aborted

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "writing.py", line 2, in add
    raise WriteOver(self._log) from error
quorumlog.spark.writing.WriteOver: the transaction of this write on a is over
 SQLSTATE: 38000
"""


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (job.JobFailed("the log is gone"), "scrub: the log is gone"),
        (PythonException(TOLD), "WriteOver: the transaction of this write on a is over"),
        (PythonException("no traceback\nat all"), "scrub: no traceback"),
        (ZeroDivisionError("a defect"), "in call"),
    ],
)
def test_what_could_not_be_done_ends_with_3_and_is_no_finding(
    error: Exception, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def call() -> job.JobResult:
        raise error

    with pytest.raises(typer.Exit) as ended:
        job.attempt("scrub", call)

    assert ended.value.exit_code == job.FAILED
    assert reported in capsys.readouterr().err
