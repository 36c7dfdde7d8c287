"""What one process has of a cache: namespaces, session, clients, connections.

Made on first use in the process that uses it, and thrown away unseen by a
forked child, which makes its own.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from typing import TYPE_CHECKING

from shardcache.breaker import Breaker, fault_kind, is_disk_fault
from shardcache.clock import Clock
from shardcache.config import Config
from shardcache.errors import ConfigError
from shardcache.modes import Modes
from shardcache.namespaces import Namespaces
from shardcache.ranks import Ranks
from shardcache.root import Identity, check_layout, identity, make_root
from shardcache.sessions import Session
from shardcache.store import Opened
from shardcache.units import format_duration
from shardcache.version import __version__

if TYPE_CHECKING:
    from shardcache.coordination import Coordinator
    from shardcache.fetching import Fetchings
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
        #: The coordinator, once there is one.
        self.ready: Coordinator | None = None
        self._touched: dict[str, float] = {}
        self._warned: set[str] = set()
        self._root: Identity | None = None
        self.reading = Breaker(clock)
        self.writing = Breaker(clock)

    def coordinator(self) -> Coordinator:
        """The way to entries; on the first call the directories are made.

        Raises:
            ConfigError: the directory must not be used.
            OSError: it cannot be made or written; with ``strict`` only.
        """
        made = self.ready
        if made is None:
            with self._guard:
                made = self.ready
                if made is None:
                    self._make_directories()
                    self._assemble()
                    made = self.ready = self._make_coordinator()
        return made

    def check_root(self) -> None:
        """Begin anew where the root is no longer the directory that we began with.

        A disk may be unmounted, mounted again or emptied while a job runs. Asked on
        misses only: what is gone is a miss.

        Raises:
            ConfigError: what is there now must not be used; with ``strict``.
            OSError: likewise, or nothing can be made there.
        """
        if not self.root_changed():
            return
        with self._guard:
            if self.root_changed():  # no other thread was quicker
                self._begin_anew()

    def root_changed(self) -> bool:
        """Whether the root is not what it was, or was never made."""
        found = identity(self._config.dir, self.namespaces.own.layout)
        return found is None or found != self._root

    def _begin_anew(self) -> None:
        known, self._root = self._root, None
        if known is not None:
            self.warn(
                "root",
                "%s is gone, or another directory than before (unmounted, mounted again, "
                "emptied?); what was in it is fetched again",
                self._config.dir,
            )
        self._end_session()
        try:
            self._make()
        except ConfigError as exn:
            if self._config.strict:
                raise
            # Somebody else's: not even what is in it may be read.
            self.reading.failed(at_once=True)
            self.writing.failed(at_once=True)
            raise OSError(errno.EPERM, exn.message, str(self._config.dir)) from exn
        self._touched.clear()
        self.ready = self._make_coordinator()

    def _make_directories(self) -> None:
        try:
            self._make()
        except OSError as exn:
            if self._config.strict:
                raise
            self.warn(
                fault_kind(exn),
                "%s cannot be written (%s); shards not in it are streamed",
                self._config.dir,
                exn.strerror or exn,
            )
            self.disk_failed(self.writing, exn)

    def _make(self) -> None:
        modes = Modes.of(self._config.shared_group)
        node = make_root(self._config.dir, __version__, modes)
        # Anew: whether flock works could not be asked before the root was there.
        self.namespaces = Namespaces(self._config, self._ranks)
        own = self.namespaces.own.layout
        if own != node:
            check_layout(own)
            own.make()
        self._root = identity(self._config.dir, own)
        locking = self.namespaces.locking
        if locking.reason:
            self.warn(
                "locking",
                "%s: %s. Locks are kept on this node (%s), and entries are evicted only after "
                "%s without use. A local disk is faster.",
                self._config.dir,
                locking.reason,
                locking.local or "nowhere: no directory for them",
                format_duration(locking.grace or 0),
            )
        self._session = Session(self.namespaces.node, self._started)

    def _assemble(self) -> None:
        # Not at the top: these bring filelock, and `import shardcache` stays light.
        from shardcache.fetching import Fetchings
        from shardcache.origins import Origins
        from shardcache.retry import RetryPolicy
        from shardcache.transfer import Fetcher

        config = self._config
        self.fetchings: Fetchings = Fetchings()
        self.origins: Origins = Origins(config)
        self.fetcher: Fetcher = Fetcher(
            RetryPolicy(config.attempts, config.deadline, self._clock),
            self._clock,
            connections=config.connections,
            part_size=config.part_size,
            timeout=config.timeout,
        )

    def _make_coordinator(self) -> Coordinator:
        from shardcache.coordination import Coordinator

        config = self._config
        return Coordinator(
            self.namespaces.own,
            siblings=self.namespaces.siblings,
            fetcher=self.fetcher,
            origins=self.origins,
            space=self.space(config),
            config=config,
            ranks=self._ranks,
            clock=self._clock,
            on_fault=lambda exn: self.disk_failed(self.reading, exn),
            warn=self.warn,
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

    def disk_failed(self, breaker: Breaker, exn: OSError) -> None:
        """Count a fault; after too many the disk is left alone for a while.

        Args:
            breaker: `reading` or `writing`.
            exn: what it said; what is no fault of the disk does not count.
        """
        if not is_disk_fault(exn):
            breaker.undecided()
            return
        read_only = exn.errno == errno.EROFS
        if not breaker.failed(at_once=read_only):  # asking thrice would not help
            return
        text = "%s: %s. It is not %s for %s, then tried again; shards are streamed meanwhile."
        verb = "written" if breaker is self.writing else "read"
        said = (text, self._config.dir, exn.strerror or exn, verb, format_duration(breaker.left))
        if read_only:
            self.warn(fault_kind(exn), *said)
        else:
            logger.warning(*said)

    def disk_works(self, breaker: Breaker) -> None:
        """The disk did as it should: all is well again."""
        if breaker.succeeded():
            verb = "written" if breaker is self.writing else "read"
            logger.info("%s can be %s again", self._config.dir, verb)

    def touch(self, opened: Opened) -> None:
        """Note a use of an entry, on its first use here and then at most every interval."""
        now = self._clock.monotonic()
        last = self._touched.get(opened.directory)
        if last is None or now - last >= self._config.touch_interval:
            self._touched[opened.directory] = now
            self.namespaces.own.touch(opened.directory, self._clock.time())

    def cancel(self) -> None:
        """Call off all fetches of this process; they raise, and can be resumed."""
        if self.ready is not None:
            self.fetcher.cancel()

    def close(self) -> None:
        """End the session, and the fetches in the background that nobody reads."""
        if self.ready is not None:
            self.fetchings.close()
        self._end_session()

    def _end_session(self) -> None:
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
