"""Rows asked for when a step's tokens are known, and waited for where the forward needs them."""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from engram_client._errors import DeadlineError, EngramError, InvalidRequestError, OverloadedError
from engram_client._in_place import RowsInPlace
from engram_client._query import LookupMethods
from engram_client._result import Lane, Lookup
from engram_client._sync import EngramClient
from engram_client._sync_stream import LookupStream, PendingLookup
from engram_client.torch._placing import LayerRows, Placer, RowFormat
from engram_client.torch._waits import WaitTimes
from engram_kernels.device import ScaleRule

if TYPE_CHECKING:
    from engram_client._embedded import EngramMemory

STEPS_MAX = 16
"""Steps under way at once, unless told otherwise."""
_BLOCKING_LOOKUPS = 4
"""Threads for lookups that block: two steps of two layers."""

Client: TypeAlias = "EngramClient | EngramMemory"

_Ask: TypeAlias = Callable[[LookupMethods[Any], int], Any]
"""Looks the rows of one layer of a step up, by the methods given."""
_Pending: TypeAlias = "RowsInPlace | PendingLookup | Future[Lookup]"


class RowPrefetcher:
    """Asks for the rows of whole steps ahead of the forward, and brings them to the model's device.

    `prefetch` returns at once. Each layer is a lookup of its own, in the order of `layers`: rows of the first come as
    soon as they can, those of the others while the layers before them compute. From a server on this host they come
    through shared memory, and are copied from there to where they stay; where it is not to be had, through one gRPC
    stream that stays open. Steps are answered in order: a long prompt that is to wait for its turn belongs in a
    prefetcher of its own. Safe to share between threads; not usable in a forked child; a context manager. The client is
    the caller's to close, afterwards.

        with RowPrefetcher(client, device="cuda") as prefetcher:
            step = prefetcher.prefetch(tokens, history=last_three)
            ...
            rows, mask = step.wait(14)
    """

    def __init__(
        self,
        client: Client,
        *,
        layers: Sequence[int] | None = None,
        columns: tuple[int, int] | None = None,
        device: torch.device | str = "cpu",
        row_format: RowFormat = "auto",
        unique: bool = False,
        lane: Lane = "auto",
        timeout: float | None = None,
        steps_max: int = STEPS_MAX,
        waits: WaitTimes | None = None,
        scale_rule: ScaleRule = "vllm",
    ) -> None:
        """Connects, to ask which layers there are.

        layers: those to ask for, first needed first; None = all, ascending. columns, unique, lane, timeout (seconds of
        one lookup): as for `EngramClient.lookup`; unique saves bytes on the way, for prompts over a network. steps_max:
        `prefetch` of one more raises OverloadedError. waits: where waits are counted; None = a new one, see `waits`.
        scale_rule: what scale bytes 0 and 255 stand for; another than vLLM's has rows converted here, whatever
        row_format says.

        Raises the exceptions of `EngramError`; TypeError for an AsyncEngramClient; ValueError.
        """
        if steps_max < 1:
            raise ValueError(f"steps_max is {steps_max}; at least one step must be under way")
        if inspect.iscoroutinefunction(client.describe):
            raise TypeError("a forward does not await: give an EngramClient or EngramMemory")
        description = client.describe()
        self.tables = description.tables
        """Facts of every table, by layer."""
        self.columns = columns or (0, description.model.columns)
        self.waits = waits or WaitTimes()
        """How long forwards waited, in Prometheus form."""
        self._layers = tuple(self.tables) if layers is None else tuple(layers)
        self._placer = Placer(torch.device(device), row_format, scale_rule)
        self._options: dict[str, Any] = {
            "columns": columns,
            "format": self._placer.format,
            "unique": unique,
            "lane": lane,
            "timeout": timeout,
        }
        self._steps_max = steps_max
        self._room = threading.Semaphore(steps_max)
        self._closed = False
        self._pid = os.getpid()
        # One thread asks and one places, so that both keep the order of steps and layers.
        self._asking = ThreadPoolExecutor(1, "engram-ask")
        self._placing = ThreadPoolExecutor(1, "engram-place")
        self._lookups: _Lookups = _Server(client) if isinstance(client, EngramClient) else _Threads(client)

    def prefetch(self, tokens: ArrayLike | Tensor, *, history: ArrayLike | Tensor = ()) -> PendingRows:
        """Ask for the rows of one sequence's next tokens [T], as `EngramClient.lookup`.

        Ids are copied before this returns. Raises OverloadedError when too many steps are under way, EngramError once
        closed and in a forked child, InvalidRequestError for ids that are no array; what else is wrong with the ids or
        the server is raised by `PendingRows.wait`.
        """
        return self.prefetch_batch([tokens], histories=[history])

    def prefetch_batch(
        self,
        sequences: Sequence[ArrayLike | Tensor],
        *,
        histories: Sequence[ArrayLike | Tensor] | None = None,
    ) -> PendingRows:
        """The same for several sequences, laid end to end, as `EngramClient.lookup_batch`."""
        tokens = [_host_ids(ids) for ids in sequences]
        looking_back = None if histories is None else [_host_ids(ids) for ids in histories]

        def ask(lookups: LookupMethods[Any], layer: int) -> Any:
            return lookups.lookup_batch(tokens, histories=looking_back, layers=[layer], **self._options)

        return self._start(ask, self._layers)

    def prefetch_blocks(self, blocks: Mapping[int, ArrayLike | Tensor]) -> PendingRows:
        """Ask for rows by id, {layer: ids [T, 24]}, in the mapping's order, as `EngramClient.lookup_blocks`."""
        ids = {layer: _host_ids(block) for layer, block in blocks.items()}

        def ask(lookups: LookupMethods[Any], layer: int) -> Any:
            return lookups.lookup_blocks({layer: ids[layer]}, **self._options)

        return self._start(ask, tuple(ids))

    def close(self) -> None:
        """Fail what has not been asked for yet, and wait for lookups under way."""
        self._closed = True
        self._lookups.close()
        self._asking.shutdown()
        self._placing.shutdown()
        self._placer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> Self:
        """Itself: copies of a model share it."""
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a RowPrefetcher is threads and a connection, not data: make a new one where it is wanted"
        )

    def _start(self, ask: _Ask, layers: Sequence[int]) -> PendingRows:
        if self._closed:
            raise EngramError("the prefetcher is closed")
        if self._pid != os.getpid():
            raise EngramError(
                "the prefetcher was made before a fork, and its threads stayed behind: make another"
            )
        if not self._room.acquire(blocking=False):
            raise OverloadedError(
                f"{self._steps_max} steps are under way: wait for one of them, or cancel it"
            )
        rows: dict[int, Future[LayerRows]] = {layer: Future() for layer in layers}
        try:
            self._asking.submit(self._ask, ask, rows)
        except RuntimeError:  # another thread has closed it meanwhile
            raise EngramError("the prefetcher is closed") from None
        return PendingRows(rows, self.waits)

    def _ask(self, ask: _Ask, rows: Mapping[int, Future[LayerRows]]) -> None:
        for layer, future in rows.items():
            found: _Pending | Exception
            try:
                found = self._lookups.begin(_unless_cancelled(future, ask), layer)
            except Exception as error:
                found = error
            self._placing.submit(self._place, found, future)
        # Behind the step's last layer, whatever became of it.
        self._placing.submit(self._room.release)

    def _place(self, found: _Pending | Exception, future: Future[LayerRows]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(self._placed(found))
        except Exception as error:
            ours = isinstance(error, EngramError) or not self._closed
            future.set_exception(error if ours else EngramError("the prefetcher was closed"))
        finally:
            if isinstance(found, RowsInPlace):
                found.release()

    def _placed(self, found: _Pending | Exception) -> LayerRows:
        if isinstance(found, Exception):
            raise found
        rows = found.result()
        return self._placer.place(rows, found.buffer if isinstance(found, RowsInPlace) else None)


class PendingRows:
    """The rows of one step, on their way."""

    def __init__(self, rows: Mapping[int, Future[LayerRows]], waits: WaitTimes) -> None:
        self._rows = rows
        self._waits = waits
        self._cancelled = False

    @property
    def layers(self) -> tuple[int, ...]:
        """Those asked for, in this order."""
        return tuple(self._rows)

    def done(self, layer: int) -> bool:
        """Whether `wait` would return at once."""
        return self._of(layer).done()

    def wait(self, layer: int, timeout: float | None = None) -> LayerRows:
        """Wait for the rows of a layer. They are this step's, or there is an exception: an `EngramError` says what
        went wrong with the lookup.

        After `timeout` seconds DeadlineError; the lookup goes on and may be waited for again. RuntimeError while a CUDA
        graph or a trace records, which would keep these rows for ever. The current CUDA stream, and it alone, may use
        the rows without ado.
        """
        future = self._of(layer)
        begin = time.perf_counter()
        try:
            if self._cancelled:
                raise CancelledError
            found = future.result(timeout)
        except CancelledError:
            raise EngramError("the step was cancelled: it has no rows") from None
        except DeadlineError:
            raise  # the lookup's own, which is a TimeoutError as well
        except TimeoutError:
            raise DeadlineError(f"the rows of layer {layer} did not come within {timeout} s") from None
        finally:
            self._waits.observe(layer, time.perf_counter() - begin)
        _refuse_recording(found.rows)
        if found.rows.is_cuda:
            # Made on another stream, whose next step must not be given their memory before this one is done with it.
            stream = torch.cuda.current_stream(found.rows.device)
            for tensor in (found.rows, found.mask):
                if tensor is not None:
                    tensor.record_stream(stream)
        return found

    def cancel(self) -> None:
        """Give the step up: what has not been asked for yet never is, the rest is thrown away. Waiting for it raises
        EngramError."""
        self._cancelled = True
        for future in self._rows.values():
            future.cancel()

    def _of(self, layer: int) -> Future[LayerRows]:
        if layer not in self._rows:
            asked = ", ".join(str(known) for known in self._rows)
            raise InvalidRequestError(f"layer {layer} was not asked for; this step has {asked}")
        return self._rows[layer]


class _Server:
    """Lookups at a server: in the client's shared memory, several at once; where it is not to be had, on one stream."""

    def __init__(self, client: EngramClient) -> None:
        self._client = client
        self._in_place = client.in_place()
        self._threads = _Threads(client)
        self._lock = threading.Lock()
        """Guards what follows."""
        self._stream: LookupStream | None = None
        self._closed = False

    def begin(self, ask: _Ask, layer: int) -> _Pending:
        try:
            rows: RowsInPlace = ask(self._in_place, layer)
        except InvalidRequestError:
            # Or larger than the shared memory, through which a lookup that blocks has it piece by piece.
            return self._threads.begin(ask, layer)
        if rows.over_grpc:
            pending: PendingLookup = ask(self._opened(), layer)
            return pending
        return rows if rows.buffer is not None else self._threads.submit(rows.result)

    def _opened(self) -> LookupStream:
        """The stream, opened by the first lookup that needs it."""
        with self._lock:
            if self._closed:
                raise EngramError("the prefetcher is closed")
            if self._stream is None:
                self._stream = self._client.stream()
            return self._stream

    def close(self) -> None:
        with self._lock:
            self._closed = True
        if self._stream is not None:
            self._stream.close()
        self._threads.close()


class _Threads:
    """Lookups that block, on threads."""

    def __init__(self, client: LookupMethods[Lookup]) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(_BLOCKING_LOOKUPS, "engram-lookup")

    def begin(self, ask: _Ask, layer: int) -> Future[Lookup]:
        return self.submit(ask, self._client, layer)

    def submit(self, lookup: Callable[..., Lookup], *arguments: Any) -> Future[Lookup]:
        return self._threads.submit(lookup, *arguments)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


_Lookups: TypeAlias = _Server | _Threads


def _unless_cancelled(future: Future[LayerRows], ask: _Ask) -> _Ask:
    def asked(lookups: LookupMethods[Any], layer: int) -> Any:
        if future.cancelled():
            raise CancelledError
        return ask(lookups, layer)

    return asked


def _refuse_recording(rows: Tensor) -> None:
    if torch._C._is_tracing() or (rows.is_cuda and torch.cuda.is_current_stream_capturing()):
        raise RuntimeError(
            "Engram rows are waited for while a CUDA graph or a trace records, which would use them for every step: "
            "wait outside of it, and copy them to where it reads"
        )


def _host_ids(ids: ArrayLike | Tensor) -> NDArray[Any]:
    """A copy on the host: the caller may write to its own at once."""
    if isinstance(ids, Tensor):
        return ids.detach().cpu().numpy().copy()
    try:
        return np.array(ids)
    except ValueError as error:  # a ragged list
        raise InvalidRequestError(f"ids are no array: {error}") from error
