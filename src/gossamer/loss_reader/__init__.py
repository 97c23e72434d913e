"""Read from the autograd graph of a loss how many rows or labels it averages, so that ranks are weighted exactly."""
