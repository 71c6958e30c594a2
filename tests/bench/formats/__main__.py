"""Run the command line of the benchmark of formats."""

import sys

from . import main

sys.exit(main())
