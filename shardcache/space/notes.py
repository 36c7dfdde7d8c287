"""What the processes of a node tell each other under the budget lock, in small files.

A note holds from one boot to the next: clocks that never go back begin anew then. Whoever is
killed while writing one leaves none that can be read, and it is as if it had never been.
"""

from __future__ import annotations

import io
import json
import logging
import os
from pathlib import Path
from typing import Any

from shardcache.clock import boot_id
from shardcache.files import Modes, is_alone, open_file, settle
from shardcache.layout import read_file

__all__ = ["Note"]

logger = logging.getLogger(__name__)

_MOST = 4096


class Note:
    """A list of numbers and texts in a file.

    Args:
        path: of the file.
        modes: its permissions.
    """

    def __init__(self, path: Path, modes: Modes) -> None:
        self._path = path
        self._modes = modes
        self._boot = boot_id()

    def read(self) -> list[Any]:
        """What was written last, since the node was started; nothing if that cannot be read."""
        try:
            boot, *values = json.loads(read_file(self._path, _MOST))
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, RecursionError) as exn:
            logger.debug("%s: %s", self._path, exn)
            return []
        return values if boot == self._boot else []

    def write(self, *values: object) -> None:
        """Write it, if the disk lets us."""
        record = json.dumps([self._boot, *values]).encode()
        mode = self._modes.file
        try:
            # In its place: on a full disk there is no room for a second one.
            with open_file(self._path, io.FileIO, os.O_WRONLY | os.O_CREAT, mode) as file:
                fd = file.fileno()
                if is_alone(fd):
                    settle(fd, mode)
                    os.ftruncate(fd, 0)
                    os.write(fd, record)
        except OSError as exn:
            logger.debug("%s: %s", self._path, exn)

    def forget(self) -> None:
        """Let there be none, if there was one."""
        if self.read():
            self.write()
