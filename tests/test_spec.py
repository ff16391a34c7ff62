"""EngramSpec: model facts from a config.json."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.facts import FACTS, LAYOUTS, nested_config, text_config
from oracles.hashing import first_primes

from engram_server.spec import V41_TOKEN_MAP_SHA256, EngramSpec, SpecError


def flat_config(layout: str = "released") -> dict[str, Any]:
    return {"model_type": "deepseek_v41", "image_token_id": FACTS["image_token_id"], **text_config(layout)}


def with_text(**changes: Any) -> dict[str, Any]:
    config = nested_config()
    config["text_config"].update(changes)
    return config


def small_config(engram_vocab_size: int, **changes: Any) -> dict[str, Any]:
    """A consistent config of another size: its row counts come from the oracle's primes."""
    text = text_config() | {"engram_vocab_size": engram_vocab_size} | changes
    layers = len(text["engram_layer_ids"])
    columns = (text["engram_max_ngram_size"] - 1) * text["engram_n_heads"]
    primes = first_primes(engram_vocab_size, layers * columns)
    text["engram_num_embeddings"] = [sum(primes[i * columns : (i + 1) * columns]) for i in range(layers)]
    return {"model_type": "deepseek_v41", "image_token_id": 129264, "text_config": text}


@pytest.mark.parametrize("layout", ["released", "small"])
def test_layout_is_the_published_one(layout: str) -> None:
    spec = EngramSpec.from_config(nested_config(layout))
    published = LAYOUTS[layout]
    assert spec.layers == (1, 14)
    assert spec.orders == (2, 3, 4)
    assert spec.columns == 24
    for i, layer in enumerate(("1", "14")):
        assert list(spec.primes[i]) == published["primes"][layer]
        assert spec.rows[i] == published["rows_per_layer"][layer]
        assert spec.rows_of(int(layer)) == published["rows_per_layer"][layer]
        assert list(spec.multipliers[i]) == FACTS["multipliers"][layer]
        assert list(spec.offsets[i]) == [sum(spec.primes[i][:column]) for column in range(24)]


