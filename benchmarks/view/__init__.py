"""Parts of benchmarks/view.py: run folders that never trained, of any number and length."""
