"""The n-gram hash: token ids of many sequences -> row ids and image mask."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracles import hashing as oracle
from oracles.facts import FACTS, LAYOUTS

from engram_kernels._core import NgramHash

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""(tokens, history) of each sequence."""

PAD, IMAGE = 2, 9


def build(model: oracle.Model) -> NgramHash:
    return NgramHash(
        token_map=np.asarray(model.token_map, dtype=np.int32),
        pad_class=model.pad_class,
        image_token_id=model.image_token_id,
        multipliers=np.asarray(model.multipliers, dtype=np.uint64),
        primes=np.asarray(model.primes, dtype=np.uint64),
        offsets=np.asarray(model.offsets, dtype=np.uint64),
    )


def hash_all(ngram_hash: NgramHash, sequences: Sequences) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    return ngram_hash.rows(
        tokens=np.asarray([token for tokens, _ in sequences for token in tokens], dtype=np.int32),
        lengths=np.asarray([len(tokens) for tokens, _ in sequences], dtype=np.int64),
        history=np.asarray([token for _, history in sequences for token in history], dtype=np.int32),
        history_lengths=np.asarray([len(history) for _, history in sequences], dtype=np.int64),
    )


def published_model(layout: str) -> oracle.Model:
    """The published layout over class ids: each id is its own class, and one more id is the image token."""
    classes = FACTS["compressed_vocab_size"]
    return oracle.Model(
        token_map=[*range(classes), 0],
        pad_class=FACTS["pad_token_id"],
        image_token_id=classes,
        multipliers=list(FACTS["multipliers"].values()),
        primes=list(LAYOUTS[layout]["primes"].values()),
    )


def model_of(max_ngram_size: int, heads: int, layers: int) -> oracle.Model:
    """Ten token ids, two of them of one class; small distinct primes."""
    columns = (max_ngram_size - 1) * heads
    primes = oracle.first_primes(31, layers * columns)
    return oracle.Model(
        token_map=[0, 1, 2, 3, 4, 1, 6, 5, 7, 8],
        pad_class=PAD,
        image_token_id=IMAGE,
        multipliers=[
            [2**40 * (3 * layer + shift) + 7919 * shift + 1 for shift in range(max_ngram_size)]
            for layer in range(layers)
        ],
        primes=[primes[layer * columns : (layer + 1) * columns] for layer in range(layers)],
    )


V41_SHAPE = model_of(max_ngram_size=4, heads=8, layers=2)
models = st.one_of(
    st.just(V41_SHAPE),
    st.builds(model_of, st.integers(2, 6), st.integers(1, 9), st.integers(1, 3)),
)


@st.composite
def model_and_sequences(draw: st.DrawFn) -> tuple[oracle.Model, list[tuple[list[int], list[int]]]]:
    model = draw(models)
    tokens = st.lists(st.integers(0, 9), max_size=150)
    history = st.lists(st.integers(-1, 9), max_size=model.max_ngram_size - 1)
    return model, draw(st.lists(st.tuples(tokens, history), max_size=4))


@st.composite
def model_text_and_cuts(draw: st.DrawFn) -> tuple[oracle.Model, list[int], list[int], list[int]]:
    model = draw(models)
    history = draw(st.lists(st.integers(-1, 9), max_size=model.max_ngram_size - 1))
    tokens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=150))
    sizes: list[int] = []
    while sum(sizes) < len(tokens):
        sizes.append(draw(st.integers(1, len(tokens))))
    return model, history, tokens, sizes


# ---------------------------------------------------------------------------------- published vectors


@pytest.mark.parametrize("layout", ["released", "small"])
def test_published_vectors(layout: str) -> None:
    ngram_hash = build(published_model(layout))
    for vector in LAYOUTS[layout]["vectors"]:
        newest, *older = vector["history"]
        rows, mask = hash_all(ngram_hash, [([newest], older[::-1])])
        assert rows.tolist() == [[vector["rows"]["1"], vector["rows"]["14"]]]
        assert not mask.any()


def test_one_token_repeated_has_few_distinct_ngrams() -> None:
    """From a sequence start, order n sees n of them: pads and token, then the token alone."""
    rows, _ = hash_all(build(published_model("released")), [([7] * 2048, [])])
    distinct = [[len(np.unique(rows[:, layer, column])) for column in range(24)] for layer in range(2)]
    assert distinct == [[2] * 8 + [3] * 8 + [4] * 8] * 2


# --------------------------------------------------------------------------------- the history rule