def test_frozen_multipliers_are_what_the_drawing_rule_gives() -> None:
    spec = EngramSpec.from_config(nested_config())
    bound = ((2**63 - 1) // spec.compressed_vocab_size) // 2
    for layer, multipliers in zip(spec.layers, spec.multipliers, strict=True):
        draws = np.random.default_rng(10007 * layer).integers(0, bound, size=4, dtype=np.int64)
        assert list(multipliers) == [int(draw) * 2 + 1 for draw in draws]


def test_flat_and_nested_configs_and_both_pad_keys_mean_the_same() -> None:
    spec = EngramSpec.from_config(nested_config())
    other_pad = nested_config()
    other_pad["text_config"]["engram_pad_id"] = other_pad["text_config"].pop("engram_pad_token_id")
    both_pads = with_text(engram_pad_id=2)
    assert EngramSpec.from_config(flat_config()) == spec
    assert EngramSpec.from_config(other_pad) == spec
    assert EngramSpec.from_config(both_pads) == spec


def test_another_size_gives_the_primes_above_it() -> None:
    config = small_config(50, engram_layer_ids=[0, 3, 7], engram_max_ngram_size=3, engram_n_heads=5)
    spec = EngramSpec.from_config(config)
    assert [prime for primes in spec.primes for prime in primes] == first_primes(50, 30)
    assert spec.columns == 10
    assert len(spec.multipliers[0]) == 3


@pytest.mark.parametrize("layer", [0, 1, 7, 14])
@pytest.mark.parametrize("classes", [1, 2, 99_092, 2**31 - 1])
def test_no_product_of_multiplier_and_class_leaves_63_bits(layer: int, classes: int) -> None:
    config = small_config(50, engram_layer_ids=[layer], engram_compressed_vocab_size=classes)
    (multipliers,) = EngramSpec.from_config(config).multipliers
    assert all(factor % 2 == 1 and factor * (classes - 1) < 2**63 for factor in multipliers)


def test_only_a_v41_vocabulary_is_v41() -> None:
    assert EngramSpec.from_config(nested_config()).is_v41
    assert EngramSpec.from_config(nested_config("small")).is_v41
    assert EngramSpec.from_config(flat_config() | {"model_type": "deepseek_v41_text"}).is_v41
    assert not EngramSpec.from_config(small_config(50, engram_compressed_vocab_size=99_091)).is_v41
    assert not EngramSpec.from_config(flat_config() | {"model_type": "another"}).is_v41
    assert FACTS["token_map_sha256_int32_le"] == V41_TOKEN_MAP_SHA256


@pytest.mark.parametrize("key", sorted(text_config()))
def test_a_missing_key_is_refused_by_name(key: str) -> None:
    config = nested_config()
    del config["text_config"][key]
    with pytest.raises(SpecError, match=key):
        EngramSpec.from_config(config)


@pytest.mark.parametrize(
    "key", ["engram_seed", "engram_kernel_size", "engram_rotation", "engram_use_rotary_hash", "engram_rot"]
)
def test_a_key_of_another_model_is_refused_by_name(key: str) -> None:
    with pytest.raises(SpecError, match=f"{key}, which .* another model"):
        EngramSpec.from_config(with_text(**{key: None}))
    with pytest.raises(SpecError, match=key):
        EngramSpec.from_config(nested_config() | {key: None})


def test_a_key_that_only_sounds_like_rotation_is_not_refused() -> None:
    EngramSpec.from_config(with_text(engram_protocol=1))


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ([], "not a JSON object"),
        (with_text() | {"text_config": 3}, "text_config is not a JSON object"),
        (with_text(engram_layer_ids=[]), "lists 0 layers"),
        (with_text(engram_layer_ids=[14, 1]), "must ascend"),
        (with_text(engram_layer_ids=[1, 1]), "must ascend"),
        (with_text(engram_layer_ids=[1, "14"]), "engram_layer_ids is '14'; expected an integer"),
        (with_text(engram_layer_ids=[-1, 14]), "engram_layer_ids is -1"),
        (with_text(engram_max_ngram_size=1), "engram_max_ngram_size is 1; expected 2 to 8"),
        (with_text(engram_n_heads=True), "engram_n_heads is True; expected an integer"),
        (with_text(engram_n_heads=8.0), "engram_n_heads is 8.0; expected an integer"),
        (with_text(engram_head_dim=128), "engram_head_dim is 128; only rows of 256"),
        (with_text(engram_vocab_size=2**31 + 1), "engram_vocab_size is 2147483649; expected 2 to 2147483648"),
        (with_text(engram_pad_id=3), "engram_pad_token_id and engram_pad_id different values"),
        (with_text(image_token_id=1), "image_token_id and image_token_id different values"),
        (nested_config() | {"image_token_id": -1}, "image_token_id is -1"),
        (nested_config() | {"model_type": 7}, "model_type is not a string"),
        (with_text(engram_num_embeddings=[384006168, 384016681]), "384016681.*contradicts itself"),
        (with_text(engram_num_embeddings=[384006168]), r"\[384006168\], but .*contradicts itself"),
        (with_text(engram_num_embeddings=384006168), "contradicts itself"),
        (with_text(engram_vocab_size=200_000), "engram_vocab_size 200000 sum to .*contradicts itself"),
        (with_text(engram_n_heads=64, engram_layer_ids=list(range(200))), "over the limit of 4096"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_with_a_sentence(config: Any, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        EngramSpec.from_config(config)


def test_files_and_directories_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(nested_config()))
    spec = EngramSpec.from_config(nested_config())
    assert EngramSpec.from_file(tmp_path) == spec
    assert EngramSpec.from_file(tmp_path / "config.json") == spec
    assert EngramSpec.from_file(tmp_path / "model-00047-of-00048.safetensors") == spec


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read .*config.json: No such file"),
        (b"", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "config.json: the config has no engram_layer_ids"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not JSON"),
    ],
)
def test_an_unreadable_config_names_the_file(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SpecError, match=sentence):
        EngramSpec.from_file(tmp_path)


def test_an_overlong_config_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(SpecError, match=r"^\S*config\.json is larger than"):
        EngramSpec.from_file(tmp_path)


def test_hash_digest_covers_what_decides_a_row_id() -> None:
    spec = EngramSpec.from_config(nested_config())
    numbers = [1, 14]
    for layer in ("1", "14"):
        numbers += FACTS["primes"][layer]
    for layer in ("1", "14"):
        numbers += FACTS["multipliers"][layer]
    numbers += [2, 129264]
    assert spec.hash_digest(2) == hashlib.sha256(struct.pack(f"<{len(numbers)}q", *numbers)).digest()
    assert spec.hash_digest(3) != spec.hash_digest(2)


def test_table_digest_covers_identity_and_sampled_rows() -> None:
    spec = EngramSpec.from_config(nested_config())
    head = struct.pack("<IQI", 14, FACTS["rows_per_layer"]["14"], 136)
    assert spec.table_digest(14, 136, b"rows") == hashlib.sha256(head + b"rows").digest()
    ids = spec.digest_rows(14)
    assert ids.shape == (4096,)
    assert ids[0] == 0
    assert ids[1] == 384016682 // 4096
    assert ids[4095] == 4095 * 384016682 // 4096
    with pytest.raises(KeyError):
        spec.rows_of(2)
