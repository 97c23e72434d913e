"""What benchmarks/proof.py is made of; the modules that are trained are in proof/pages.

scene    what every habit uses: a small net, and what it is trained on
habit    what a habit is, and the list of all
plain    the loop of plain torch that all is compared with
rank     one process of a trial: gossamer.train
judge    one habit: its trials, compared with the plain loop
pages    the habits
"""
