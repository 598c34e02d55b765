"""``python -m dfm_async`` is the command line."""

from __future__ import annotations

import sys

from dfm_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
