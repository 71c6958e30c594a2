"""Local processes of a program: ``launch.local(4, f, *args)`` runs a function on four ranks of this machine."""

from .rank_server import SIGNALS
from .ranks import RankFailed, Stopped, import_early, local, record

__all__ = ["SIGNALS", "RankFailed", "Stopped", "import_early", "local", "record"]
