"""Progress in the cell of a notebook: one line that is replaced, and gone at the end."""

import sys
import threading

import nbclient
import nbformat

from tests.support.tars import make_tar

PROGRAM = """
from shardcache import Cache
print(Cache().prewarm(["{url}/0.tar", "{url}/1.tar"], progress=True).failed)
"""


def test_a_cell_shows_one_line_and_a_command_prints_lines(files, tmp_path):
    shown, url = [], files.url
    files.files = {f"/{n}.tar": make_tar(n, 200, 20_000) for n in range(2)}
    held = files.hold("/1.tar", after=100_000)

    class Client(nbclient.NotebookClient):
        def process_message(self, message, *rest):
            if message["msg_type"] in ("display_data", "update_display_data"):
                shown.append(message["content"]["data"]["text/plain"])
                if shown[-1].startswith("1/2 shards"):
                    held.set()
            return super().process_message(message, *rest)

    command = f"!{sys.executable} -m shardcache --dir {tmp_path}/other prewarm {url}/0.tar"
    cells = [nbformat.v4.new_code_cell(code) for code in (PROGRAM.format(url=url), command)]
    giving_up = threading.Timer(60, held.set)
    giving_up.start()
    Client(nbformat.v4.new_notebook(cells=cells), timeout=120).execute()
    giving_up.cancel()
    line, printed = cells[0].outputs
    assert printed["text"] == "0\n" and line["data"] == {"text/plain": ""}
    assert any(text.startswith("1/2 shards") for text in shown)
    text = "".join(output["text"] for output in cells[1].outputs)
    assert "Warmed 1 of 1 shard" in text and "\x1b" not in text
