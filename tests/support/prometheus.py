"""promtool, and a Prometheus of its own that scrapes every second or two."""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.serving import until

ROOT = Path(__file__).resolve().parents[2]
_TOOLS = ROOT / "build" / "tools"


def tool(name: str) -> str:
    """Path of "prometheus" or "promtool": from PATH, else what scripts/setup_prometheus.sh has unpacked."""
    found = shutil.which(name) or shutil.which(name, path=str(_TOOLS))
    assert found is not None, f"{name} is neither on PATH nor in {_TOOLS}: run `make setup`"
    return found


def promtool(*arguments: str | Path, stdin: str | None = None) -> str:
    """Run it; what it printed. A failure is an assertion with its words."""
    done = subprocess.run(
        [tool("promtool"), *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Prometheus:
    """A running one."""

    def __init__(self, address: str) -> None:
        self._address = address

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of what its HTTP API answers."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            document = json.load(reply)
        assert document["status"] == "success", document
        return document["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values, as of now."""
        result = self.get("query", query=expression)["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in result]

    def alerts(self) -> list[dict[str, Any]]:
        """Those that fire."""
        return [alert for alert in self.get("alerts")["alerts"] if alert["state"] == "firing"]

    def firing(self) -> set[tuple[str, str]]:
        """(alert, instance) of those."""
        return {(alert["labels"]["alertname"], alert["labels"]["instance"]) for alert in self.alerts()}

    def rules(self) -> list[dict[str, Any]]:
        """All of them."""
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]


@contextmanager
def prometheus(config: Path, folder: Path) -> Iterator[Prometheus]:
    """One with this configuration, on a free port; its log and data go to `folder`."""
    log = folder / "prometheus.log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=stderr,
            stderr=stderr,
        )
    try:

        def address() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return re.search(r"Listening on\W.*address=(127\.0\.0\.1:[1-9]\d*)", log.read_text())

        until(address, 60)
        found = address()
        assert found is not None
        server = Prometheus(found[1])
        until(lambda: "Server is ready to receive web requests" in log.read_text(), 60)
        yield server
    finally:
        process.kill()
        process.wait()
