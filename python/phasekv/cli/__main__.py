"""Makes ``python -m phasekv.cli`` the same as ``phasekv``."""

import sys

from phasekv.cli import main

if __name__ == "__main__":
    sys.exit(main())