@given(model_and_sequences())
def test_sequences_of_one_call_equal_the_oracle(
    case: tuple[oracle.Model, list[tuple[list[int], list[int]]]],
) -> None:
    model, sequences = case
    expected_rows: list[list[list[int]]] = []
    expected_mask: list[bool] = []
    for tokens, history in sequences:
        sequence_rows, sequence_mask = oracle.hash_sequence(model, tokens, history)
        expected_rows += sequence_rows
        expected_mask += sequence_mask
    rows, mask = hash_all(build(model), sequences)
    assert rows.shape == (len(expected_mask), len(model.primes), len(model.primes[0]))
    assert rows.dtype == np.int64
    assert mask.dtype == np.bool_
    assert rows.tolist() == expected_rows
    assert mask.tolist() == expected_mask


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 700])
@pytest.mark.parametrize("shape", [(4, 8, 2), (3, 5, 1)])
def test_long_sequences_equal_the_oracle(length: int, shape: tuple[int, int, int]) -> None:
    """Longer than the blocks that the hash works in, with images on and around their edges."""
    model = model_of(*shape)
    rng = np.random.default_rng(length)
    tokens = rng.integers(0, 9, size=length)
    tokens[rng.random(length) < 0.1] = IMAGE
    rows, mask = hash_all(build(model), [(tokens.tolist(), [5, -1])])
    assert (rows.tolist(), mask.tolist()) == oracle.hash_sequence(model, tokens.tolist(), [5, -1])


@given(model_text_and_cuts())
def test_any_chunking_equals_one_pass(case: tuple[oracle.Model, list[int], list[int], list[int]]) -> None:
    """Each chunk gets the look-back a caller has: the ids before it, as many as are used and exist."""
    model, history, tokens, sizes = case
    ngram_hash = build(model)
    known = [*history, *tokens]
    chunks = []
    begin = len(history)
    for size in sizes:
        end = min(begin + size, len(known))
        chunks.append((known[begin:end], known[max(0, begin - model.max_ngram_size + 1) : begin]))
        begin = end
    one_pass, mask = hash_all(ngram_hash, [(tokens, history)])
    one_call, mask_one_call = hash_all(ngram_hash, chunks)
    by_call = [hash_all(ngram_hash, [chunk]) for chunk in chunks]
    np.testing.assert_array_equal(one_call, one_pass)
    np.testing.assert_array_equal(np.concatenate([rows for rows, _ in by_call]), one_pass)
    np.testing.assert_array_equal(mask_one_call, mask)
    np.testing.assert_array_equal(np.concatenate([part for _, part in by_call]), mask)
    assert one_pass.tolist() == oracle.hash_sequence(model, tokens, history)[0]


def last_rows(tokens: Sequence[int], history: Sequence[int]) -> list[list[int]]:
    """[layer][column] rows of the last token of one sequence."""
    rows: list[list[list[int]]] = hash_all(build(V41_SHAPE), [(tokens, history)])[0].tolist()
    return rows[-1]


def rows_of_classes(*newest_first: int) -> list[list[int]]:
    """The oracle's rows of one n-gram."""
    return oracle.rows_of(V41_SHAPE, newest_first)


def test_before_the_sequence_lies_padding() -> None:
    assert last_rows([3], []) == rows_of_classes(3, PAD, PAD, PAD)
    assert last_rows([3], [4]) == rows_of_classes(3, 4, PAD, PAD)
    assert last_rows([3], [4, 6]) == rows_of_classes(3, 6, 4, PAD)


def test_history_is_oldest_first() -> None:
    assert last_rows([3], [0, 4, 6]) == rows_of_classes(3, 6, 4, 0)


def test_an_image_hides_everything_older() -> None:
    assert last_rows([0, IMAGE, 3], [1]) == rows_of_classes(3, PAD, PAD, PAD)
    assert last_rows([IMAGE, 4, 3], [0, 1]) == rows_of_classes(3, 4, PAD, PAD)
    assert last_rows([3], [0, IMAGE, 4]) == rows_of_classes(3, 4, PAD, PAD)
    assert last_rows([3], [IMAGE, 0, 4]) == rows_of_classes(3, 4, 0, PAD)


def test_an_image_position_is_all_padding_and_masked() -> None:
    rows, mask = hash_all(build(V41_SHAPE), [([3, IMAGE, 4], [0, 1, 6])])
    assert rows[1].tolist() == rows_of_classes(PAD, PAD, PAD, PAD)
    assert mask.tolist() == [False, True, False]


