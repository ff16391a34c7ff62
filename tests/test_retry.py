"""When a client tries again, with a clock of the test's own."""

import grpc
import pytest

from engram_client import (
    NO_RETRY,
    DataLossError,
    DeadlineError,
    EngramError,
    InvalidRequestError,
    MismatchError,
    OverloadedError,
    Retry,
    ServerError,
    UnavailableError,
)
from engram_client._errors import from_number, from_rpc, from_status
from engram_client._retry import Attempts
from engram_client._targets import parse_targets

GONE = UnavailableError("gone")
FULL = OverloadedError("full")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def attempts(retry: Retry, targets: int = 1, timeout_s: float | None = None) -> tuple[Attempts, Clock]:
    clock = Clock()
    return Attempts(retry, targets, timeout_s, clock=clock, jitter=lambda: 0.5), clock


def delays(tries: Attempts, clock: Clock, error: EngramError) -> list[float]:
    """The waits until the error is given up, slept through by the clock."""
    found: list[float] = []
    with pytest.raises(type(error)):  # noqa: PT012 (how many waits is the question)
        while True:
            found.append(tries.delay_after(error))
            clock.now += found[-1]
    return found


def test_overload_backs_off_exponentially_and_gives_up() -> None:
    retry = Retry(attempts=5, backoff_s=0.1, backoff_max_s=0.3, wait_for_server_s=60)
    assert delays(*attempts(retry), FULL) == pytest.approx([0.1, 0.2, 0.3, 0.3])


def test_every_target_is_tried_before_a_wait() -> None:
    retry = Retry(attempts=3, backoff_s=0.1, wait_for_server_s=0)
    assert delays(*attempts(retry, targets=3), GONE) == pytest.approx([0, 0, 0.1, 0, 0, 0.2, 0, 0])


def test_unavailable_server_is_waited_for_longer_than_attempts_say() -> None:
    retry = Retry(attempts=1, backoff_s=1.0, backoff_max_s=1.0, wait_for_server_s=5.0)
    assert sum(delays(*attempts(retry), GONE)) == pytest.approx(5.0)
    retry = Retry(attempts=1, wait_for_server_s=0)
    assert delays(*attempts(retry), GONE) == []


def told(after_s: float) -> OverloadedError:
    error = OverloadedError("full")
    error.retry_after_s = after_s
    return error


def test_an_overloaded_server_that_says_when_is_waited_for_so_long() -> None:
    retry = Retry(attempts=2, backoff_s=0.1, backoff_max_s=1.0, wait_for_room_s=3.0)
    # What it says is a lower bound: later by a quarter here, and by half at most.
    assert delays(*attempts(retry), told(0.8)) == pytest.approx([1.0, 1.0, 1.0])
    assert delays(*attempts(retry), told(0.01))[:3] == pytest.approx([0.1, 0.2, 0.4])
    for jitter, delay in ((0.0, 0.8), (0.999, 1.2)):
        tries = Attempts(retry, 1, None, jitter=lambda value=jitter: value)
        assert tries.delay_after(told(0.8)) == pytest.approx(delay, rel=1e-3)


def test_no_server_makes_a_client_wait_longer_than_it_wants() -> None:
    retry = Retry(attempts=2, backoff_s=0.1, backoff_max_s=0.4, wait_for_room_s=0.0)
    assert delays(*attempts(retry), told(3600.0)) == pytest.approx([0.5])
    tries, clock = attempts(Retry(), timeout_s=1.0)
    assert delays(tries, clock, told(2.0)) == []
    assert delays(*attempts(NO_RETRY), told(1.0)) == []


def test_jitter_halves_to_one_and_a_half() -> None:
    retry = Retry(attempts=2, backoff_s=1.0)
    for jitter, delay in ((0.0, 0.5), (0.999, 1.499)):
        tries = Attempts(retry, 1, None, jitter=lambda value=jitter: value)
        assert tries.delay_after(FULL) == pytest.approx(delay)


def test_no_try_outlives_the_deadline() -> None:
    retry = Retry(attempts=100, backoff_s=1.0, backoff_max_s=1.0, wait_for_server_s=100)
    tries, clock = attempts(retry, timeout_s=3.5)
    assert tries.remaining_s() == pytest.approx(3.5)
    assert tries.remaining_s(at_most=1.0) == pytest.approx(1.0)
    assert delays(tries, clock, GONE) == [1.0, 1.0, 1.0]
    clock.now += 1.0
    with pytest.raises(DeadlineError, match=r"3\.5 s"):
        tries.remaining_s()


@pytest.mark.parametrize(
    "error", [InvalidRequestError("x"), MismatchError("x"), DataLossError("x"), DeadlineError("x")]
)
def test_nothing_else_is_tried_again(error: EngramError) -> None:
    assert delays(*attempts(Retry()), error) == []


def test_statuses_become_exceptions() -> None:
    expected = {
        grpc.StatusCode.UNAVAILABLE: "UnavailableError",
        grpc.StatusCode.RESOURCE_EXHAUSTED: "OverloadedError",
        grpc.StatusCode.INVALID_ARGUMENT: "InvalidRequestError",
        grpc.StatusCode.FAILED_PRECONDITION: "MismatchError",
        grpc.StatusCode.DATA_LOSS: "DataLossError",
        grpc.StatusCode.DEADLINE_EXCEEDED: "DeadlineError",
        grpc.StatusCode.INTERNAL: "ServerError",
    }
    for status, name in expected.items():
        error = from_status(status, "facts", "here:1")
        assert (type(error).__name__, error.code, error.target) == (name, status.name, "here:1")
        assert type(from_number(status.value[0], "facts", "here:1")) is type(error)
        assert isinstance(error, EngramError)
    assert str(from_status(grpc.StatusCode.INTERNAL, "facts", "here:1")) == "here:1: facts"
    assert from_number(999, "facts", "here:1").code == "UNKNOWN"


def test_stream_that_ends_while_asyncio_writes_counts_as_unavailable() -> None:
    metadata = grpc.aio.Metadata()
    for details, kind in (("Internal error from Core", UnavailableError), ("a fault", ServerError)):
        error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, metadata, metadata, details)
        assert type(from_rpc(error, "here:1")) is kind


@pytest.mark.parametrize(
    ("target", "parsed"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("engram.example.com:1", "engram.example.com:1"),
        ("[::1]:50051", "[::1]:50051"),
        ("unix:/run/engram.sock", "unix:/run/engram.sock"),
        ("unix:///run/engram.sock", "unix:/run/engram.sock"),
    ],
)
def test_targets(target: str, parsed: str) -> None:
    assert parse_targets(target) == (parsed,)
    assert parse_targets([target, "a:1"]) == (parsed, "a:1")


@pytest.mark.parametrize(
    "target", ["", "localhost", ":50051", "::1:50051", "h:0", "h:65536", "h:port", "unix:", "http://h:1"]
)
def test_what_is_no_target(target: str) -> None:
    with pytest.raises(ValueError, match="is not a target: expected HOST:PORT"):
        parse_targets(target)


def test_no_targets() -> None:
    with pytest.raises(ValueError, match="no target given"):
        parse_targets([])
