"""Options of `serve` from a file, the environment and the command line: who wins, and what is refused."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.serving import until

from engram_server.config import ConfigError, Configurable, Setting, as_toml

COMMAND = [sys.executable, "-m", "engram_server.cli"]


def even(text: str) -> int:
    if int(text) % 2:
        raise argparse.ArgumentTypeError(f"{text} is odd")
    return int(text)


def parsed(*arguments: str, environ: dict[str, str] | None = None) -> dict[str, tuple[Any, str]]:
    """What the options of a small command come to, with their sources."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path", nargs="?")
    parser.add_argument("--io-depth", type=int, default=64)
    parser.add_argument("--even", type=even, default=2)
    parser.add_argument("--mode", choices=("a", "b"), default="a")
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--replica", type=Path, action="append", default=[])
    configurable = Configurable(parser, "serve")
    options = parser.parse_args(arguments)
    settings = configurable.resolve(options, environ or {})
    for setting in settings:
        assert getattr(options, setting.key.replace("-", "_")) == setting.value
    return {setting.key: (setting.value, setting.source) for setting in settings}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "engram.toml"


def test_without_anything_there_are_defaults() -> None:
    assert parsed() == {
        "path": (None, "default"),
        "io-depth": (64, "default"),
        "even": (2, "default"),
        "mode": ("a", "default"),
        "resident": (False, "default"),
        "replica": ([], "default"),
    }


def test_each_source_goes_before_the_next(file: Path) -> None:
    file.write_text(
        '[serve]\npath = "p"\nio-depth = 1\neven = "4"\nmode = "b"\nresident = true\nreplica = ["x", "y"]\n'
    )
    seen = parsed("--config", str(file))
    assert seen == {
        "path": ("p", str(file)),
        "io-depth": (1, str(file)),
        "even": (4, str(file)),
        "mode": ("b", str(file)),
        "resident": (True, str(file)),
        "replica": ([Path("x"), Path("y")], str(file)),
    }
    environ = {
        "ENGRAM_SERVE_CONFIG": str(file),
        "ENGRAM_SERVE_PATH": "q",
        "ENGRAM_SERVE_IO_DEPTH": "2",
        "ENGRAM_SERVE_RESIDENT": "no",
        "ENGRAM_SERVE_REPLICA": os.pathsep.join(["z", "w"]),
        "UNRELATED": "7",
    }
    seen = parsed(environ=environ)
    assert seen["path"] == ("q", "ENGRAM_SERVE_PATH")
    assert seen["io-depth"] == (2, "ENGRAM_SERVE_IO_DEPTH")
    assert seen["resident"] == (False, "ENGRAM_SERVE_RESIDENT")
    assert seen["replica"] == ([Path("z"), Path("w")], "ENGRAM_SERVE_REPLICA")
    assert seen["mode"] == ("b", str(file))
    seen = parsed("r", "--io-depth", "64", "--resident", "--replica", "v", environ=environ)
    assert seen["path"] == ("r", "command line")
    assert seen["io-depth"] == (64, "command line"), "the default, said aloud"
    assert seen["resident"] == (True, "command line")
    assert seen["replica"] == ([Path("v")], "command line"), "not added to those of the environment"


def test_a_flag_names_another_file_than_the_environment(file: Path, tmp_path: Path) -> None:
    file.write_text("[serve]\nio-depth = 1\n")
    assert (
        parsed("--config", str(file), environ={"ENGRAM_SERVE_CONFIG": str(tmp_path / "none")})["io-depth"][0]
        == 1
    )


def test_what_kubernetes_says_of_a_service_of_that_name_is_not_ours() -> None:
    names = (
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_GRPC",
        "PORT",
        "PORT_50051_TCP",
        "PORT_50051_TCP_ADDR",
    )
    assert parsed(environ={f"ENGRAM_SERVE_{name}": "tcp://10.0.0.1:50051" for name in names}) == parsed()


def test_a_folder_is_no_file() -> None:
    with pytest.raises(OSError, match="directory"):
        parsed("--config", ".")


