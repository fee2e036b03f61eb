"""`python -m opgraft.verify`: the same as `opgraft verify`."""

import sys

from opgraft.verify.command import main

if __name__ == "__main__":
    sys.exit(main())
