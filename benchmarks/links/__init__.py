"""What `benchmarks/links.py` is made of: a setting, methods (ours and peers), rounds on links, losses, a table."""
