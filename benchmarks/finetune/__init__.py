"""What `benchmarks/finetune.py` is made of: a setting, timed rounds of ours and of peft, and losses on answers."""
