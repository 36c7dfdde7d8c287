"""Damaged entries: how they are told from sound ones, and where they are put.

An entry is trusted when its sidecar describes it and, if it was fetched under another boot of
this machine, its bytes are those that were fetched: after a power failure a rename may have
survived whose data did not. What fails that is renamed into `Layout.quarantine`, so that the
next reader misses and fetches it again; whoever has it open reads on.

Any number of processes may judge one entry at once: one rename succeeds. Whoever sets aside
holds the key's lock, so that what was fetched in the place of a damaged entry is not taken for it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from shardcache.layout import META, Layout, is_directory, replace_file
from shardcache.store.digest import file_digest
from shardcache.store.entry import Entry, lacks, read_sidecar
from shardcache.store.metadata import DamagedError, Metadata
from shardcache.store.opening import open_data, readable

__all__ = ["Quarantine"]

logger = logging.getLogger(__name__)

#: The directory of what is set aside may be removed; not this often in a row.
_ATTEMPTS = 100


class Quarantine:
    """Judges the entries of one namespace.

    Args:
        layout: where.
        boot: of this machine; entries of another one are hashed before they are trusted.
            Empty to trust them all.
    """

    def __init__(self, layout: Layout, boot: str) -> None:
        self._layout = layout
        self._boot = boot

    def trust(self, directory: Path, fd: int, key: str, size: int) -> None:
        """Check an entry that this process sees for the first time.

        Args:
            directory: the entry's.
            fd: of its open data file.
            key, size: what it must be of.

        Raises:
            DamagedError: it is not; it must not be used.
            OSError: the disk fails.
        """
        with readable():
            self._check(directory, fd, key, size)

    def _check(self, directory: Path, fd: int, key: str, size: int) -> None:
        try:
            metadata = Metadata.decode(read_sidecar(directory))
        except FileNotFoundError as exn:
            if lacks(directory, META.__eq__):
                raise DamagedError("it has no sidecar") from exn
            return  # evicted while we look; the open file is good
        named = Entry.at(directory)
        if (metadata.key, metadata.info.version, metadata.size) != (key, named.version, size):
            raise DamagedError("its sidecar describes another shard")
        if self._boot and metadata.boot != self._boot:
            if file_digest(fd) != metadata.digest:
                raise DamagedError("its bytes changed since they were fetched")
            try:
                trusted = metadata.trusted_since(self._boot).encode()
                modes, via = self._layout.modes, self._layout.partial
                replace_file(directory / META, trusted, modes.file, via=via)
            except OSError as exn:  # read-only or full: verify again next time
                logger.debug("cannot note that %s was verified: %s", directory.name, exn)

    def judge(self, directory: Path, basename: str | None, reason: str) -> bool:
        """Set an entry aside if it is damaged, or has another data file than ``basename``.

        Call with the key's lock held.

        Args:
            directory: the entry's.
            basename: its data file must have this name; None for any.
            reason: why it is looked at, for the log.

        Returns:
            Whether this call set it aside.

        Raises:
            OSError: the disk fails.
        """
        entry = Entry.at(directory)
        try:
            data = entry.data
            opened = open_data(str(directory), str(data), entry.size, self._layout.grace)
            if opened is None:
                return False  # being evicted
            if opened.stuck:
                opened.close()
                return False  # likewise: who evicts it must not find another in its place
            try:
                self.trust(directory, opened.fd, entry.key, entry.size)
            finally:
                opened.close()
            if basename in (None, data.name):
                return False
        except FileNotFoundError:
            return False
        except DamagedError as exn:
            reason = f"{reason}: {exn}"
        return self.take(directory, reason)

    def take(self, directory: Path, reason: str) -> bool:
        """Set an entry aside, sound or not; call with the key's lock held.

        Returns:
            Whether this call did it.

        Raises:
            OSError: the disk fails.
        """
        for _ in range(_ATTEMPTS):
            try:
                directory.rename(self._layout.new_quarantined(directory))
            except FileNotFoundError:
                if not is_directory(directory):
                    return False
                self._layout.mend(self._layout.quarantine)
                continue
            logger.info("set aside a damaged entry: %s (%s)", directory.name, reason)
            return True
        return False
