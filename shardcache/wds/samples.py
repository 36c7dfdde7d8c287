"""WebDataset's stage that takes archives apart, on our own tar walk.

The files are those that WebDataset yields: the same names in the same order, the same bytes, the
same calls of handlers at the same places, with the same exceptions. A member that cannot be read
is the handler's for once, an archive that cannot be read goes to it a second time, with the stream
and the URL; what it lets pass leaves no mark of the shard's end.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from shardcache.wds.tar import TarWalk

if TYPE_CHECKING:
    from shardcache.cache import Handler

#: Members that WebDataset keeps for itself.
_is_meta = re.compile(r"__[^/]*__($|/)").match


def reraise(exn: Exception) -> bool:
    """The default handler."""
    raise exn


def tar_files(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    eof_value: Any = {},  # noqa: B006 - yielded as it is, as by the function it replaces
) -> Iterator[Any]:
    """Expand opened shards into files; a drop-in for WebDataset's ``tar_file_expander``.

    Args:
        data: ``dict(url=..., stream=...)``, perhaps with ``local_path``.
        handler: called with what a member or an archive raises: True goes on with the
            next, False stops. The default raises.
        select_files: tells by its name whether a file is wanted.
        rename_files: gives files other names, before they are selected.
        eof_value: yielded behind each shard, unless it is None.

    Yields:
        ``dict(fname=..., data=..., __url__=...)``, with ``__local_path__`` if there is one.
    """
    for source in data:
        url = source["url"]
        local_path = source.get("local_path")
        try:
            stream = source["stream"]
            walk = TarWalk(stream)
            for name in walk:
                try:
                    if name.startswith("__") and (
                        ("/" not in name and name.endswith("__")) or _is_meta(name)
                    ):
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
    """Expand opened shards into samples: `tar_files`, grouped by WebDataset's ``group_by_keys``.

    Args:
        data, handler, select_files, rename_files: as for `tar_files`.

    Yields:
        ``dict(__key__=..., __url__=..., field=bytes, ...)``.
    """
    from webdataset.tariterators import group_by_keys

    files = tar_files(data, handler, select_files, rename_files, **eof_option())
    samples: Iterator[dict[str, Any]] = group_by_keys(files, handler=handler)
    return samples


def eof_option() -> dict[str, None]:
    """Keeps `tar_files` from marking ends where WebDataset (0.2.86) knows no such marks."""
    from webdataset.tariterators import tar_file_expander

    knows_it = "eof_value" in inspect.signature(tar_file_expander).parameters
    return {} if knows_it else {"eof_value": None}
