"""What Prometheus does with a scrape config: finds the targets, and asks each with the credentials of its job."""

import json
import ssl
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml  # type: ignore[import-untyped]

from services.local.config import ROOT

FOLDER: Final = ROOT / "deploy" / "monitoring"


async def scraped(name: str, data: Path) -> dict[str, str]:
    """The metrics of each target of a config in deploy/monitoring, for the cluster with this data, by its process."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    assert all((FOLDER / file).exists() for file in config["rule_files"])
    [job] = config["scrape_configs"]
    assert job["job_name"] == "quorumlog", "the dashboard asks for this job"

    def of_data(path: str) -> Path:
        return data / (FOLDER / path).resolve().relative_to(ROOT / ".quorumlog")

    [targets_file] = [of_data(file) for found in job["file_sd_configs"] for file in found["files"]]
    headers, context = {}, None
    if secret := job.get("authorization"):
        token = of_data(secret["credentials_file"]).read_text().strip()
        headers = {"Authorization": f"{secret['type']} {token}"}
    if files := job.get("tls_config"):
        context = ssl.create_default_context(cafile=of_data(files["ca_file"]))
        context.load_cert_chain(of_data(files["cert_file"]), of_data(files["key_file"]))
    found = {}
    connector = aiohttp.TCPConnector(ssl=context or True)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        for group in json.loads(targets_file.read_text()):
            [target] = group["targets"]
            url = f"{job.get('scheme', 'http')}://{target}/metrics"
            async with session.get(url) as answer:
                assert answer.status == 200, url
                found[group["labels"]["process"]] = await answer.text()
    return found
