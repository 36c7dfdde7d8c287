"""The disk of a cache, which is not used for a minute after three faults in a row."""

from __future__ import annotations

import errno

from shardcache.config import Config
from shardcache.faults import Breaker, fault_kind, is_disk_fault
from shardcache.locks.notices import Notices
from shardcache.units import format_duration


class PausedError(OSError):
    """The disk has failed, and is not used until a pause of a minute is over."""


class Disk:
    """Counts the faults of a disk in one process.

    Attributes:
        reading, writing: the faults of reads and of writes.
    """

    def __init__(self, config: Config, notices: Notices) -> None:
        self.reading = Breaker()
        self.writing = Breaker()
        self._config = config
        self._notices = notices

    @property
    def is_well(self) -> bool:
        """Whether the disk is read and written, and not paused after faults."""
        return self.reading.closed and self.writing.closed

    def check(self, breaker: Breaker, *, insist: bool = False) -> None:
        """Raise PausedError while the disk is paused, unless ``insist`` or ``strict`` is set."""
        if breaker.left and not (insist or self._config.strict):
            raise PausedError(errno.EIO, f"the disk failed; next attempt in {breaker.left:.0f} s")

    def failed(self, breaker: Breaker, exn: OSError) -> None:
        """Count an error if it is a fault of the disk, and warn when it pauses the disk."""
        # A read-only disk stays read-only, so a single EROFS is enough.
        if is_disk_fault(exn) and breaker.failed(at_once=exn.errno == errno.EROFS):
            self._notices.warn(
                fault_kind(exn),
                "%s: %s. It will not be %s for %s; until then, shards are streamed.",
                self._config.dir,
                exn.strerror or exn,
                "written" if breaker is self.writing else "read",
                format_duration(breaker.left),
            )
