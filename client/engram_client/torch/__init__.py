"""Engram rows and layers inside a torch forward, over any client. Needs the extra `torch`.

    from engram_client import EngramClient
    from engram_client.torch import EngramLayer, RowPrefetcher

    layers = {layer: EngramLayer.from_checkpoint(path, layer) for layer in (1, 14)}
    with EngramClient("unix:/run/engram.sock") as client, RowPrefetcher(client) as prefetcher:
        step = prefetcher.prefetch(tokens)  # returns at once; rows of both layers are on their way
        for number, block in enumerate(blocks):
            if number in layers:
                hidden = layers[number](hidden, *step.wait(number))
            hidden = block(hidden)
        print(prefetcher.waits.exposition().decode())  # how long the forward waited, as Prometheus reads it

`EngramRows` is the same for code that wants an embedding: row ids in, rows out.
"""

from engram_client.torch._layer import EngramLayer
from engram_client.torch._placing import LayerRows
from engram_client.torch._prefetch import PendingRows, RowPrefetcher
from engram_client.torch._rows import EngramRows
from engram_client.torch._waits import WaitTimes

__all__ = ["EngramLayer", "EngramRows", "LayerRows", "PendingRows", "RowPrefetcher", "WaitTimes"]
