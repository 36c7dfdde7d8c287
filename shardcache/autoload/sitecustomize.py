"""Make WebDataset read through the cache in every program that `shardcache run` starts.

`shardcache run` puts this folder on PYTHONPATH, so Python imports this module when it starts. When
the program imports WebDataset, an import hook replaces ``gopen``. Other programs lose almost no
time, because this module imports only modules that every interpreter has already loaded.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder

TYPE_CHECKING = False  # importing `typing` would take longer than importing this whole module
if TYPE_CHECKING:
    from typing import Any

_FOLDER = __file__.rpartition("/")[0]


class _WebDataset:
    """An import hook that replaces ``gopen`` when `webdataset.gopen` is imported."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        """Return a spec for `webdataset.gopen` that replaces ``gopen``; None for other modules."""
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
                    from shardcache.wds import read_through_cache
                except ImportError as exn:  # `shardcache run` belongs to another environment
                    raise ImportError(
                        f"shardcache is not installed for {sys.executable} ({exn}). Install it "
                        "there, or start the program without `shardcache run`."
                    ) from exn
                read_through_cache(module)
                if level := os.environ.get("_SHARDCACHE_LOG"):  # set by `shardcache run -v`
                    import logging

                    logger = logging.getLogger("shardcache")
                    logger.addHandler(logging.StreamHandler())
                    logger.setLevel(level)
                    logger.propagate = False

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _WebDataset)

# Run the sitecustomize that Python would import if this module did not exist.
_rest = [each for each in sys.path if each != _FOLDER]
if (_other := PathFinder.find_spec("sitecustomize", _rest)) and _other.loader:
    __file__ = _other.origin or __file__
    _other.loader.exec_module(sys.modules[__name__])
