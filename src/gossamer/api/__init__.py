"""The public verbs: what `gossamer.train` and the commands call. The only package that sees all others."""
