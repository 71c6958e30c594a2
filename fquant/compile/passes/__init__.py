"""Passes over captured graphs: functions that change a graph in place and keep every bit of its results."""
