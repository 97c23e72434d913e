"""A sweep: one configuration trained with several values of its keys and several seeds, journaled and resumable."""
