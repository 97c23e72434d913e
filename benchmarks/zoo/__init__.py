"""What benchmarks/zoo.py is made of.

shrink   a small config of any model type, by what its keys are called
check    one type: cut, run in lockstep, compared with one process
"""
