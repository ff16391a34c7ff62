"""Whether a server and an engine mean the same rows: compared once, before the first of them is used."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engram_client._description import Description
from engram_client._errors import MismatchError
from engram_client.adapters._settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class EngineFacts:
    """What an engine derived for itself, from its own config and tokenizer."""

    rows: Mapping[int, int]
    """By layer, in the order of the hash's layers: rows of its table."""
    head_dim: int
    token_map: NDArray[np.integer]
    """[token ids]: class of each."""
    primes: NDArray[np.integer]
    """[layers, columns]"""
    multipliers: NDArray[np.integer]
    """[layers, shifts]"""
    pad_class: int
    image_token_id: int

    @property
    def token_map_digest(self) -> bytes:
        """See Description.token_map_digest."""
        return hashlib.sha256(self.token_map.astype("<i4").tobytes()).digest()

    @property
    def hash_digest(self) -> bytes:
        """sha256 of layers, primes, multipliers, pad class and image id as little-endian int64."""
        parts: Sequence[object] = (
            list(self.rows),
            self.primes,
            self.multipliers,
            self.pad_class,
            self.image_token_id,
        )
        numbers = np.concatenate([np.asarray(part, dtype="<i8").reshape(-1) for part in parts])
        return hashlib.sha256(numbers.tobytes()).digest()


def agree(
    server: Description, engine: EngineFacts, checkpoint: str, settings: Settings, log: logging.Logger = _log
) -> None:
    """Shake hands, and say in the engine's log that its rows come from a server.

    checkpoint: the engine's directory, or a name. Raises MismatchError as `check` does.
    """
    tables = known_tables(checkpoint, tuple(engine.rows), settings)
    targets = ", ".join(settings.targets)
    check(server, engine, tables, targets)
    log.info(
        "Engram rows of layers %s come from %s; table digests compared: %s",
        ", ".join(map(str, engine.rows)),
        targets,
        ", ".join(map(str, sorted(tables))) or "none",
    )


def check(server: Description, engine: EngineFacts, tables: Mapping[int, bytes], target: str) -> None:
    """Raise MismatchError, naming all that differs, unless the server's rows are the engine's.

    tables: digests of the engine's own tables, or those pinned, as far as there are any.
    """
    differing = [f"layer {layer} is not served" for layer in engine.rows if layer not in server.tables]
    for layer, rows in engine.rows.items():
        if layer in server.tables and server.tables[layer].rows != rows:
            differing.append(
                f"layer {layer} has {server.tables[layer].rows} rows there and {rows} in the engine's config"
            )
    if server.model.head_dim != engine.head_dim:
        differing.append(f"rows have {server.model.head_dim} values there and {engine.head_dim} here")
    if not server.token_map_digest:
        differing.append("the server has no tokenizer: start it with --tokenizer")
    else:
        differing += _compare("token map", server.token_map_digest, engine.token_map_digest)
        differing += _compare("hash", server.hash_digest, engine.hash_digest)
    for layer, digest in tables.items():
        if layer in server.tables:
            kind = server.tables[layer].kind
            differing += _compare(
                f"table of layer {layer} ({kind} there)", server.tables[layer].digest, digest
            )
    if differing:
        raise MismatchError(
            "this server would give the engine other rows than its own: "
            + "; ".join(differing)
            + ". Serve the checkpoint that the engine runs, or a store converted from it",
            target=target,
        )


def known_tables(checkpoint: str, layers: Sequence[int], settings: Settings) -> dict[int, bytes]:
    """Digests that the server's tables must have: those pinned, or else those of the engine's checkpoint.

    A checkpoint whose shards with the tables are not on this machine is no error: it need not hold them. It reads
    4,096 rows of each table that is there.
    """
    if settings.pins:
        return {layer: settings.pins[layer] for layer in layers if layer in settings.pins}
    digests = _digests_of(Path(checkpoint))
    missing = [str(layer) for layer in layers if layer not in digests]
    if missing:
        _log.warning(
            "%s does not hold the Engram tables of layers %s: the server's are believed to be the right ones. "
            "ENGRAM_SERVER_PIN names their digests",
            checkpoint,
            ", ".join(missing),
        )
    return {layer: digests[layer] for layer in layers if layer in digests}


def _digests_of(checkpoint: Path) -> dict[int, bytes]:
    if not (checkpoint / "config.json").is_file():
        return {}  # the name of a repository, whose files the engine keeps wherever it does
    from engram_server.spec import EngramSpec
    from engram_server.tables.checkpoint import locate, read_table
    from engram_server.tables.inspect import sampled_rows

    digests = {}
    try:
        spec, source = EngramSpec.from_file(checkpoint), locate(checkpoint)
        for layer in spec.layers:
            table = read_table(source, spec, layer)
            digests[layer] = spec.table_digest(layer, table.row_bytes, sampled_rows(spec, table))
    except (OSError, ValueError) as error:
        _log.info("the Engram tables of %s cannot be read here: %s", checkpoint, error)
    return digests


def _compare(name: str, server: bytes, engine: bytes) -> list[str]:
    if server == engine:
        return []
    return [f"the digest of the {name} is {server.hex()}, and {engine.hex()} in the engine"]
