"""Run ``python -m examples.generate``."""

from .cli import main

raise SystemExit(main())
