"""What people look at: run directories, displays, summaries, pictures, trackers.

Everything here reads values and run directories, never the trainer: a viewer that dies takes nothing with it.
"""
