"""The command: ``python -m tests.field [-k NAME …] [--again]``."""

from __future__ import annotations

import argparse
import re
import sys

from tests.field import table
from tests.field.modules import MODULES
from tests.field.runs import ROOT, finding


def main(arguments: list[str]) -> int:
    """Train the modules whose name or kind is asked for; all of them write docs/field.md."""
    parser = argparse.ArgumentParser(prog="python -m tests.field", description=__doc__)
    parser.add_argument("-k", nargs="*", default=[], metavar="NAME", help="modules or kinds whose name has this in it")
    parser.add_argument("--again", action="store_true", help="run what has been run on these sources, too")
    asked = parser.parse_args(arguments)
    names = [
        name
        for name, one in MODULES.items()
        if not asked.k or any(re.search(word, f"{name}\n{one.kind}", re.M) for word in asked.k)
    ]
    findings = []
    for name in names:
        findings.append(finding(name, asked.again))
        print(f"{name:24s} {findings[-1].verdict}  {findings[-1].remedy or ''}", flush=True)
    print(table.counted(findings))
    if len(names) == len(MODULES):
        (ROOT / "docs" / "field.md").write_text(table.markdown(findings))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
