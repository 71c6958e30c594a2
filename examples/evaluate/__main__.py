"""Run ``python -m examples.evaluate``."""

from .cli import main

raise SystemExit(main())
