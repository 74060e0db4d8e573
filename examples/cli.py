"""LightningCLI: the pipeline and its options stand in a YAML file.

python examples/cli.py fit --config examples/cli.yaml
"""

from __future__ import annotations

from digits import Digits, DigitsData
from lightning.pytorch.cli import LightningCLI

import lightning_pipe  # noqa: F401 - makes "pipe" known to the Trainer

if __name__ == "__main__":
    LightningCLI(Digits, DigitsData, seed_everything_default=0)
