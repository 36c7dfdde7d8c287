"""The stores of several tiers as one, asked in their order."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardcache.layout import Layout
from shardcache.store.metadata import DamagedError, Metadata
from shardcache.store.store import Opened, Store

__all__ = ["Stores"]


class Stores:
    """What a `coordination.Coordinator` asks of a store, of all tiers together.

    Args:
        stores: fastest first; locks are in the last one.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = list(stores)

    @property
    def layout(self) -> Layout:
        """Of the last tier."""
        return self._stores[-1].layout

    def open(self, key: str, basename: str, outdated: Collection[str] = ()) -> Opened | None:
        """See `Store.open`; where one tier's entry is damaged, another's will do."""
        damaged: DamagedError | None = None
        # Where it was last: a look at a tier that has not got it costs as much as a hit.
        stores = sorted(self._stores, key=lambda one: not one.knows(key))
        for store in stores:
            try:
                opened = store.open(key, basename, outdated)
            except DamagedError as exn:
                damaged = damaged or exn
                continue
            if opened is not None:
                return opened
        if damaged is not None:
            raise damaged
        return None

    def quarantine(self, key: str, reason: str) -> int:
        """See `Store.quarantine`."""
        return sum(store.quarantine(key, reason) for store in self._stores)

    def link(self, other: Opened, metadata: Metadata, basename: str) -> bool:
        """See `Store.link`; a link stays in its tier."""
        for store in self._stores:
            if store.shares_root(other):
                return store.link(other, metadata, basename)
        return False
