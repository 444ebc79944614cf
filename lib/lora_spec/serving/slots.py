"""Which waiting requests may join a batch that can mix only so many drafter adapters.

Nothing here needs torch or vllm.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable

# Scheduling steps for which a request that waits for a slot lets later ones overtake it.
PATIENCE = 64


class Slots:
    """Admission of requests by their drafter adapters, identified by any hashable key.

    A request whose adapter is not in the running batch waits while the batch has its full number of them.
    Later requests of adapters in the batch may overtake it, or slots would stand idle; but not for ever:
    after `patience` steps no request behind it that uses a drafter adapter is admitted until it has its slot.
    Requests on the base drafter need no slot and never wait here.

    Args:
        limit: drafter adapters that one batch can mix.
        patience: steps for which a waiting request is overtaken.
    """

    def __init__(self, limit: int, patience: int = PATIENCE) -> None:
        self.limit = limit
        self._patience = patience
        self._waited: dict[str, int] = {}  # request -> steps in which there was no slot for it
        self._closed = False

    def begin_step(self, known: Container[str]) -> None:
        """A new look at the waiting requests starts, in their order; `known` has the ids that still exist."""
        self._waited = {request: steps for request, steps in self._waited.items() if request in known}
        self._closed = False

    def admits(self, request: str, adapter: Hashable | None, running: Iterable[Hashable | None]) -> bool:
        """Whether the request may join the batch now.

        Args:
            request: its id.
            adapter: its drafter adapter, None for the base drafter.
            running: drafter adapters of the requests in the batch, those admitted in this step included.
        """
        if adapter is None:
            return True
        # Behind one that waits too long. That is no lack of a slot and does not count as waiting: else, once
        # a queue is long, each request would shut out all behind it, and batches would shrink to one.
        if self._closed:
            return False
        adapters = {key for key in running if key is not None}
        if adapter in adapters or len(adapters) < self.limit:
            self._waited.pop(request, None)
            return True
        self._waited[request] = steps = self._waited.get(request, 0) + 1
        self._closed = steps > self._patience
        return False
