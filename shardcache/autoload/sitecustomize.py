"""Python imports this at its start where `shardcache run` put its folder on PYTHONPATH.

When WebDataset is imported, its ``gopen`` is replaced by one that reads shards through the cache.
Programs that do not import WebDataset pay for nothing but this file: it imports what every
interpreter has loaded already.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # `typing` would cost more than all of this
if TYPE_CHECKING:
    from typing import Any

_FOLDER = __file__.rpartition("/")[0]


class _WebDataset:
    """An import hook that waits for `webdataset.gopen`."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        if name != "webdataset.gopen":
            return None
        sys.meta_path.remove(cls)
        finders = (finder.find_spec(name, path, target) for finder in sys.meta_path)
        spec: Any = next(filter(None, finders), None)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                try:
                    from shardcache.wds.gopen import read_through_cache
                except ImportError as exn:  # the command is of another environment
                    raise ImportError(
                        f"shardcache is not installed for {sys.executable} ({exn}). Install it "
                        "there, or start the program without `shardcache run`."
                    ) from exn
                read_through_cache(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _WebDataset)

# The sitecustomize that would have been imported without this one.
_rest = [each for each in sys.path if each != _FOLDER]
if (_other := PathFinder.find_spec("sitecustomize", _rest)) and _other.loader:
    _other.loader.exec_module(sys.modules[__name__])
