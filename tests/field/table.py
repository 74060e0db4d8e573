"""Writes what came out as Markdown: docs/field.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.field import verdicts
from tests.field.modules import MODULES
from tests.field.runs import Finding

_GOOD = (verdicts.EQUAL, verdicts.SLICED)

_HEAD = """# Published modules

```sh
make test-field
```

{count} modules of {packages} packages train for eight steps on one device, with `strategy="pipe"` alone on two
processes, and, where that ends in an error or a warning that names an option, with this option. They were chosen
(`tests/field/modules.toml`) before the first of them ran. Losses of every step and the final weights decide, in double
precision where the module allows it. Data are synthetic, weights random, networks small. Dropout and other noise are
off, since a pipeline draws other numbers: distributions of scVI give their means, Draem gets anomalies that no chance
makes. Where a message says `passes=n`, two passes are tried.

**{good} of {trainable} modules ({share:.0f} %) that train on one device with one optimizer are equal by the word
alone**, {remedied} more with the option that the message names.

{verdicts}
"""

_EXPLAINED = """
In the column *from*, `own` is a LightningModule of the package, and `wrapped` a network of the package in a
LightningModule that has its loss and AdamW. *Equal to the same slices* is what batch norm allows: a plain Trainer that
accumulates the micro-batches finds the same losses and parameters, and the plan has said that batch norm sees
micro-batches.
"""


def markdown(findings: Sequence[Finding]) -> str:
    """The page with the share, the numbers of verdicts and one row for each module."""
    trainable = [one for one in findings if one.word not in verdicts.NOT_COUNTED and one.one_optimizer]
    good = sum(one.word in _GOOD for one in trainable)
    remedied = sum(one.verdict == verdicts.REMEDIED for one in trainable)
    head = _HEAD.format(
        count=len(findings),
        packages=len({MODULES[one.name].package for one in findings}),
        good=good,
        trainable=len(trainable),
        share=100 * good / max(1, len(trainable)),
        remedied=remedied,
        verdicts=counted(findings),
    )
    return head + _EXPLAINED + "\n" + rows(findings)


def counted(findings: Sequence[Finding]) -> str:
    """How many modules have each verdict, by the word alone and after the options that messages name."""
    words, ends = Counter(one.word for one in findings), Counter(one.verdict for one in findings)
    lines = [f"| {name} | {words[name]} | {ends[name]} |" for name in verdicts.VERDICTS if words[name] + ends[name]]
    return "\n".join(["| verdict | by the word alone | with the option |", "|---|---|---|", *lines])


def rows(findings: Sequence[Finding]) -> str:
    """One row for each module, by kinds."""
    lines = ["| kind | module | from | by the word alone | with the option | option |", "|---|---|---|---|---|---|"]
    for one in findings:
        published = MODULES[one.name]
        remedy = one.remedy if one.verdict == verdicts.REMEDIED else {}
        end = one.verdict if len(one.runs) > 1 else ""
        option = ", ".join(f"`{key}={value!r}`" for key, value in remedy.items())
        called = f"`{published.path.rpartition('.')[2]}` ({one.name})"
        lines.append(
            f"| {published.kind} | {called} | {published.package}, {published.form} | {one.word} | {end} | {option} |"
        )
    return "\n".join(lines) + "\n"
