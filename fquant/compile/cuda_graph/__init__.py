"""CUDA graphs of captured steps: one launch a step, in memory of their own.

    host_synchronisation.py  nodes for which the host waits, which no CUDA graph can record
    addresses.py             slots of arguments, and results in the memory of arguments
    recorder.py              records work of a device, and launches it again
    recordings.py            arguments at fixed addresses, copied arguments, and results of a recorded step

Only recorder.py knows ``torch.cuda``.
"""

from .host_synchronisation import describe, synchronises
from .recorder import Recorder, recorder_of
from .recordings import Recordings, refuse

__all__ = ["Recorder", "Recordings", "describe", "recorder_of", "refuse", "synchronises"]
