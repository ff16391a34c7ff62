"""Rows asked for when a step's tokens are known, and waited for where the forward needs them."""

from __future__ import annotations

import inspect
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
"""Threads for a client whose lookups block: two steps of two layers."""

Client: TypeAlias = "EngramClient | EngramMemory"

_Ask: TypeAlias = Callable[[LookupMethods[Any], int], Any]
"""Looks the rows of one layer of a step up, by the methods given."""
_Pending: TypeAlias = "PendingLookup | Future[Lookup]"


class RowPrefetcher:
    """Asks for the rows of whole steps ahead of the forward, and brings them to the model's device.

    `prefetch` returns at once. Each layer is a lookup of its own, in the order of `layers`: rows of the first come as
    soon as they can, those of the others while the layers before them compute. Over gRPC all go through one stream that
    stays open. Steps are answered in order: a long prompt that is to wait for its turn belongs in a prefetcher of its
    own. Safe to share between threads; a context manager. The client is the caller's to close, afterwards.

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

        Raises the exceptions of `EngramError`; TypeError for an AsyncEngramClient.
        """
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
        # One thread asks and one places, so that both keep the order of steps and layers.
        self._asking = ThreadPoolExecutor(1, "engram-ask")
        self._placing = ThreadPoolExecutor(1, "engram-place")
        self._lookups: _Lookups = _Stream(client) if isinstance(client, EngramClient) else _Threads(client)

    def prefetch(self, tokens: ArrayLike | Tensor, *, history: ArrayLike | Tensor = ()) -> PendingRows:
        """Ask for the rows of one sequence's next tokens [T], as `EngramClient.lookup`.

        Ids are copied before this returns. Raises OverloadedError when too many steps are under way, EngramError once
        closed; what is wrong with the ids or the server is raised by `PendingRows.wait`.
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, ask: _Ask, layers: Sequence[int]) -> PendingRows:
        if self._closed:
            raise EngramError("the prefetcher is closed")
        if not self._room.acquire(blocking=False):
            raise OverloadedError(
                f"{self._steps_max} steps are under way: wait for one of them, or cancel it"
            )
        rows: dict[int, Future[LayerRows]] = {layer: Future() for layer in layers}
        self._asking.submit(self._ask, ask, rows)
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
        if not future.set_running_or_notify_cancel():
            return
        try:
            if isinstance(found, Exception):
                raise found
            future.set_result(self._placer.place(found.result()))
        except Exception as error:
            ours = isinstance(error, EngramError) or not self._closed
            future.set_exception(error if ours else EngramError("the prefetcher was closed"))


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

        After `timeout` seconds DeadlineError; the lookup goes on and may be waited for again. The current CUDA stream,
        and it alone, may use the rows without ado.
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


class _Stream:
    """Lookups on one stream of a server, opened by the first."""

    def __init__(self, client: EngramClient) -> None:
        self._stream: LookupStream = client.stream()

    def begin(self, ask: _Ask, layer: int) -> PendingLookup:
        pending: PendingLookup = ask(self._stream, layer)
        return pending

    def close(self) -> None:
        self._stream.close()


class _Threads:
    """Lookups that block, on threads."""

    def __init__(self, client: LookupMethods[Lookup]) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(_BLOCKING_LOOKUPS, "engram-lookup")

    def begin(self, ask: _Ask, layer: int) -> Future[Lookup]:
        return self._threads.submit(ask, self._client, layer)

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


_Lookups: TypeAlias = _Stream | _Threads


def _unless_cancelled(future: Future[LayerRows], ask: _Ask) -> _Ask:
    def asked(lookups: LookupMethods[Any], layer: int) -> Any:
        if future.cancelled():
            raise CancelledError
        return ask(lookups, layer)

    return asked


def _host_ids(ids: ArrayLike | Tensor) -> NDArray[Any]:
    """A copy on the host: the caller may write to its own at once."""
    return ids.detach().cpu().numpy().copy() if isinstance(ids, Tensor) else np.array(ids)
