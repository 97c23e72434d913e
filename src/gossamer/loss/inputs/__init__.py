"""What losses read: the output of a forward, and the labels of a batch."""
