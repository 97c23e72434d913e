"""The user's model, never rewritten: where it comes from, how it is called, what it is made of, and handing it back.

origin      where a model comes from: a Hugging Face directory or type, a GGUF file, a function of the user
vocabulary  whether it can take what the data gives
call        calling a module whose forward nobody has seen before
precision   which type is computed in, and what is kept in fp32
cut         stages of a model, by ghosts
randomness  dropout that depends on (seed, step, micro-batch, unit) alone
units       the repeated blocks and the other children that own parameters
compiled    torch.compile, one unit at a time
profile     parameters, flop, and the matmul rate of this machine
sample      text out of a model
hand_over   a directory that transformers loads
"""
