"""Cutting an unmodified model: every stage runs the user's forward, and what it does not own are ghosts.

flow       what a forward was seen to do: calls of units, and which value reaches whom
trace      seeing it: one run under watch
cuts       the first unit of every stage; what a stage then owns, receives and sends
stage      a module in which the others' units are ghosts
live       a micro-batch in it: backward, or its two parts (split), or its forward once more (again)
partial    building only the parameters that a stage holds
ways       one flow for every kind of batch
lockstep   all stages in one process: the reference
"""
