"""What benchmarks/loops.py is made of; the loops themselves are in benchmarks/habits.

scene    what every habit uses: a small net, batches, its place among the ranks
habit    what a habit is, and the list of all
rank     one process: runs a loop, and says what came of it
crew     the processes of one trial, started as a launcher starts them
judge    one habit: its trials, compared with one process of plain torch
"""
