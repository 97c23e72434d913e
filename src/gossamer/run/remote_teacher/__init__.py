"""A teacher on another host: students send it tokens, and get rows of hidden states or its most probable words."""