def test_an_unknown_id_pads_its_own_shift_only() -> None:
    assert last_rows([3], [0, -1, 4]) == rows_of_classes(3, 4, PAD, 0)
    assert last_rows([3], [0, 4, -1]) == rows_of_classes(3, PAD, 4, 0)
    assert last_rows([3], [IMAGE, -1, 4]) == rows_of_classes(3, 4, PAD, PAD)


def test_ids_of_one_class_hash_alike() -> None:
    rows, _ = hash_all(build(V41_SHAPE), [([1], []), ([5], [])])
    assert rows[0].tolist() == rows[1].tolist()


def test_nothing_asked_is_nothing_answered() -> None:
    cases: list[Sequences] = [[], [([], [])], [([], [1, 2, 3]), ([], [])]]
    for sequences in cases:
        rows, mask = hash_all(build(V41_SHAPE), sequences)
        assert rows.shape == (0, 2, 24)
        assert mask.shape == (0,)


# ------------------------------------------------------------------------------------- exact modulo

R_MAX = 2**63 - 1
PRIME_MAX = 2**32 - 1


def remainders(values: Sequence[int], moduli: Sequence[int]) -> list[list[int]]:
    """[value][modulus]: class 1 times multiplier r, XOR class 0, is r itself; offsets taken off again."""
    model = oracle.Model(
        token_map=[0, 1, 0],
        pad_class=0,
        image_token_id=2,
        multipliers=[[value, 0] for value in values],
        primes=[list(moduli)] * len(values),
    )
    rows, _ = hash_all(build(model), [([1], [])])
    return [[int(row) for row in line] for line in rows[0] - np.asarray(model.offsets)]


