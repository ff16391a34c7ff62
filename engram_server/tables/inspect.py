"""What is in a checkpoint or packed store and what is wrong with it, as far as it can be read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_server.spec import EngramSpec, SpecError
from engram_server.tables.checkpoint import (
    PlaneRef,
    Source,
    TableRef,
    check_hints,
    locate,
    quantization_hints,
    read_table,
    served_layers,
)
from engram_server.tables.errors import TableError
from engram_server.tables.layout import BACKBONE_PARTS
from engram_server.tables.store import VERSION, is_store, open_store, read_rows
from engram_server.tokens import TokenMapError, find_tokenizer, load_token_map

Report = dict[str, Any]


def inspect(path: Path) -> Report:
    """Look at a checkpoint directory, shard or packed store and report everything found, in JSON's types.

    `problems` are sentences that say why it cannot be served (empty = it can); `notes` are about what serving
    does not need. `config`, `tables` and `tokenizer` (with digests), `backbone_tensors` and `shards` are there
    as far as they could be read; of a packed store there is `store` instead of the last two. Never raises for
    malformed files.
    """
    report: Report = {"path": str(path), "problems": [], "notes": []}
    problems: list[str] = report["problems"]
    if is_store(path):
        _inspect_store(path, report)
        return report
    try:
        source = locate(path)
    except TableError as error:
        problems.append(str(error))
        return report
    try:
        spec = EngramSpec.from_file(source.config)
        report["config"] = _config_facts(spec, quantization_hints(source.config))
        report["tables"] = _tables(source, spec, problems)
        report["tokenizer"] = _tokenizer(source.root, spec, report["notes"], problems)
    except (SpecError, TableError) as error:
        problems.append(str(error))
    report["backbone_tensors"] = _backbone_tensors(source, report["notes"])
    report["shards"] = _shards(source)
    report["problems"] = list(dict.fromkeys(problems))  # two tables in a broken shard say the same
    return report


def format_report(report: Report) -> str:
    """The report as text for a terminal."""
    lines = [report["path"]]
    if store := report.get("store"):
        lines.append(
            f"  packed store, version {store['version']}, UUID {store['uuid']}, {store['bytes']:,} bytes"
        )
    if "config" in report:
        config = report["config"]
        lines.append(
            f"  config: {config['model_type']}, engram_vocab_size {config['engram_vocab_size']:,}, layers "
            f"{config['layers']}, {config['columns']} rows a token and layer"
        )
        hints = ", ".join(f"{key} {value}" for key, value in config["quantization_hints"].items())
        if "store" not in report:
            lines.append(f"  quantization hints: {hints or 'none about Engram'}")
    for table in report.get("tables", ()):
        lines.append(
            f"  layer {table['layer']}: {table['format']}, {table['rows']:,} rows of {table['row_bytes']} "
            f"bytes, {table['bytes'] / 2**30:.2f} GiB"
        )
        if "store" in report:
            lines.append(f"    pages {table['first_page']:,} to {table['first_page'] + table['pages'] - 1:,}")
        for plane in ("codes", "scales"):
            if plane not in table:
                continue
            facts = table[plane]
            lines.append(
                f"    {plane:6} {facts['shard']} at {facts['offset']:,} (mod 512: {facts['offset_mod_512']}, "
                f"mod 4096: {facts['offset_mod_4096']}), {facts['stride']} bytes a row"
            )
        lines.append(f"    digest {table['digest'] or 'not computed'}")
    if tokenizer := report.get("tokenizer"):
        lines += [
            f"  tokenizer: {tokenizer['path']}, {tokenizer['tokens']:,} tokens in {tokenizer['classes']:,} classes",
            f"    token map digest {tokenizer['token_map_digest']}",
            f"    hash digest      {tokenizer['hash_digest']}",
        ]
    for tensor in report.get("backbone_tensors", ()):
        lines.append(f"  {tensor['name']}: {tensor['dtype']}{tensor['shape']} in {tensor['shard']}")
    for shard in report.get("shards", ()):
        lines.append(
            f"  {shard['name']}: {shard['bytes'] / 2**30:.2f} GiB, {shard['tensors']} tensors, "
            f"{shard['unowned_bytes']:,} bytes in none of them"
        )
    lines += [f"  note: {note}" for note in report["notes"]]
    lines += [f"  PROBLEM: {problem}" for problem in report["problems"]]
    lines.append("  cannot be served" if report["problems"] else "  can be served")
    return "\n".join(lines)


def _inspect_store(path: Path, report: Report) -> None:
    """The header, and the rows of the digests; `verify` reads all."""
    problems: list[str] = report["problems"]
    try:
        store = open_store(path)
    except (SpecError, TableError) as error:
        problems.append(str(error))
        return
    report["store"] = {
        "version": VERSION,
        "uuid": str(store.uuid),
        "bytes": store.file_bytes,
        "token_map_sha256": store.token_map_sha256.hex(),
    }
    report["config"] = _config_facts(store.spec, {})
    report["tables"] = []
    for table in store.tables:
        digest = ""
        try:
            rows = read_rows(store, table, store.spec.digest_rows(table.layer).tolist())
            digest = store.spec.table_digest(table.layer, table.row_bytes, rows.tobytes()).hex()
            if digest != table.digest.hex():
                problems.append(f"layer {table.layer}: the rows do not give the digest in the header")
        except (OSError, TableError) as error:
            problems.append(f"layer {table.layer}: {error}")
        report["tables"].append(
            {
                "layer": table.layer,
                "format": table.kind.name,
                "rows": table.rows,
                "row_bytes": table.row_bytes,
                "bytes": table.rows * table.row_bytes,
                "first_page": table.first_page,
                "pages": table.pages,
                "digest": digest,
            }
        )
    report["tokenizer"] = _tokenizer(store.root, store.spec, report["notes"], problems)
    found = (report["tokenizer"] or {}).get("token_map_digest", "")
    if found and store.token_map_sha256 and found != store.token_map_sha256.hex():
        problems.append(f"{report['tokenizer']['path']} is not the tokenizer that the store was made with")


def _config_facts(spec: EngramSpec, hints: Mapping[str, object]) -> Report:
    return {
        "model_type": spec.model_type,
        "layers": list(spec.layers),
        "rows": list(spec.rows),
        "columns": spec.columns,
        "engram_vocab_size": spec.engram_vocab_size,
        "compressed_vocab_size": spec.compressed_vocab_size,
        "quantization_hints": {key: value for key, value in hints.items() if key.startswith("engram_")},
    }


def _tables(source: Source, spec: EngramSpec, problems: list[str]) -> list[Report]:
    """Facts of every table that is sound, and a problem for every other."""
    try:
        layers = served_layers(source, spec)
    except TableError as error:
        problems.append(str(error))
        layers = spec.layers if source.whole else ()
    tables, facts = [], []
    for layer in layers:
        try:
            tables.append(read_table(source, spec, layer))
        except TableError as error:
            problems.append(str(error))
    for table in tables:
        try:
            digest = spec.table_digest(table.layer, table.row_bytes, sampled_rows(spec, table)).hex()
        except (OSError, TableError) as error:
            problems.append(f"layer {table.layer}: {error}")
            digest = ""
        facts.append(
            {
                "layer": table.layer,
                "format": table.kind.name,
                "rows": table.rows,
                "row_bytes": table.row_bytes,
                "bytes": table.rows * table.row_bytes,
                "codes": _plane_facts(table.codes),
                "scales": _plane_facts(table.scales),
                "digest": digest,
            }
        )
    try:
        check_hints(source.config, tables)
    except TableError as error:
        problems.append(str(error))
    return facts


def _tokenizer(root: Path, spec: EngramSpec, notes: list[str], problems: list[str]) -> Report | None:
    """The tokenizer that serving would use, and the digests of the token map and the hash that follow from it."""
    path = find_tokenizer(root, None, spec)
    if path is None:
        notes.append("no tokenizer.json: only row ids can be looked up, unless serving gets --tokenizer")
        return None
    try:
        token_map = load_token_map(path, spec)
        hash_digest = spec.hash_digest(token_map.class_of(spec.pad_token_id))
    except TokenMapError as error:
        problems.append(str(error))
        return None
    return {
        "path": str(path),
        "tokens": len(token_map.ids),
        "classes": token_map.classes,
        "token_map_digest": token_map.sha256.hex(),
        "hash_digest": hash_digest.hex(),
    }


def _plane_facts(plane: PlaneRef) -> Report:
    return {
        "shard": plane.path.name,
        "offset": plane.offset,
        "offset_mod_512": plane.offset % 512,
        "offset_mod_4096": plane.offset % 4096,
        "stride": plane.stride,
    }


def sampled_rows(spec: EngramSpec, table: TableRef) -> bytes:
    """Packed bytes of the rows a table digest samples. Raises OSError or TableError."""
    ids = spec.digest_rows(table.layer)
    parts = [_read_plane(plane, ids) for plane in (table.codes, table.scales)]
    return np.concatenate(parts, axis=1).tobytes()


def _read_plane(plane: PlaneRef, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    out = np.empty((len(ids), plane.stride), dtype=np.uint8)
    with plane.path.open("rb", buffering=0) as file:
        for i, row in enumerate(ids.tolist()):
            data = os.pread(file.fileno(), plane.stride, plane.offset + row * plane.stride)
            if len(data) != plane.stride:
                raise TableError(f"{plane.path}: the file ends inside row {row}; download it again")
            out[i] = np.frombuffer(data, dtype=np.uint8)
    return out


def _backbone_tensors(source: Source, notes: list[str]) -> list[Report]:
    """The small Engram tensors. The backbone needs them, a server of rows does not: so notes, no problems."""
    found = []
    prefixes = sorted({name.rsplit(".embed.", 1)[0] for name in source.engram_tensors if ".embed." in name})
    wanted = [f"{prefix}.{part}" for prefix in prefixes for part in BACKBONE_PARTS]
    missing = [name for name in wanted if name not in source.engram_tensors]
    if missing and source.whole:
        notes.append(
            f"{source.listing} does not list {', '.join(missing)}: the backbone needs them, serving does not"
        )
    for name in wanted:
        if name in missing:
            continue
        try:
            tensor = source.tensor(name)
        except TableError as error:
            notes.append(f"{error} (the backbone needs {name}, serving does not)")
            continue
        shard = source.engram_tensors[name].name
        found.append({"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "shard": shard})
    return found


def _shards(source: Source) -> list[Report]:
    """Every readable file that holds Engram tensors."""
    shards = []
    for path in sorted(set(source.engram_tensors.values())):
        try:
            header = source.header(path)
        except TableError:
            continue  # told where it was needed
        shards.append(
            {
                "name": path.name,
                "bytes": header.file_bytes,
                "tensors": len(header.tensors),
                "unowned_bytes": header.unowned_bytes,
            }
        )
    return shards
