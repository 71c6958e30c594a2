"""Run the command line of the ablation; contestants are in the package, because a child imports no ``__main__``."""

import sys

from . import main

sys.exit(main())
