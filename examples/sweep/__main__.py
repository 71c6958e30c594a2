"""Run ``python -m examples.sweep``."""

from .cli import main

raise SystemExit(main())
