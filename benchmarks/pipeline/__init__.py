"""What `benchmarks/pipeline.py` is made of: a setting, ours and the peer on one host, rounds in the laboratory."""
