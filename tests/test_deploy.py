"""What is in deploy/, and the Dockerfile: valid by their formats' own rules, and in the words of this server."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
UNIT = DEPLOY / "systemd/engram-server.service"
PROFILE = json.loads((DEPLOY / "seccomp/engram-server.json").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yml").read_text())
KUBERNETES = {
    path: document
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
}
OLDEST_KUBERNETES = "1.29"
"""The first with native sidecars on by default."""


def configured(*arguments: object, **environ: str) -> dict[str, Any]:
    """What `serve` would serve with; an option that it does not know fails."""
    command = [sys.executable, "-m", "engram_server.cli", "config", *map(str, arguments)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ENGRAM_")}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=clean | environ, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return tomllib.loads(result.stdout)["serve"]


def in_the_image(environ: dict[str, str], *arguments: str) -> dict[str, Any]:
    """The same with the image's own file, at whatever path that has there."""
    return configured("--config", DEPLOY / "docker/engram-server.toml", *arguments, **environ)


def pod(document: dict[str, Any]) -> dict[str, Any]:
    """The pod's spec, of a Pod or of what makes them."""
    spec: dict[str, Any] = document["spec"]
    return spec["template"]["spec"] if "template" in spec else spec


def server_of(document: dict[str, Any]) -> dict[str, Any]:
    """The server's container."""
    spec = pod(document)
    (found,) = [
        c for c in spec.get("initContainers", []) + spec["containers"] if c["name"] == "engram-server"
    ]
    return found


# -------------------------------------------------------------------------------------------------- Dockerfile


def test_every_step_of_the_dockerfile_is_a_script_of_this_tree() -> None:
    steps = re.findall(r"^RUN (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert len(steps) >= 5
    scripts = [re.fullmatch(r"(?:scripts|/usr/local/sbin)/(\w+\.sh)(?: [\w/-]+)?", step) for step in steps]
    assert all(script and os.access(ROOT / "scripts" / script[1], os.X_OK) for script in scripts), steps


def test_the_image_serves_where_the_dockerfile_and_its_health_check_say() -> None:
    text = (ROOT / "Dockerfile").read_text()
    options = in_the_image({})
    assert options["metrics"] == "0.0.0.0:9464"
    assert "http://127.0.0.1:9464/readyz" in text
    assert re.search(r"^EXPOSE 50051 9464$", text, re.MULTILINE)
    assert options["listen"] == "0.0.0.0:50051"
    assert re.search(rf"^VOLUME {Path(options['uds']).parent}$", text, re.MULTILINE)


# --------------------------------------------------------------------------------------------------- container


@pytest.mark.parametrize("document", KUBERNETES.values(), ids=[path.stem for path in KUBERNETES])
@pytest.mark.parametrize("version", [OLDEST_KUBERNETES, kubernetes_validate.latest_version()])
def test_kubernetes_takes_the_manifest(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("document", KUBERNETES.values(), ids=[path.stem for path in KUBERNETES])
def test_a_pod_serves_sockets_and_metrics_and_has_time_to_drain(document: dict[str, Any]) -> None:
    container = server_of(document)
    options = in_the_image({entry["name"]: entry["value"] for entry in container["env"]})
    assert options["listen"] == "none"
    assert pod(document)["terminationGracePeriodSeconds"] > options["drain-seconds"]
    (port,) = container["ports"]
    assert options["metrics"].endswith(f":{port['containerPort']}")
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {"model": options["path"], "sockets": str(Path(options["uds"]).parent), "tmp": "/tmp"}
    assert {volume["name"] for volume in pod(document)["volumes"]} == set(mounts)
    assert container["image"] == f"engram-server:{VERSION}"


def test_an_engine_beside_the_server_finds_its_socket() -> None:
    (sidecar,) = [document for path, document in KUBERNETES.items() if path.stem == "sidecar"]
    (engine,) = pod(sidecar)["containers"]
    options = in_the_image({})
    assert engine["env"] == [{"name": "ENGRAM_SERVER_TARGET", "value": f"unix:{options['uds']}"}]
    assert {"name": "sockets", "mountPath": str(Path(options["uds"]).parent)} in engine["volumeMounts"]


def test_compose_takes_the_file() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    result = subprocess.run([*command, DEPLOY / "compose.yml"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_compose_names_files_that_are_there_and_tags_that_stay() -> None:
    mounts = [mount for service in COMPOSE["services"].values() for mount in service["volumes"]]
    files = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    profiles = re.findall(r"seccomp:(\S+)'", str(COMPOSE["services"]["engram-server"]["security_opt"]))
    assert len(files) == 3
    assert len(profiles) == 1
    assert [name for name in files + profiles if not (DEPLOY / name).exists()] == []
    for name, service in COMPOSE["services"].items():
        assert name == "engram-server" or re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name


def test_composes_server_has_options_it_knows_and_time_to_drain() -> None:
    service = COMPOSE["services"]["engram-server"]
    environ = {
        name: re.sub(r"\$\{\w+:-(\w+)\}", r"\1", value) for name, value in service["environment"].items()
    }
    options = in_the_image(environ)
    assert int(service["stop_grace_period"].removesuffix("s")) > options["drain-seconds"]


def test_ports_are_this_machines_alone() -> None:
    """There is no password in front of any of them."""
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 3
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


# ----------------------------------------------------------------------------------------------------- systemd


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unit, for the program of these tests."""
    text = UNIT.read_text()
    assert text.count("/opt/engram/bin/") == 1
    path = tmp_path_factory.mktemp("unit") / UNIT.name
    program = shutil.which("engram-server", path=Path(sys.executable).parent)
    assert program is not None
    path.write_text(text.replace("/opt/engram/bin/engram-server", program))
    return path


def test_systemd_takes_the_unit(unit: Path) -> None:
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_systemd_finds_little_exposed(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", unit]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_systemd_lets_through_what_the_seccomp_profile_does() -> None:
    """With the profile the image's tests run the server, so it needs no other calls; io_uring's are among them."""
    (filtered,) = re.findall(r"^SystemCallFilter=(.*)$", UNIT.read_text(), re.MULTILINE)
    allowed = _expanded(filtered.split())
    asked = {name for entry in PROFILE["syscalls"] for name in entry["names"]}
    assert {"io_uring_setup", "io_uring_enter", "io_uring_register"} <= asked
    assert asked - allowed == set()


def _expanded(names: list[str]) -> set[str]:
    """The system calls in the sets of systemd that are named."""
    found = set()
    for name in names:
        if name.startswith("@"):
            shown = subprocess.run(
                ["systemd-analyze", "syscall-filter", "--no-pager", name],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            found |= _expanded(
                [word for line in shown.splitlines()[1:] if (word := line.split("#")[0].strip())]
            )
        else:
            found.add(name)
    return found


def test_the_units_options_are_known_and_leave_time_to_drain() -> None:
    options = configured("--config", DEPLOY / "systemd/engram-server.toml")
    text = UNIT.read_text()
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert int(stop_s) > options["drain-seconds"]
    assert Path(options["uds"]).parent.name in re.findall(r"^RuntimeDirectory=(.*)$", text, re.MULTILINE)
    assert Path(options["hot-set"]).parent.name in re.findall(r"^StateDirectory=(.*)$", text, re.MULTILINE)
