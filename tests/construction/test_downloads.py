"""Files of a model hub that `from_pretrained` reads in several processes of one host are downloaded once."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import transformers as hf
from huggingface_hub import constants

from lightning_pipe.construction import deferred_init, materialize
from tests.support.processes import run_trainers

PROCESSES = 2
REPOSITORY = "somebody/model"


def load(process: int, address: str, cache: Path) -> float:
    """The sum of a weight; the hub's variables have been read when the process is forked."""
    os.environ["NO_PROXY"] = "127.0.0.1"
    constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = address, False, True
    constants.HUGGINGFACE_CO_URL_TEMPLATE = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    with deferred_init():
        model = hf.GPT2LMHeadModel.from_pretrained(REPOSITORY, cache_dir=cache)
    materialize(model)
    return float(model.transformer.wte.weight.detach().sum())


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
        found = run_trainers(load, PROCESSES, address=address, cache=tmp_path / "home")
    assert found == [float(model.transformer.wte.weight.detach().sum())] * PROCESSES
    assert asked["HEAD", "model.safetensors"] >= PROCESSES
    assert asked["GET", "model.safetensors"] == 1
    assert asked["GET", "config.json"] == 1
