"""What benchmarks/zoo.py is made of.

kinds    which types there are, by class
shrink   a small config of any of them, by what its keys are called
inputs   batches for it
case     a tiny model, its batches and its loss, as plain values
check    one type: cut, run in lockstep, compared with one process
trial    one rank of a type in stages over real processes, compared with one process
crew     one type: those ranks
"""
