"""The house itself: files that must agree and that nothing else compares."""

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PACKAGES = [ROOT / package for package in PYPROJECT["tool"]["scikit-build"]["wheel"]["packages"]]


def test_generated_protocol_code_is_that_of_the_proto_file(tmp_path: Path) -> None:
    command = [ROOT / "scripts" / "proto.sh", tmp_path]
    subprocess.run(command, check=True, env={**os.environ, "PYTHON": sys.executable})
    generated = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in ROOT.glob("client/engram_client/_proto/engram_pb2*")}
    assert generated == committed, "run `make proto` and commit what it changed"


def test_installed_version_is_the_projects_and_has_a_changelog_entry() -> None:
    version = PYPROJECT["project"]["version"]
    assert importlib.metadata.version("engram-server") == version
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_public_package_is_typed_and_checked(package: Path) -> None:
    assert (package / "py.typed").exists()
    assert package.name in PYPROJECT["tool"]["mypy"]["packages"]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_importing_a_package_imports_no_torch(package: Path) -> None:
    code = f"import sys, {package.name}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_dependency_is_pinned() -> None:
    """What `make` installs must not depend on the day it is run."""
    project, groups = PYPROJECT["project"], PYPROJECT["dependency-groups"]
    requirements = [*project["dependencies"], *PYPROJECT["build-system"]["requires"]]
    for extra in project["optional-dependencies"].values():
        requirements += extra
    for group in groups.values():
        requirements += [item for item in group if isinstance(item, str)]
    pins = {_name(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert {_name(requirement) for requirement in requirements} - pins == set()


def test_every_make_target_is_documented() -> None:
    targets = re.findall(r"^\.PHONY: ([\w-]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {"test", "test-asan"} <= set(targets)
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    assert [target for target in targets if f"make {target}" not in text] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0].lower().replace("_", "-")
