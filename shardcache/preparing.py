"""What a first miss needs, made ready in the background while a program sets itself up.

Imports, directories and an S3 client take some tenths of a second, which the first sample of
an epoch would wait for. A fork waits until a preparation has ended: a child that inherits a
half-done import would wait for it for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shardcache import threads

__all__ = ["begin"]

logger = logging.getLogger(__name__)


def begin(function: Callable[[], object]) -> None:
    """Call ``function`` in a thread of its own. What it raises is only logged: it will be
    raised again by whoever needs what it prepares.
    """

    def run() -> None:
        try:
            function()
        except Exception as exn:  # noqa: BLE001 - see above
            logger.debug("not prepared: %s", exn)

    try:
        threads.start(run, "shardcache-prepare", whole=True)
    except RuntimeError as exn:  # a limit of processes
        logger.debug("not prepared: %s", exn)
