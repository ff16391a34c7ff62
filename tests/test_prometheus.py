"""deploy/prometheus and deploy/grafana: by promtool, and in a real Prometheus that scrapes real servers in trouble."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.certificates import NEXT_WEEK, Authority, files_of
from support.faulty_fs import Faults, faulty_fs
from support.prometheus import ROOT, Prometheus, prometheus, promtool
from support.serving import ServerProcess, serving, until

from engram_client import NO_RETRY, EngramClient, EngramError
from engram_server.cli import main
from engram_server.security import SecurityOptions

DEPLOY = ROOT / "deploy"
CONFIG = DEPLOY / "prometheus" / "prometheus.yml"
RULES = DEPLOY / "prometheus" / "engram-server.rules.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "engram-server.json").read_text())
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"] if panel["type"] != "row"}
METRICS_DOC = (ROOT / "docs" / "metrics.md").read_text()
ALERTS_DOC = (ROOT / "docs" / "alerts.md").read_text()

pytestmark = pytest.mark.timeout(900)  # one story, told to the end where it is slow, too

PATIENCE_S = 90.0
"""For what another process does sooner or later; a busy machine is no failure."""

WITHOUT_IO_URING = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from support.seccomp import forbid_io_uring
forbid_io_uring()
"""

TROUBLES = {
    "EngramServerDown": "steady",
    "EngramBackendFallback": "steady",
    "EngramCacheCollapse": "steady",
    "EngramServerNotReady": "damaged",
    "EngramChecksumFailure": "damaged",
    "EngramReloadRefused": "damaged",
    "EngramCertificateExpires": "damaged",
    "EngramReadsSlow": "slow",
    "EngramDeviceSaturated": "slow",
    "EngramDecodeQueued": "slow",
    "EngramBudgetNearlyFull": "slow",
    "EngramOverload": "slow",
    "EngramReadErrors": "slow",
    "EngramLookupErrors": "slow",
}
"""The server at which each alert is provoked."""


def expressions(panel: dict[str, Any]) -> list[str]:
    """What a panel asks for, with Grafana's variables replaced as Grafana would for all servers."""
    replaced = {"$job": ".+", "$instance": ".+", "$__rate_interval": "10s", "$__range": "1m"}
    texts = [target["expr"] for target in panel["targets"]]
    for variable, value in replaced.items():
        texts = [text.replace(variable, value) for text in texts]
    assert not any("$" in text for text in texts), texts
    return texts


def metrics_in(expression: str) -> set[str]:
    """Names of the metrics of engram-server in it, without those of rules."""
    return set(re.findall(r"(?<![\w:])engram_\w+(?![\w:])", expression))


# ------------------------------------------------------------------------------------------------ files


def test_promtool_accepts_configuration_and_rules() -> None:
    promtool("check", "config", CONFIG)
    promtool("check", "rules", RULES)


def test_rules_fire_and_rest_as_they_say() -> None:
    tests = sorted((DEPLOY / "prometheus" / "tests").glob("*.yml"))
    assert tests
    promtool("test", "rules", *tests)
    text = "".join(test.read_text() for test in tests)
    untested = [alert for alert in re.findall(r"- alert: (\w+)", RULES.read_text()) if alert not in text]
    assert untested == []


def test_every_alert_leads_to_what_to_do_and_is_provoked() -> None:
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    assert re.findall(r"runbook: docs/alerts\.md#(\w+)", RULES.read_text()) == [a.lower() for a in alerts]
    assert re.findall(r"^## (Engram\w+)$", ALERTS_DOC, re.MULTILINE) == alerts
    assert set(TROUBLES) == set(alerts)
    assert set(re.findall(r"alerts\.md#(\w+)", METRICS_DOC)) == {alert.lower() for alert in alerts}


def test_rules_and_panels_ask_for_metrics_that_there_are() -> None:
    documented = set(re.findall(r"^\| `(engram_\w+)`", METRICS_DOC, re.MULTILINE))
    asked = metrics_in(RULES.read_text())
    for panel in PANELS.values():
        asked |= {name for text in expressions(panel) for name in metrics_in(text)}
    assert len(asked) > 20
    base = {re.sub(r"_(bucket|count|sum)$", "", name) for name in asked}
    assert base - documented == set()


