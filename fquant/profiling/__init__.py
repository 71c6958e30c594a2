"""Profile a step node by node, its time and its memory: measured on a device, or predicted for one.

found = fquant.profile(step, adapters, state, base, tokens)   # runs it some times; the arguments stay as they are
print(found)                    # a table by line of the source: time, share of the roofline, bytes held
found.save("profile")           # memory.png, and trace.json for https://ui.perfetto.dev

record.py      what a profile consists of: events in time, and buffers of memory
measure.py     a replay that is timed node by node; the same from a prediction
report.py      the table
pictures.py    memory over the step as a picture, and events as a trace
"""

from .measure import predicted, profile
from .record import Buffer, Event, Profile

__all__ = ["Buffer", "Event", "Profile", "predicted", "profile"]
