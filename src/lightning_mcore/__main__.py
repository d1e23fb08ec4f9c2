"""``python -m lightning_mcore``: the same as the command ``lightning-mcore``."""

import sys

from lightning_mcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