def test_the_dashboard_is_one_that_grafana_takes(tmp_path: Path) -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [v["name"] for v in DASHBOARD["templating"]["list"]] == ["datasource", "job", "instance"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert at["x"] + at["w"] <= 24
        taken |= cells
    for panel in PANELS.values():
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            assert "$job" in target["expr"], panel["title"]
            assert "$instance" in target["expr"], panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    parsed = [{"record": "a:b", "expr": text} for panel in PANELS.values() for text in expressions(panel)]
    rules = {"groups": [{"name": str(i), "rules": [rule]} for i, rule in enumerate(parsed)]}
    (tmp_path / "panels.yml").write_text(json.dumps(rules))  # which is YAML, too
    promtool("check", "rules", tmp_path / "panels.yml")


# -------------------------------------------------------------------------------------- a real Prometheus


class Servers:
    """Three servers, and the Prometheus that scrapes them."""

    def __init__(self, checkpoint: Path, folder: Path, closing: ExitStack) -> None:
        self._checkpoint = checkpoint
        self.folder = folder
        self._closing = closing
        for name in ("steady", "slow", "damaged", "prometheus"):
            (folder / name).mkdir()
        self.faults: Faults = closing.enter_context(
            faulty_fs(checkpoint, folder / "slow" / "mnt", folder / "control.json")
        )
        self.steady = self.start_steady("127.0.0.1:0")
        # One MiB is eight blocks: stalled requests fill it.
        self.slow = self._start(
            folder / "slow" / "mnt", "slow", scales="disk", cache_bytes=0, io_depth=4, budget_bytes=1 << 20
        )
        store = self.store = folder / "tables.engram"
        assert main(["convert", str(checkpoint), str(store)]) == 0
        with store.open("r+b") as file:
            file.seek(4096 + 140)  # in row 1 of layer 1
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
        self.authority = Authority(folder / "damaged")
        security = SecurityOptions(tls=files_of(self.authority.server()))
        uds = folder / "damaged" / "socket"
        self.damaged = self._start(store, "damaged", uds=uds, security=security)
        config = folder / "prometheus" / "prometheus.yml"
        config.write_text(self._config())
        (config.parent / RULES.name).write_text(hurried(RULES.read_text()))
        self.prometheus: Prometheus = closing.enter_context(prometheus(config, config.parent))

    def start_steady(self, metrics: str, **options: Any) -> ServerProcess:
        """The one whose tables are whole."""
        uds = self.folder / "steady" / "socket"
        return self._start(self._checkpoint, "steady", metrics=metrics, uds=uds, scales="disk", **options)

    def _start(self, path: Path, name: str, metrics: str = "127.0.0.1:0", **options: Any) -> ServerProcess:
        return self._closing.enter_context(serving(path, self.folder / name, metrics=metrics, **options))

    def _config(self) -> str:
        """The one in deploy/, of these servers, every other second."""
        targets = "".join(
            f'      - {{targets: ["{metrics_address(server)}"], labels: {{instance: {name}}}}}\n'
            for name, server in (("steady", self.steady), ("slow", self.slow), ("damaged", self.damaged))
        )
        text, count = re.subn(
            r"^      - targets: .*\n", targets, CONFIG.read_text(), count=1, flags=re.MULTILINE
        )
        assert count == 1
        text, count = re.subn(r"scrape_interval: \w+", "scrape_interval: 2s", text)
        assert count == 1
        text, count = re.subn(r"evaluation_interval: \w+", "evaluation_interval: 1s", text)
        assert count == 1
        return text


def hurried(rules: str) -> str:
    """The same rules for a test: each window and each `for` is seconds long, and no expression differs otherwise."""
    rules = rules.replace("[6h] offset 30m", "[60s] offset 12s")
    rules = re.sub(r"\[\d+m\]", "[10s]", rules)
    return re.sub(r"for: \d+m", "for: 5s", rules)


def metrics_address(server: ServerProcess) -> str:
    found = re.search(r"metrics at http://(\S+)/metrics", server.ready_line)
    assert found is not None, server.ready_line
    return found[1]


@contextmanager
def engram_load(*arguments: object) -> Iterator[None]:
    """It runs for as long as the block."""
    command = [sys.executable, "-m", "engram_load.cli", *map(str, arguments), "--duration", "600", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield
        assert process.poll() is None, f"{command} has ended by itself"
    finally:
        process.kill()
        process.wait()


@contextmanager
def hammering(target: str, threads: int) -> Iterator[None]:
    """So many clients ask for rows all the time, and take no for an answer."""
    over = threading.Event()

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        with EngramClient(target, shared_memory="off", retry=NO_RETRY) as client:
            while not over.is_set():
                with suppress(EngramError):
                    # With all the time in the world, lest it is refused for want of that.
                    client.lookup(rng.integers(0, 5_000, 16), lane="decode", timeout=3_600)
                time.sleep(0.05)

    workers = [threading.Thread(target=ask, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        over.set()
        for worker in workers:
            worker.join()


@dataclass
class Seen:
    """What Prometheus knew, step by step."""

    before: set[tuple[str, str]] = field(default_factory=set)
    """(alert, server) that had fired while nothing was wrong."""
    fired: set[tuple[str, str]] = field(default_factory=set)
    words: list[str] = field(default_factory=list)
    """Of the alerts that fired together."""
    panels: dict[str, list[float]] = field(default_factory=dict)
    """Values by the panel's title and query."""
    selectors: dict[str, float] = field(default_factory=dict)
    """How many series each selector of a rule finds."""
    rules: list[dict[str, Any]] = field(default_factory=list)
    metrics: str = ""
    """A server's, in text form."""
    left: set[tuple[str, str]] = field(default_factory=set)
    """What still fires once the troubles that end are over."""


@pytest.fixture(scope="module")
def seen(fp4_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """The whole story: three servers at work, each in trouble, and out of it as far as that goes."""
    seen = Seen()
    with ExitStack() as closing:
        servers = Servers(fp4_checkpoint, tmp_path_factory.mktemp("watched"), closing)
        at_work(servers, seen)
        in_trouble(servers, seen)
        down_and_up_again(servers, seen)
        yield seen


def at_work(servers: Servers, seen: Seen) -> None:
    """Until the cache of one has been warm for long enough to be missed, and every rule has had its time."""
    watched = servers.prometheus
    tcp, uds = servers.steady.targets
    text = ROOT / "docs" / "metrics.md"
    usual = 'avg_over_time(instance:engram_cached_rows:ratio_rate5m{instance="steady"}[60s] offset 12s)'
    with (
        engram_load("decode", f"shm:{uds}", text, "--rate", 20),
        engram_load("prefill", tcp, text, "--rate", 4, "--length", 256),
        EngramClient(servers.damaged.targets[1], shared_memory="off") as client,
    ):

        def settled() -> bool:
            seen.before |= watched.firing()
            client.lookup_rows(1, [5], lane="decode")
            return any(value > 0.5 for _, value in watched.query(usual))

        with said(lambda: f"a warm cache: {watched.query(usual)}"):
            until(settled, PATIENCE_S)


def in_trouble(servers: Servers, seen: Seen) -> None:
    """All that a server can be in while it runs."""
    watched = servers.prometheus
    damaged, slow = servers.damaged.targets[1], servers.slow.targets[0]
    with EngramClient(damaged, shared_memory="off") as client, pytest.raises(EngramError):
        client.lookup_rows(1, [1])
    servers.faults.set("slow", delay_s=0.03)
    with (
        engram_load("uniform", servers.steady.targets[0], "--rate", 5, "--length", 2),
        hammering(slow, 24),
    ):
        seen.fired |= fire(watched, "damaged", "EngramServerNotReady", "EngramChecksumFailure")
        servers.store.rename(servers.folder / "away")
        servers.authority.server(until=NEXT_WEEK)
        servers.damaged.process.send_signal(signal.SIGHUP)
        seen.fired |= fire(watched, "damaged", "EngramReloadRefused", "EngramCertificateExpires")
        late = ("EngramReadsSlow", "EngramDeviceSaturated", "EngramDecodeQueued")
        seen.fired |= fire(watched, "slow", *late, "EngramBudgetNearlyFull", "EngramOverload")
        seen.fired |= fire(watched, "steady", "EngramCacheCollapse")
        servers.faults.set("eio")
        seen.fired |= fire(watched, "slow", "EngramReadErrors", "EngramLookupErrors")
        seen.words = [text for alert in watched.alerts() for text in alert["annotations"].values()]
        for title, panel in PANELS.items():
            for text in expressions(panel):
                seen.panels[f"{title}: {text}"] = [value for _, value in watched.query(text)]
        seen.rules = watched.rules()
        selectors = {one for rule in seen.rules for one in re.findall(SELECTOR, rule["query"])}
        seen.selectors = {one: sum(value for _, value in watched.query(f"count({one})")) for one in selectors}
    servers.faults.clear()
    servers.authority.server()
    servers.damaged.process.send_signal(signal.SIGHUP)


def down_and_up_again(servers: Servers, seen: Seen) -> None:
    """A server is killed, and comes back where io_uring is refused."""
    watched = servers.prometheus
    address = metrics_address(servers.steady)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as reply:
        seen.metrics = reply.read().decode()
    servers.steady.kill()
    seen.fired |= fire(watched, "steady", "EngramServerDown")
    servers.start_steady(address, before=WITHOUT_IO_URING)
    seen.fired |= fire(watched, "steady", "EngramBackendFallback")

    def rested() -> bool:
        seen.left = watched.firing()
        return len(seen.left) <= 2

    with said(lambda: f"the troubles that are over to be forgotten: {seen.left}"):
        until(rested, PATIENCE_S)


SELECTOR = r"\b(?:[a-z_]+:\w+:\w+|engram_\w+|up\b)(?:{[^}]*})?"


def fire(prometheus: Prometheus, instance: str, *alerts: str) -> set[tuple[str, str]]:
    """Wait until all of them fire at that server."""
    wanted = {(alert, instance) for alert in alerts}
    with said(lambda: f"{sorted(wanted)}; firing: {sorted(prometheus.firing())}"):
        until(lambda: wanted <= prometheus.firing(), PATIENCE_S)
    return wanted


@contextmanager
def said(what: Callable[[], str]) -> Iterator[None]:
    """Names what was waited for in vain."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"waited in vain for {what()}") from error


def test_no_alert_fires_before_its_trouble(seen: Seen) -> None:
    assert {(alert, server) for alert, server in seen.before if TROUBLES[alert] == server} == set()


def test_every_alert_fires_where_its_trouble_is(seen: Seen) -> None:
    assert seen.fired == set(TROUBLES.items())
    assert seen.words
    assert [text for text in seen.words if "error" in text and "template" in text] == []


def test_alerts_rest_when_their_trouble_is_over(seen: Seen) -> None:
    assert seen.left == {("EngramServerNotReady", "damaged"), ("EngramBackendFallback", "steady")}


def test_promtool_finds_no_fault_with_what_is_shown(seen: Seen) -> None:
    assert "engram_shm_requests_total" in seen.metrics
    assert promtool("check", "metrics", stdin=seen.metrics) == ""


def test_every_query_of_the_dashboard_returns_data(seen: Seen) -> None:
    assert len(seen.panels) > 30
    empty = [text for text, values in seen.panels.items() if all(map(math.isnan, values))]
    assert empty == []


def test_every_rule_works_on_data_that_there_is(seen: Seen) -> None:
    assert [rule["name"] for rule in seen.rules if rule["health"] != "ok"] == []
    assert len(seen.selectors) > 20
    assert [selector for selector, count in seen.selectors.items() if not count] == []
