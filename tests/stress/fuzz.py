"""Fuzz what reads bytes from a disk or a network, with libFuzzer through atheris.

    python -m tests.stress.fuzz --seconds 600 [--corpus DIRECTORY] [TARGET...]

The targets are those of `tests.stress.fuzzing`, one after the other, each in a process of its
own. Ends with 0 if nothing was found, else with 1 and the input that fails, which is
kept in DIRECTORY. Prints how many inputs were tried. The corpus, if it is kept, makes
the next run begin where this one ended.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

#: Most bytes of an input; a sidecar has 700, a progress file of 170 blocks 4096.
_MAX_LENGTH = 4096
#: Seconds and MB that one input may take: far more than any needs on a busy machine.
_MAX_SECONDS, _MAX_MEMORY = 10, 1024
_DONE = re.compile(r"Done (\d+) runs in (\d+) second")


def main(arguments: list[str]) -> int:
    """Run the targets, or, in a child, one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together")
    parser.add_argument("--corpus", type=Path, help="where inputs are kept, found ones too")
    parser.add_argument("targets", nargs="*", help="default: all")
    given = parser.parse_args(arguments)
    from tests.stress.fuzzing import TARGETS

    chosen = given.targets or list(TARGETS)
    if unknown := set(chosen) - set(TARGETS):
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    seconds = max(1, given.seconds // len(chosen))
    total = 0
    with tempfile.TemporaryDirectory() as temporary:
        for name in chosen:
            directory = (given.corpus or Path(temporary)) / name
            directory.mkdir(parents=True, exist_ok=True)
            for number, seed in enumerate(TARGETS[name][1]):
                (directory / f"seed-{number}").write_bytes(seed)
            tried = run(name, directory, seconds)
            if tried is None:
                return 1
            total += tried
    print(f"{total} inputs, nothing found")
    return 0


def _log_of(directory: Path) -> Path:
    return directory.with_suffix(".log")


def run(name: str, directory: Path, seconds: int) -> int | None:
    """Fuzz one target; how many inputs were tried, or None if one failed."""
    command = [sys.executable, "-m", "tests.stress.fuzz", "--child", name, str(directory)]
    command += [f"-max_total_time={seconds}", f"-max_len={_MAX_LENGTH}"]
    command += [f"-timeout={_MAX_SECONDS}", f"-rss_limit_mb={_MAX_MEMORY}"]
    command += [f"-artifact_prefix={directory}/"]
    with open(_log_of(directory), "w") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
    text = _log_of(directory).read_text(errors="replace")
    done = _DONE.search(text)
    if status != 0 or done is None:
        print(f"{name}: FAILED\n{text[-3000:]}", flush=True)
        return None
    print(f"{name}: {done[1]} inputs in {done[2]} s", flush=True)
    return int(done[1])


def child(name: str, directory: str, options: list[str]) -> None:
    """Become a fuzzer; does not return."""
    import atheris

    # Python's own scanner in place of the one in C: only instrumented code tells the
    # fuzzer which inputs lead somewhere new.
    for module in [module for module in sys.modules if module.partition(".")[0] == "json"]:
        del sys.modules[module]
    with atheris.instrument_imports(include=["json", "shardcache", "tests.stress.fuzzing"]):
        import json

        json.scanner.make_scanner = json.scanner.py_make_scanner
        json.decoder.scanstring = json.decoder.py_scanstring
        json._default_decoder = json.decoder.JSONDecoder()
        from tests.stress.fuzzing import TARGETS
    atheris.Setup([sys.argv[0], *options, directory], TARGETS[name][0])
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], sys.argv[4:])
    sys.exit(main(sys.argv[1:]))
