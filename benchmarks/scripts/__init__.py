"""Training scripts that others wrote: what is changed in them, what stands in for their data, and one rank of a run."""
