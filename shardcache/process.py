"""What one process has of a cache: namespaces, session, clients, connections.

Made on first use in the process that uses it, and thrown away unseen by a
forked child, which makes its own.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.layout import make_root
from shardcache.namespaces import Namespaces
from shardcache.ranks import Ranks
from shardcache.sessions import Session
from shardcache.store import Opened
from shardcache.version import __version__

if TYPE_CHECKING:
    from shardcache.coordination import Coordinator
    from shardcache.origins import Origins
    from shardcache.space import Space
    from shardcache.transfer import Fetcher

__all__ = ["Process", "Processes"]

logger = logging.getLogger(__name__)


class Process:
    """The parts; safe between the threads of the process that made it.

    Args:
        config: options.
        ranks: who we are.
        clock: time.
        started: when the job began to use the cache, for the session.
    """

    def __init__(self, config: Config, ranks: Ranks, clock: Clock, started: float) -> None:
        self.namespaces = Namespaces(config, ranks)
        self._config = config
        self._ranks = ranks
        self._clock = clock
        self._started = started
        self._guard = threading.Lock()
        self._session: Session | None = None
        self._coordinator: Coordinator | None = None
        self._touched: dict[str, float] = {}
        self._warned: set[str] = set()

    def coordinator(self) -> Coordinator:
        """The way to entries; on the first call the directories are made.

        Raises:
            ConfigError: the directory must not be used.
            OSError: it cannot be made or written; with ``strict`` only.
        """
        made = self._coordinator
        if made is None:
            with self._guard:
                made = self._coordinator
                if made is None:
                    self._make_directories()
                    made = self._coordinator = self._assemble()
        return made

    def _make_directories(self) -> None:
        try:
            node = make_root(self._config.dir, __version__)
            if self.namespaces.own.layout != node:
                self.namespaces.own.layout.make()
        except OSError as exn:
            if self._config.strict:
                raise
            reason = exn.strerror or str(exn)
            self.warn(
                reason,
                "%s cannot be written (%s); shards not in it are streamed",
                self._config.dir,
                reason,
            )
            return
        self._session = Session(node, self._started)

    def _assemble(self) -> Coordinator:
        # Not at the top: these bring filelock, and `import shardcache` stays light.
        from shardcache.coordination import Coordinator
        from shardcache.origins import Origins
        from shardcache.retry import RetryPolicy
        from shardcache.transfer import Fetcher

        config = self._config
        self.origins: Origins = Origins(config)
        self.fetcher: Fetcher = Fetcher(
            RetryPolicy(config.attempts, config.deadline, self._clock),
            self._clock,
            connections=config.connections,
            part_size=config.part_size,
            timeout=config.timeout,
        )
        return Coordinator(
            self.namespaces.own,
            siblings=self.namespaces.siblings,
            fetcher=self.fetcher,
            origins=self.origins,
            space=self.space(config),
            config=config,
            ranks=self._ranks,
            clock=self._clock,
        )

    def space(self, config: Config) -> Space:
        """The budget of the root under the limits of ``config``."""
        from shardcache.space import Space

        return Space(self.namespaces.node, self.namespaces.all, config, self._clock)

    def warn(self, kind: str, text: str, *args: object) -> None:
        """Log a warning the first time in this process, for this kind; INFO afterwards."""
        level = logging.INFO if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        logger.log(level, text, *args)

    def touch(self, opened: Opened) -> None:
        """Note a use of an entry, on its first use here and then at most every interval."""
        now = self._clock.monotonic()
        last = self._touched.get(opened.directory)
        if last is None or now - last >= self._config.touch_interval:
            self._touched[opened.directory] = now
            self.namespaces.own.touch(opened.directory, self._clock.time())

    def cancel(self) -> None:
        """Call off all fetches of this process; they raise, and can be resumed."""
        if self._coordinator is not None:
            self.fetcher.cancel()

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()
            self._session = None


class Processes:
    """The `Process` of whoever asks: one for all threads, none that came over a fork.

    Without a lock: a fork could leave it held.

    Args:
        config, ranks, clock, started: as for `Process`.
    """

    def __init__(self, config: Config, ranks: Ranks, clock: Clock, started: float) -> None:
        self._parts = config, ranks, clock, started
        self._made: dict[int, Process] = {}

    def here(self) -> Process:
        """The calling process's own, made if need be."""
        pid = os.getpid()
        process = self._made.get(pid)
        if process is None:
            process = self._made.setdefault(pid, Process(*self._parts))
            for other in [p for p in self._made if p != pid]:
                self._made.pop(other, None)  # the parent's; copies of its sockets go with it
        return process

    def made(self) -> Process | None:
        """The calling process's own, if it was made."""
        return self._made.get(os.getpid())

    def take(self) -> Process | None:
        """As `made`; the next one is made anew."""
        return self._made.pop(os.getpid(), None)
