"""WebDataset's two stages behind the opener, on our own tar walk.

`tar_files` takes the place of ``tar_file_expander``; `tar_samples` of that and ``group_by_keys``
behind it. `FastTar` is either as a stage of a pipeline; `quicken` puts it into one.

Samples are those that WebDataset yields: the same keys in the same order, the same bytes, the same
calls of handlers at the same places, with the same exceptions. A member that cannot be read is
the handler's for once, an archive that cannot be read goes to it a second time, with the stream
and the URL; what it lets pass leaves no mark of the shard's end.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from shardcache.options import Handler
from shardcache.wds.tar import TarWalk

Keys = Callable[[str], tuple[str | None, str | None]]

#: Members that WebDataset keeps for itself.
_is_meta = re.compile(r"__[^/]*__($|/)").match

#: Name, data, URL and local path of a file; None at the end of a shard.
_File = tuple[str, bytes, Any, Any] | None


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
    for file in _expanded(data, handler, select_files, rename_files):
        if file is None:
            if eof_value is not None:
                yield eof_value
            continue
        name, content, url, local_path = file
        sample = {"fname": name, "data": content, "__url__": url}
        if local_path is not None:
            sample["__local_path__"] = local_path
        yield sample


def tar_samples(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise,
    select_files: Callable[[str], bool] | None = None,
    rename_files: Callable[[str], str] | None = None,
    eof_value: Any = {},  # noqa: B006 - only whether it is None matters
    *,
    keys: Keys | None = None,
    lcase: bool = True,
    suffixes: Any = None,
    group_handler: Handler | None = None,
) -> Iterator[dict[str, Any]]:
    """Expand opened shards into samples: ``tar_file_expander`` and ``group_by_keys`` in one.

    Args:
        data, handler, select_files, rename_files: as for `tar_files`.
        eof_value: None lets a sample go on from one shard into the next.
        keys: splits a file's name into the sample's key and the field; the default is
            WebDataset's, at the first dot of the last component.
        lcase: fields are made lower case.
        suffixes: the fields to keep; all if None.
        group_handler: asked about names that occur twice; the default is ``handler``.

    Yields:
        ``dict(__key__=..., __url__=..., field=bytes, ...)``.
    """
    files = _expanded(data, handler, select_files, rename_files)
    if eof_value is None:
        files = filter(None, files)
    return _grouped(files, keys, lcase, suffixes, group_handler or handler)


def _expanded(
    data: Iterable[dict[str, Any]],
    handler: Handler,
    select_files: Callable[[str], bool] | None,
    rename_files: Callable[[str], str] | None,
) -> Iterator[_File]:
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
                    content = walk.read()
                except Exception as exn:  # noqa: BLE001 - the handler decides
                    if hasattr(exn, "args") and len(exn.args) > 0:
                        exn.args = (f"{exn.args[0]!s} @ {stream!s}", *exn.args[1:])
                    if handler(exn):
                        continue
                    break
                yield name, content, url, local_path
            yield None
        except Exception as exn:  # noqa: BLE001 - the handler decides
            exn.args = (*exn.args, source.get("stream"), source.get("url"))
            if not handler(exn):
                return


def _grouped(
    files: Iterable[_File],
    keys: Keys | None = None,
    lcase: bool = True,
    suffixes: Any = None,
    handler: Handler = reraise,
) -> Iterator[dict[str, Any]]:
    from webdataset.tariterators import base_plus_ext

    split: Keys = _base_plus_ext if keys in (None, base_plus_ext) else keys
    sample: dict[str, Any] | None = None
    for file in files:
        try:
            if file is None:
                if _is_good(sample):
                    yield sample
                sample = None
                continue
            name, content, url, local_path = file
            key, field = split(name)
            if key is None:
                continue
            if lcase:
                field = field.lower()  # type: ignore[union-attr]
            if sample is None or key != sample["__key__"]:
                if _is_good(sample):
                    yield sample
                sample = {"__key__": key, "__url__": url}
            if field in sample:
                raise ValueError(f"{name}: duplicate file name in tar file {field} {sample.keys()}")
            if suffixes is None or field in suffixes:
                sample[field] = content  # type: ignore[index]
            if local_path is not None:
                sample["__local_path__"] = local_path
        except Exception as exn:  # noqa: BLE001 - the handler decides
            exn.args = (*exn.args, None, None)  # files have neither stream nor url
            if not handler(exn):
                break
    if _is_good(sample):
        yield sample


def _is_good(sample: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    return sample is not None and not sample.get("__bad__", False)


def _base_plus_ext(name: str) -> tuple[str | None, str | None]:
    """As WebDataset's ``base_plus_ext``, without its expression where the answer is plain."""
    start = name.rfind("/") + 1
    dot = name.find(".", start)
    if dot > start and "\n" not in name:
        return name[:dot], name[dot + 1 :]
    from webdataset.tariterators import base_plus_ext

    key, field = base_plus_ext(name)
    return key, field


@dataclass(eq=False)
class FastTar:
    """A stage in place of ``tar_file_expander``, or of that and ``group_by_keys``; picklable.

    ``stock`` has the stages that it replaces, ``files`` the arguments of the first by name, and
    ``groups`` those of the second, if there is one.
    """

    stock: list[Any]
    files: dict[str, Any]
    groups: dict[str, Any] | None = None

    def __call__(self, data: Iterable[Any]) -> Iterator[Any]:
        """Run the stage; see `tar_files` and `tar_samples`."""
        if self.groups is None:
            return tar_files(data, **self.files)
        groups = dict(self.groups)
        handler = groups.pop("handler", reraise)
        return tar_samples(data, **self.files, group_handler=handler, **groups)


def quicken(pipeline: list[Any]) -> None:
    """Replace WebDataset's own stages that read tar archives, where they are just that."""
    from webdataset import tariterators

    for index, stage in enumerate(pipeline):
        files = _arguments(stage, tariterators.tar_file_expander, tar_files)
        if files is None:
            continue
        stock, groups = [stage], None
        if pipeline[index + 1 :] and files.get("eof_value", {}) in ({}, None):
            groups = _arguments(pipeline[index + 1], tariterators.group_by_keys, _grouped)
        if groups is not None:
            stock.append(pipeline[index + 1])
        pipeline[index : index + len(stock)] = [FastTar(stock, files, groups)]


def restore(pipeline: list[Any]) -> None:
    """Undo `quicken`."""
    pipeline[:] = [
        each for one in pipeline for each in (one.stock if isinstance(one, FastTar) else [one])
    ]


def _arguments(stage: Any, function: Any, ours: Callable[..., Any]) -> dict[str, Any] | None:
    """The arguments besides the data with which ``stage`` calls ``function``.

    None if it is another stage, or has arguments that ``ours`` does not know.
    """
    from webdataset.filters import FilterFunction

    args: tuple[Any, ...] = ()
    options: dict[str, Any] = {}
    if isinstance(stage, FilterFunction):
        stage, args, options = stage.f, stage.args, stage.kw
    elif isinstance(stage, functools.partial) and not stage.args:
        stage, options = stage.func, stage.keywords
    if stage is not function:
        return None
    try:
        bound = inspect.signature(ours).bind(None, *args, **options)
    except TypeError:
        return None
    return dict(list(bound.arguments.items())[1:])