def test_underscores_are_as_good_as_hyphens(file: Path) -> None:
    file.write_text("[serve]\nio_depth = 3\n")
    assert parsed("--config", str(file))["io-depth"] == (3, str(file))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[serve]\nio-deph = 1\n", "io-deph is no option of `engram-server serve`; did you mean io-depth?"),
        ("[serve]\nxyz = 1\n", "xyz is no option of `engram-server serve`; there are path, io-depth, even"),
        ("[serve]\nconfig = 'other'\n", "config is no option"),
        ("[server]\n", "there is no table [server]"),
        ("io-depth = 1\n", "there is no table [io-depth]; options stand in [serve]"),
        ("serve = 1\n", "serve is no table"),
        ("[serve]\nio-depth = 1\nio_depth = 2\n", "io_depth is given twice"),
        ("[serve]\nio-depth = 'many'\n", "io-depth: 'many' is not a valid int"),
        ("[serve]\nio-depth = true\n", "io-depth is True: expected one text or number"),
        ("[serve]\nio-depth = [1]\n", "io-depth is [1]: expected one text or number"),
        ("[serve]\neven = 3\n", "even: 3 is odd"),
        ("[serve]\nmode = 'c'\n", "mode: 'c' is not one of a, b"),
        ("[serve]\nresident = 1\n", "resident is 1: expected true or false"),
        ("[serve]\nreplica = 'x'\n", "replica is 'x': expected a list"),
        ("[serve]\nreplica = [[]]\n", "replica is []: expected one text or number"),
        ("[serve\n", "line 1"),
    ],
)
def test_a_file_that_says_something_else_is_refused(file: Path, text: str, complaint: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        parsed("--config", str(file))
    assert str(refused.value).startswith(f"{file}: ")
    assert complaint in str(refused.value)


def test_a_file_that_is_no_text_is_refused(file: Path) -> None:
    file.write_bytes(b"[serve]\npath = '\xff'\n")
    with pytest.raises(ConfigError, match="utf-8"):
        parsed("--config", str(file))


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "ENGRAM_SERVE_IO_DEPHT",
            "1",
            "ENGRAM_SERVE_IO_DEPHT is no option of `engram-server serve`; did you mean",
        ),
        ("ENGRAM_SERVE_IO_DEPTH", "many", "ENGRAM_SERVE_IO_DEPTH: 'many' is not a valid int"),
        ("ENGRAM_SERVE_RESIDENT", "maybe", "ENGRAM_SERVE_RESIDENT is 'maybe': expected 1 or 0"),
        ("ENGRAM_SERVE_MODE", "", "ENGRAM_SERVE_MODE: '' is not one of a, b"),
    ],
)
def test_a_variable_that_says_something_else_is_refused(name: str, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed(environ={name: text})
    assert complaint in str(refused.value)


def test_what_is_printed_reads_back_as_the_same(file: Path) -> None:
    settings = (
        Setting("path", 'a "quoted" \\ #1 \t\x7fé', "command line"),
        Setting("uds", None, "default"),
        Setting("drain-seconds", 0.5, "default"),
        Setting("resident", True, "X"),
        Setting("replica", [Path("x"), Path("y z")], str(file)),
    )
    text = "\n".join(as_toml("serve", settings))
    assert tomllib.loads(text) == {
        "serve": {
            "path": 'a "quoted" \\ #1 \t\x7fé',
            "drain-seconds": 0.5,
            "resident": True,
            "replica": ["x", "y z"],
        }
    }
    (_, line) = as_toml("serve", (Setting("io-depth", 1, "a\nb"),))
    assert line == "io-depth = 1    # a?b"
    with pytest.raises(ConfigError, match="not UTF-8"):
        list(as_toml("serve", (Setting("path", Path(os.fsdecode(b"\xff")), "command line"),)))


def run(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | environ, timeout=120
    )


def test_config_prints_a_file_that_gives_the_same_configuration(file: Path) -> None:
    first = run("config", "tables", "--cache-bytes", "3GiB", "--replica", "copy", "--resident")
    assert first.returncode == 0, first.stderr
    file.write_text(first.stdout)
    second = run("config", "--config", file)
    assert second.returncode == 0, second.stderr
    assert tomllib.loads(second.stdout) == tomllib.loads(first.stdout)
    assert tomllib.loads(second.stdout)["serve"]["cache-bytes"] == 3 << 30
    assert "command line" in first.stdout
    assert "command line" not in second.stdout
    assert str(file) in second.stdout


@pytest.mark.parametrize("command", ["serve", "config"])
def test_mistakes_are_sentences(command: str, tmp_path: Path) -> None:
    for result in (
        run(command, ENGRAM_SERVE_CACHE_BYTES="lots"),
        run(command, ENGRAM_SERVE_CASH_BYTES="1GiB"),
        run(command, "--config", tmp_path / "none"),
    ):
        assert result.returncode == 1
        assert result.stderr.startswith(f"engram-server {command}: "), result.stderr
        assert result.stderr.count("\n") == 1, result.stderr


def test_serve_without_a_path_says_where_one_can_be_given() -> None:
    result = run("serve")
    assert result.returncode == 1
    assert "ENGRAM_SERVE_PATH" in result.stderr


def test_a_flag_is_written_out() -> None:
    """A short form of today is another flag's, or nobody's, in the next version."""
    result = run("config", "--cache-byte", "1GiB")
    assert result.returncode == 2
    assert "unrecognized arguments: --cache-byte" in result.stderr


def test_a_server_runs_from_a_file_and_the_environment(fp4_checkpoint: Path, file: Path) -> None:
    file.write_text("[serve]\nlisten = '127.0.0.1:0'\ncache-bytes = '16MiB'\nshm = 'off'\n")
    environ = {"ENGRAM_SERVE_CONFIG": str(file), "ENGRAM_SERVE_PATH": str(fp4_checkpoint)}
    process = subprocess.Popen(
        [*COMMAND, "serve"], stdout=subprocess.PIPE, text=True, env=os.environ | environ
    )
    try:
        assert process.stdout is not None
        assert f"serves {fp4_checkpoint} on 127.0.0.1:" in process.stdout.readline()
        process.terminate()
        until(lambda: process.poll() is not None)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
