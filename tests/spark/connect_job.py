"""A program with a session of Spark Connect: runs jobs, and prints what came of them as JSON."""

import json
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

from quorumlog.spark.jobs import archive, ingest, job, scrub

asked = json.loads(sys.argv[1])
spark = (
    SparkSession.builder.remote("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.log.level", "ERROR")
    .config("spark.driver.extraJavaOptions", asked["java"])
    .getOrCreate()
)
files = Path(tempfile.mkdtemp())
files.joinpath("1.txt").write_text("a\nb\n")
where = {"log": asked["log"], "path": str(files)}
planned = ingest.run(spark, asked["urls"], **where, kind="text", value="value", dry_run=True)
scrubbed = scrub.run(spark, asked["urls"])
try:
    archive.run(spark, asked["urls"], **where, through=1)
    refused = ""
except job.JobFailed as error:
    refused = str(error)
sys.stdout.write(
    json.dumps(
        {"rows": planned.report["rows"], "copies": scrubbed.report["copies"], "refused": refused}
    )
    + "\n"
)
spark.stop()
