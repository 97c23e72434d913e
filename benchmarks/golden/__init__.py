"""The parts of benchmarks/golden.py.

runs       the fixed list of training runs
renames    configuration keys and words that later commits rename
checkout   a worktree of one commit, and the commands that train with its source
artifacts  reads a finished run: metrics, bytes, tensors, plan
compare    compares the same run of two commits, item by item
wrap_loop  one rank of a user's own training loop under gossamer.wrap
"""
