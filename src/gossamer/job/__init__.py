"""One process of a run, from start to end: a worker of the command line, or the caller of gossamer.train."""
