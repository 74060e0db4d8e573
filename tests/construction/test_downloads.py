"""Files of a model hub that `from_pretrained` reads in several processes of one host are downloaded once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import transformers as hf

from tests.support.process_groups import process_group

PROCESSES = 2
REPOSITORY = "somebody/model"
# The processes are forked from one that has imported the libraries, on which a fresh one spends seconds.
LOAD = f"""
import os, sys
import transformers
from lightning_pipe.construction import deferred_init, materialize

GPT2 = transformers.GPT2LMHeadModel
children = [os.fork() for _ in range({PROCESSES - 1})]
with deferred_init():
    model = GPT2.from_pretrained("{REPOSITORY}")
materialize(model)
# in one piece: others write, too
sys.stdout.write("%s\\n" % float(model.transformer.wte.weight.detach().sum()))
sys.exit(any(os.waitpid(child, 0)[1] for child in children if child))
"""


@contextmanager
def hub(folder: Path, asked: Counter[tuple[str, str]]) -> Iterator[str]:
    """A hub on this host that serves the files of a folder, and gives out weights when all processes have asked.

    Args:
        folder: the files.
        asked: counts the requests by method and file.

    Yields:
        Its address.
    """
    changed = threading.Condition()

    class Answers(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            file = self.answer()
            if file is not None:
                self.wfile.write(file.read_bytes())

        def answer(self) -> Path | None:
            name = self.path.partition("?")[0].rpartition("/")[2]
            with changed:
                asked[self.command, name] += 1
                changed.notify_all()
                if (self.command, name) == ("GET", "model.safetensors"):
                    changed.wait_for(lambda: asked["HEAD", name] >= PROCESSES, timeout=60)
            file = folder / name
            if "/resolve/" not in self.path or not file.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return None
            self.send_response(200)
            self.send_header("X-Repo-Commit", "0" * 40)
            self.send_header("ETag", f'"{name}"')
            self.send_header("Content-Length", str(file.stat().st_size))
            self.end_headers()
            return file

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.timeout(120)
def test_one_process_of_a_host_downloads(tmp_path: Path) -> None:
    config = hf.GPT2Config(n_layer=2, n_embd=96, n_head=4, vocab_size=300, n_positions=64)
    model = hf.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "files")
    asked: Counter[tuple[str, str]] = Counter()
    with hub(tmp_path / "files", asked) as address:
        variables = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
        variables.update(HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0", HF_HUB_DISABLE_TELEMETRY="1")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with process_group([sys.executable, "-c", LOAD], env=variables, **pipes) as started:
            output, errors = started.communicate(timeout=100)
    assert started.returncode == 0, errors
    assert [float(line) for line in output.split()] == [float(model.transformer.wte.weight.detach().sum())] * PROCESSES
    assert asked["HEAD", "model.safetensors"] >= PROCESSES
    assert asked["GET", "model.safetensors"] == 1
    assert asked["GET", "config.json"] == 1
