"""``shardcache completion``: what makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from shardcache.cli.invocation import Invocation, command

__all__ = ["completion_command"]

_SHELLS = ("bash", "zsh", "fish")
_NAME = "shardcache"
#: Where click looks for what a script of it asks.
_VARIABLE = "_SHARDCACHE_COMPLETE"


@command(
    "completion",
    short="Print what makes bash, zsh or fish complete commands.",
    examples="""
        eval "$(shardcache completion bash)"
        shardcache completion zsh > "${fpath[1]}/_shardcache"
        shardcache completion fish > ~/.config/fish/completions/shardcache.fish
    """,
)
@click.argument("shell", type=click.Choice(_SHELLS))
def completion_command(invocation: Invocation, shell: str) -> int:
    """Print a script that makes SHELL complete commands and options.

    For good: put the first example into ~/.bashrc, or write the file of the others.
    """
    found = get_completion_class(shell)
    assert found is not None  # the choice is of those that click has
    root = click.get_current_context().find_root().command
    script = found(root, {}, _NAME, _VARIABLE).source().rstrip()
    invocation.console.record("completion", {"shell": shell, "script": script}, script)
    return 0
