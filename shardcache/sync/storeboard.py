"""Notices in the store of torch.distributed; see `noticeboards.Board`.

A store keeps bytes under names and compares before it sets. It blocks a reader of a name that
is not there until its own timeout, for all threads of the process, so it is first asked
whether the name is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from shardcache.sync.standing import unreachable

__all__ = ["StoreBoard"]

T = TypeVar("T")


class _Hold:
    def release(self) -> None:
        """Nothing is held: a store does not know who has died."""


class StoreBoard:
    """A store; see `noticeboards.Board`.

    Args:
        store: ``torch.distributed.Store``.
        prefix: of all names.
    """

    exact = False
    listed = False

    def __init__(self, store: Any, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def __str__(self) -> str:
        return "the store of torch.distributed"

    def _name(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _ask(self, call: Callable[..., T], *args: Any) -> T:
        try:
            return call(*args)
        except RuntimeError as exn:  # DistStoreError, DistNetworkError and older ones
            raise unreachable(exn) from exn

    def get(self, name: str) -> bytes | None:
        """See `noticeboards.Board`."""
        if not self._ask(self._store.check, [self._name(name)]):
            return None
        return bytes(self._ask(self._store.get, self._name(name)))

    def put(self, name: str, data: bytes) -> None:
        """See `noticeboards.Board`."""
        self._ask(self._store.set, self._name(name), data)

    def first(self, name: str, data: bytes) -> bool:
        """See `noticeboards.Board`. Two that post the same bytes are both first."""
        text = data.decode("ascii")
        return bytes(self._ask(self._store.compare_set, self._name(name), "", text)) == data

    def hold(self, name: str, data: bytes) -> _Hold | None:
        """See `noticeboards.Board`."""
        return _Hold() if self.first(name, data) else None

    def held(self, name: str) -> bool | None:
        """See `noticeboards.Board`."""
        return None

    def posted(self, names: Sequence[str]) -> set[str]:
        """See `noticeboards.Board`."""
        return {name for name in names if self._ask(self._store.check, [self._name(name)])}

    def covers(self, names: Sequence[str]) -> bool:
        """See `noticeboards.Board`."""
        return bool(self._ask(self._store.check, [self._name(name) for name in names]))

    def remove(self, name: str) -> None:
        """See `noticeboards.Board`."""
        with contextlib.suppress(RuntimeError):  # a store that cannot delete, or is gone
            self._store.delete_key(self._name(name))
