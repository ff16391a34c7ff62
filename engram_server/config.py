"""Options from a TOML file and the environment, under what the command line says.

A command defines its options once, for argparse. Each has the name of its flag in the table of the command, with or
without underscores for the hyphens, and an environment variable: `--cache-bytes` of `serve` is `cache-bytes` in
`[serve]` and ENGRAM_SERVE_CACHE_BYTES. The command line goes before the environment, that before the file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_UNSET: Any = object()
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")
_NOT_OURS = re.compile(r"CONFIG|(SERVICE_(HOST|PORT)|PORT)(_.*)?")
"""After the prefix: the file, and what Kubernetes tells of a service whose name makes the same prefix."""
_NOT_CONFIGURABLE = ("help", "config")


class ConfigError(ValueError):
    """A file or a variable that configures nothing, or not what it could."""


@dataclass(frozen=True)
class Setting:
    """The effective value of one option."""

    key: str
    value: Any
    source: str
    """`command line`, `default`, the name of a variable, or the file."""


class Configurable:
    """The options of one command, wherever they are given."""

    def __init__(self, parser: argparse.ArgumentParser, command: str) -> None:
        """Takes over the defaults of a parser that has all its options. Adds --config to it."""
        self._command = command
        self._prefix = f"ENGRAM_{command.upper()}_"
        parser.add_argument(
            "--config",
            type=Path,
            metavar="FILE",
            help=f"TOML file whose table [{command}] has options by the names of their flags; each can also be "
            f"given as {self._prefix}..., such as {self._prefix}CONFIG. `engram-server config` shows what they come to",
        )
        self._actions = {_key(action): action for action in parser._actions if _configurable(action)}
        self._defaults = {key: action.default for key, action in self._actions.items()}
        for action in self._actions.values():
            action.default = None if _is_list(action) else _UNSET

    def resolve(
        self, options: argparse.Namespace, environ: Mapping[str, str] = os.environ
    ) -> tuple[Setting, ...]:
        """Set in `options` what its command line left open. Raises ConfigError, OSError for an unreadable file."""
        named = environ.get(f"{self._prefix}CONFIG", "") if options.config is None else options.config
        given = self._from_file(Path(named)) if named != "" else {}
        given |= self._from_environment(environ)
        settings = []
        for key, action in self._actions.items():
            value = getattr(options, action.dest)
            if value is not _UNSET and not (value is None and _is_list(action)):
                setting = Setting(key, value, "command line")
            elif key in given:
                setting = given[key]
            else:
                setting = Setting(key, self._defaults[key], "default")
            setattr(options, action.dest, setting.value)
            settings.append(setting)
        return tuple(settings)

    def _from_file(self, path: Path) -> dict[str, Setting]:
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # no TOML, or no UTF-8
            raise ConfigError(f"{path}: {error}") from error
        for name in document:
            if name != self._command:
                raise ConfigError(f"{path}: there is no table [{name}]; options stand in [{self._command}]")
        table = document.get(self._command, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {self._command} is no table; write [{self._command}]")
        settings = {}
        for name, value in table.items():
            where = f"{path}: {name}"
            key = self._known(name.replace("_", "-"), where)
            if key in settings:
                raise ConfigError(f"{where} is given twice, with hyphens and with underscores")
            settings[key] = Setting(key, _from_toml(self._actions[key], value, where), str(path))
        return settings

    def _from_environment(self, environ: Mapping[str, str]) -> dict[str, Setting]:
        settings = {}
        for name, text in environ.items():
            if not name.startswith(self._prefix) or _NOT_OURS.fullmatch(name.removeprefix(self._prefix)):
                continue
            key = self._known(name.removeprefix(self._prefix).replace("_", "-").lower(), name)
            settings[key] = Setting(key, _from_text(self._actions[key], text, name), name)
        return settings

    def _known(self, key: str, where: str) -> str:
        if key in self._actions:
            return key
        close = difflib.get_close_matches(key, self._actions, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(self._actions)}"
        raise ConfigError(f"{where} is no option of `engram-server {self._command}`{hint}")


def as_toml(command: str, settings: tuple[Setting, ...]) -> Iterator[str]:
    """Lines of a file that gives a command these settings, each with its source."""
    lines = [(f"{setting.key} = {_toml(setting)}", setting) for setting in settings]
    width = max(len(text) for text, _ in lines)
    yield f"[{command}]"
    for text, setting in lines:
        unset = "# " if setting.value is None else ""
        yield f"{unset + text:<{width + 2}}  # {_one_line(setting.source)}"


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _toml(setting: Setting) -> str:
    value = setting.value
    if value is None:
        return ""
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{', '.join(_toml(Setting(setting.key, one, '')) for one in value)}]"
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{setting.key}: {text!r} is not UTF-8, which TOML must be") from None
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _configurable(action: argparse.Action) -> bool:
    return action.dest not in _NOT_CONFIGURABLE


def _key(action: argparse.Action) -> str:
    return action.dest.replace("_", "-")


def _is_list(action: argparse.Action) -> bool:
    return isinstance(action.default, list) or isinstance(action, argparse._AppendAction)


def _is_flag(action: argparse.Action) -> bool:
    return isinstance(action, argparse._StoreTrueAction)


def _from_toml(action: argparse.Action, value: Any, where: str) -> Any:
    if _is_flag(action):
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is {value!r}: expected true or false")
        return value
    if _is_list(action):
        if not isinstance(value, list):
            raise ConfigError(f"{where} is {value!r}: expected a list")
        return [_parsed(action, _scalar(one, where), where) for one in value]
    return _parsed(action, _scalar(value, where), where)


def _scalar(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{where} is {value!r}: expected one text or number")
    return str(value)


def _from_text(action: argparse.Action, text: str, where: str) -> Any:
    if _is_flag(action):
        if text.lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{where} is {text!r}: expected {_TRUE[0]} or {_FALSE[1]}")
        return text.lower() in _TRUE
    if _is_list(action):
        return [_parsed(action, one, where) for one in text.split(os.pathsep) if one]
    return _parsed(action, text, where)


def _parsed(action: argparse.Action, text: str, where: str) -> Any:
    """As argparse would."""
    parse: Any = action.type or str
    try:
        value = parse(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (TypeError, ValueError):
        name = getattr(parse, "__name__", repr(parse))
        raise ConfigError(f"{where}: {text!r} is not a valid {name}") from None
    if action.choices is not None and value not in action.choices:
        raise ConfigError(f"{where}: {text!r} is not one of {', '.join(map(str, action.choices))}")
    return value
