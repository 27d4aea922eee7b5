"""`python -m troupe`: the `troupe` command."""

import sys

from troupe.services.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
