"""`gossamer watch`: a run on a terminal, read from its directory alone. The run does not know that it is watched.

`watched_run` reads what was appended, `panes` turns it into lines of text of any width, and `app` is the only module
here that needs textual.
"""