def test_modulo_is_exact_where_a_reciprocal_is_tightest() -> None:
    moduli = [2, 3, 5, 7, 16000057, 16000889]
    moduli += [2**bits + near for bits in range(2, 32) for near in (-1, 0, 1)]
    moduli += [4294967291, PRIME_MAX - 1, PRIME_MAX]
    values = {0, 1, R_MAX - 1, R_MAX, 2**62, 2**32, 2**32 - 1}
    for modulus in moduli:
        largest = R_MAX // modulus
        values |= {times * modulus + near for times in (1, largest // 2, largest) for near in (-1, 0, 1)}
    tried = sorted(value for value in values if value <= R_MAX)
    assert remainders(tried, moduli) == [[value % modulus for modulus in moduli] for value in tried]


@given(
    st.lists(st.integers(0, R_MAX), min_size=1, max_size=8),
    st.lists(st.integers(2, PRIME_MAX), min_size=1, max_size=20),
)
def test_modulo_is_exact(values: list[int], moduli: list[int]) -> None:
    assert remainders(values, moduli) == [[value % modulus for modulus in moduli] for value in values]


# -------------------------------------------------------------------------------------- bad requests


@pytest.mark.parametrize(
    ("sequences", "sentence"),
    [
        ([([3, 10], [])], r"sequence 0, position 1: token id 10 is not in 0\.\.9$"),
        ([([3], []), ([4, 4, -1], [])], r"sequence 1, position 2: token id -1 is not in 0\.\.9$"),
        ([([0] * 130 + [2**31 - 1], [])], "sequence 0, position 130: token id 2147483647"),
        (
            [([3], []), ([3], [4, -2])],
            r"sequence 1, position -1 \(history\): token id -2 is not in 0\.\.9, nor -1",
        ),
        ([([3], [10, 4, 4])], r"sequence 0, position -3 \(history\): token id 10"),
        ([([], [10])], r"sequence 0, position -1 \(history\): token id 10"),
        ([([3], []), ([3], [1, 1, 1, 1])], "sequence 1: 4 history ids; at most 3"),
    ],
)
def test_a_bad_id_is_named_with_its_place(sequences: Sequences, sentence: str) -> None:
    ngram_hash = build(V41_SHAPE)
    with pytest.raises(ValueError, match=sentence):
        hash_all(ngram_hash, sequences)
    rows, _ = hash_all(ngram_hash, [([3], [])])
    assert rows[0].tolist() == rows_of_classes(3, PAD, PAD, PAD)


@pytest.mark.parametrize(
    ("lengths", "history_lengths", "sentence"),
    [
        ([2], [1, 0], "1 lengths, but 2 history lengths"),
        ([1], [2], "the token lengths leave 1 ids over"),
        ([3], [2], "sequence 0: the token length is 3, but 2 ids are left"),
        ([1, 2], [1, 1], "sequence 1: the token length is 2, but 1 ids are left"),
        ([-1, 3], [1, 1], "sequence 0: the token length is -1"),
        ([2], [1], "the history lengths leave 1 ids over"),
        ([2], [3], "sequence 0: the history length is 3, but 2 ids are left"),
        ([1, 1], [3, -1], "sequence 0: the history length is 3"),
        ([1, 1], [2, -1], "sequence 1: the history length is -1"),
        ([], [], "the token lengths leave 2 ids over"),
        ([2**62, 2**62], [1, 1], "the token length is 4611686018427387904"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    lengths: list[int], history_lengths: list[int], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        build(V41_SHAPE).rows(
            np.asarray([3, 4], dtype=np.int32),
            np.asarray(lengths, dtype=np.int64),
            np.asarray([1, 0], dtype=np.int32),
            np.asarray(history_lengths, dtype=np.int64),
        )


def test_ids_of_another_dtype_are_refused_and_never_cast() -> None:
    one = np.ones(1, dtype=np.int64)
    none = np.zeros(0, dtype=np.int32)
    for tokens in (np.asarray([2**32 + 3]), np.asarray([3.0]), np.asarray([[3]], dtype=np.int32)):
        with pytest.raises(TypeError):
            build(V41_SHAPE).rows(tokens, one, none, 0 * one)


# -------------------------------------------------------------------------------------- bad layouts


def layout(**changes: object) -> dict[str, object]:
    """Arguments of a good NgramHash: N = 3, two heads, two layers; `changes` replace some."""
    good: dict[str, object] = {
        "token_map": np.asarray([0, 1, 2, 1], dtype=np.int32),
        "pad_class": 2,
        "image_token_id": 3,
        "multipliers": np.asarray([[3, 5, 7], [9, 11, 13]], dtype=np.uint64),
        "primes": np.asarray([[2, 3, 5, 7], [11, 13, 17, 19]], dtype=np.uint64),
        "offsets": np.asarray([[0, 2, 5, 10], [0, 11, 24, 41]], dtype=np.uint64),
    }
    return good | changes


def test_the_good_layout_is_accepted() -> None:
    NgramHash(**layout())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"token_map": np.asarray([], dtype=np.int32)}, "the token map has 0 ids"),
        ({"token_map": np.asarray([0, -1, 2, 1], dtype=np.int32)}, "negative class -1"),
        ({"pad_class": 3}, r"pad class 3 is not in 0\.\.2"),
        ({"pad_class": -1}, "pad class -1"),
        ({"pad_class": 2**32 + 2}, "pad class 4294967298"),
        ({"image_token_id": 4}, r"image token id 4 is not in 0\.\.3"),
        ({"image_token_id": -1}, "image token id -1"),
        ({"image_token_id": 2**32}, "image token id 4294967296"),
        ({"multipliers": np.asarray([[3, 5, 7]], dtype=np.uint64)}, "one line per layer"),
        ({"multipliers": np.asarray([[3], [5]], dtype=np.uint64)}, "N at least 2"),
        ({"multipliers": np.asarray([[3, 5, 2**62], [1, 1, 1]], dtype=np.uint64)}, "times class 2 exceeds"),
        ({"primes": np.asarray([[2, 3, 5, 2**32], [1, 1, 1, 1]], dtype=np.uint64)}, "prime 4294967296"),
        (
            {"primes": np.asarray([[1, 3, 5, 7], [11, 13, 17, 19]], dtype=np.uint64)},
            r"prime 1 is not in 2\.\.",
        ),
        (
            {"primes": np.asarray([[2, 3, 5], [7, 11, 13]], dtype=np.uint64)},
            r"\[layers, \(N - 1\) \* heads\]",
        ),
        ({"primes": np.asarray([[2], [3]], dtype=np.uint64)}, "at least one head"),
        (
            {"offsets": np.asarray([[0, 2, 5, 10], [0, 11, 25, 41]], dtype=np.uint64)},
            "the offset of column 2 is 25, but the primes before it sum to 24",
        ),
        (
            {"offsets": np.asarray([[17, 19, 22, 27], [0, 11, 24, 41]], dtype=np.uint64)},
            "the offset of column 0",
        ),
    ],
)
def test_a_layout_the_hash_is_not_exact_for_is_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        NgramHash(**layout(**changes))  # type: ignore[arg-type]


def test_the_largest_product_that_fits_is_accepted() -> None:
    most = (2**63 - 1) // 2
    multipliers = np.asarray([[most, most, most], [1, 1, 1]], dtype=np.uint64)
    NgramHash(**layout(multipliers=multipliers))  # type: ignore[arg-type]
    multipliers[0, 2] += np.uint64(1)
    with pytest.raises(ValueError, match="exceeds"):
        NgramHash(**layout(multipliers=multipliers))  # type: ignore[arg-type]
