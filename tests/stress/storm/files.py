"""Looking at a tree that others change meanwhile: what goes away is not there."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["below", "inside"]


def inside(directory: Path) -> list[Path]:
    """What is in a directory, sorted; nothing if it is gone."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def below(directory: Path, suffix: str) -> list[Path]:
    """Files with a suffix anywhere below a directory, sorted."""
    return sorted(
        Path(where, name)
        for where, _, names in os.walk(directory)  # passes over what goes away
        for name in names
        if name.endswith(suffix)
    )
