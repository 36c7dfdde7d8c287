"""Data as YAML that people read: blocks, with every text that is not plain written as JSON's.

For what is written only: dictionaries, lists, texts, numbers, booleans, none of them empty but
texts.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["yaml_text"]

#: What needs no quotes, whatever reads it: YAML 1.1 takes some words for booleans.
_PLAIN = re.compile(r"[A-Za-z_][-A-Za-z0-9_./]*")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
#: What JSON leaves as it is and YAML does not take, or takes for an end of line.
_CONTROL = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff]")


def yaml_text(tree: dict[str, Any]) -> str:
    """A document."""
    return "".join(f"{line}\n" for line in _lines(tree))


def _lines(tree: Any) -> list[str]:
    lines: list[str] = []
    items = tree.items() if isinstance(tree, dict) else [(None, value) for value in tree]
    for key, value in items:
        head = "-" if key is None else f"{_scalar(key)}:"
        # A list of words is a command: on one line, as people write it.
        if isinstance(value, dict | list) and not _is_words(value):
            below = _lines(value)
            if key is None:
                lines += [f"- {below[0]}", *(f"  {line}" for line in below[1:])]
            else:
                lines += [head, *(f"  {line}" for line in below)]
        else:
            lines.append(f"{head} {_scalar(value)}")
    return lines


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(one, dict | list) for one in value)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:
        return value
    text = json.dumps(value, ensure_ascii=False)
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
