"""The trace of a function: ``tracer`` makes a graph, on tensors of ``fake_tensor``; ``retarget`` gives it a device."""
