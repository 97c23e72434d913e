"""The user's model, never rewritten: its source, its forward, its units and costs, its stages, and its export.

source           build a model from a Hugging Face directory or type, a GGUF file, a function of the user
input_checks     check that the model takes the data's token ids and sequence length
forward_adapter  call a module whose forward signature is unknown
precision        which dtype is computed in, and what is kept in fp32
split            pipeline stages of a model, with placeholders for other stages
unit_seeds       dropout that depends on (seed, step, micro-batch, unit) alone
units            the repeated blocks and the other children that own parameters
compiled         torch.compile, one unit at a time
model_profile    parameters, flop, and the matmul rate of this machine
generate         generate text from a prompt
export           write a directory that transformers loads
"""
