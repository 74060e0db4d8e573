"""The script of the campaign, as `tests.faults.running` starts it: notes what the campaign must know, and runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Recorded(subprocess.Popen):  # type: ignore[type-arg]
    """Notes the exit code of a child for the campaign, which is not its parent."""

    folder = Path()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._number = (options.get("env") or {}).get("LOCAL_RANK")
        super().__init__(*arguments, **options)

    def _handle_exitstatus(self, status: int, *arguments: Any, **options: Any) -> None:
        super()._handle_exitstatus(status, *arguments, **options)  # type: ignore[misc]
        if self._number is not None:
            (self.folder / f"code{self._number}").write_text(str(os.waitstatus_to_exitcode(status)))


def record(folder: Path) -> None:
    """Give this process an output of its own, and note its number and how its children end."""
    number = os.environ.get("LOCAL_RANK", "0")
    (folder / f"pid{number}").write_text(str(os.getpid()))
    output = os.open(folder / f"output{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    Recorded.folder = folder
    subprocess.Popen = Recorded  # type: ignore[misc]


if __name__ == "__main__":
    record(Path(sys.argv[1]))
    from tests.faults.user import main  # only now: importing may print

    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
