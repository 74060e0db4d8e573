"""``python -m tests.gpu.part NAME FILE SETTING``: runs one part in this process and writes each row as it is found."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict

from tests.gpu.setting import Setting


def main(name: str, path: str, setting: str) -> None:
    """Run a part."""
    rows = importlib.import_module(f"tests.gpu.{name}").run(Setting(**json.loads(setting)))
    with open(path, "a", buffering=1) as file:
        for row in rows:
            print(row, flush=True)
            file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
