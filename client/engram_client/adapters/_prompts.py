"""Prompts whose rows are read ahead, from the moment a request arrives."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from engram_client._errors import EngramError
from engram_client._sync import EngramClient

_log = logging.getLogger(__name__)

WAITING_MAX = 256
"""Prompts that wait to be sent; one more is not prefetched."""
GIVE_UP_S = 60.0
"""A prompt that waited longer than this is being computed by now, or somewhere else."""


class PromptPrefetcher:
    """Sends prompts to the server's prefetch lane, from a thread of its own.

    `prompt` never waits and never fails: what is not prefetched is read when it is looked up. The client is made with
    the first prompt, and anew in a forked child. Safe to share between threads.
    """

    def __init__(
        self,
        connect: Callable[[], EngramClient],
        *,
        waiting_max: int = WAITING_MAX,
        image_hashes_from: int | None = None,
    ) -> None:
        """image_hashes_from: ids from here on stand for the image token."""
        self._connect = connect
        self._waiting_max = waiting_max
        self._image_hashes_from = image_hashes_from
        self._lock = threading.Lock()
        self._pid = 0
        self._prompts: queue.Queue[Sequence[int] | None] = queue.Queue()

    def prompt(self, tokens: Sequence[int] | None) -> None:
        """Prefetch what these token ids will look up; None, as for a prompt of embeddings, is nothing."""
        if tokens is None or len(tokens) == 0:
            return
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._prompts = queue.Queue(self._waiting_max)
                threading.Thread(
                    target=self._send, args=(self._prompts,), name="engram-prompts", daemon=True
                ).start()
        try:
            self._prompts.put_nowait(tokens)
        except queue.Full:
            _log.debug("%d prompts wait to be prefetched: one is left out", self._waiting_max)

    def _send(self, prompts: queue.Queue[Sequence[int] | None]) -> None:
        client: EngramClient | None = None
        warned = False
        while (tokens := prompts.get()) is not None:
            try:
                client = client or self._connect()
                client.prefetch(self._token_ids(tokens, client), give_up_s=GIVE_UP_S)
            except (EngramError, ValueError, OSError) as error:
                if not warned:
                    _log.warning("a prompt was not prefetched, and later ones may not be: %s", error)
                warned = True

    def _token_ids(self, tokens: Sequence[int], client: EngramClient) -> NDArray[np.int64]:
        ids = np.asarray(tokens, dtype=np.int64)
        if self._image_hashes_from is None or not (images := ids >= self._image_hashes_from).any():
            return ids
        return np.where(images, client.describe().model.image_token_id, ids)
