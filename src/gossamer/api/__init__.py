"""The public verbs: the functions behind `gossamer.train` and the commands. Only this package imports all others."""
