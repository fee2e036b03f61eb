"""`python -m opgraft.verification`: the same as `opgraft verify`."""

import sys

from opgraft.verification.command import main

if __name__ == "__main__":
    sys.exit(main())
