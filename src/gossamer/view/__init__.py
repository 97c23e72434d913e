"""Observability: run directories, displays, summaries, pictures and trackers of a run.

Everything here works on values and run directories, never on the trainer: a viewer that fails does not stop training.
"""
