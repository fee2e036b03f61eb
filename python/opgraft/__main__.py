"""`python -m opgraft`."""

import sys

from opgraft.cli import main

if __name__ == "__main__":
    sys.exit(main())
