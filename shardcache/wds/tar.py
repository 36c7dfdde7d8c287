"""The stages that expand archives in a WebDataset pipeline: `tar_files` and `tar_samples`."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from shardcache.archive import REPEATED, TarWalk, is_meta, split
from shardcache.urls import redact

if TYPE_CHECKING:
    from shardcache.cache import Handler

logger = logging.getLogger(__name__)


def reraise(exn: Exception) -> bool:
    """Raise the exception. This is the default handler."""
    raise exn


@functools.cache
def _warn(url: str, problem: str) -> None:
    """Log what is wrong with a shard, once per process."""
    logger.warning("%s: %s", redact(url), problem)


def tar_files(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    eof_value: Any = ...,
) -> Iterator[Any]:
    """Expand opened shards into files. This stage replaces WebDataset's ``tar_file_expander``.

    Args:
        data: ``dict(url=..., stream=...)`` for each shard, optionally with ``local_path``.
        handler: called with the exception if a member or an archive cannot be read. It returns True
            to continue with the next one, or False to stop. The default raises the exception.
        select_files: called with a file's name; returns whether to yield the file.
        rename_files: called with a file's name before ``select_files``; returns the new name.
        eof_value: yielded after each shard, unless it is None. The default is that of the installed
            WebDataset: ``{}``, or None before version 1.0.

    Yields:
        ``dict(fname=..., data=..., __url__=...)``, with ``__local_path__`` if the shard has one.
    """
    if eof_value is ...:
        from webdataset.tariterators import tar_file_expander

        parameters = inspect.signature(tar_file_expander).parameters
        eof_value = {} if "eof_value" in parameters else None
    for source in data:
        url = source["url"]
        local_path = source.get("local_path")
        keys, prefix = set[str](), "\0"
        try:
            stream = source["stream"]
            walk = TarWalk(stream)
            for name in walk:
                try:
                    if is_meta(name):
                        continue
                    if rename_files:
                        name = rename_files(name)
                    if select_files is not None and not select_files(name):
                        continue
                    sample = {"fname": name, "data": walk.read(), "__url__": url}
                except Exception as exn:  # noqa: BLE001 - the handler decides
                    if hasattr(exn, "args") and len(exn.args) > 0:
                        exn.args = (f"{exn.args[0]!s} @ {stream!s}", *exn.args[1:])
                    if handler(exn):
                        continue
                    break
                if not name.startswith(prefix) and (found := split(name)):  # another sample begins
                    prefix = found[1] + "."
                    if prefix in keys:
                        _warn(str(url), REPEATED.format(found[1]))
                        prefix = ""  # once per shard
                    keys.add(prefix)
                if local_path is not None:
                    sample["__local_path__"] = local_path
                yield sample
            if eof_value is not None:
                yield eof_value
        except Exception as exn:  # noqa: BLE001 - the handler decides
            exn.args = (*exn.args, source.get("stream"), source.get("url"))
            if not handler(exn):
                return


def tar_samples(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Expand opened shards into samples, with `tar_files` and WebDataset's ``group_by_keys``.

    Args:
        data, handler, select_files, rename_files: the arguments of `tar_files`.

    Yields:
        ``dict(__key__=..., __url__=..., field=bytes, ...)``.
    """
    from webdataset.tariterators import group_by_keys

    files = tar_files(data, handler, select_files, rename_files)
    samples: Iterator[dict[str, Any]] = group_by_keys(files, handler=handler)
    return samples
