"""One rank of a run, from start to end: a worker process of the command line, or the caller of gossamer.train."""
