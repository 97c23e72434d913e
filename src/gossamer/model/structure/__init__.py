"""The structure of an unmodified model, found by the operators of one forward: which dims of its parameters are one.

dimension    dims that the forward makes one and the same: union, products (heads x head size), parts (fused qkv)
trace        run the forward on shapes alone, and unify the dims of its tensors, operator by operator
model        what was found, by parameter: dimensions and their roles, norms with epsilon, who reads and who writes
pairing      the same for two models of different sizes: which dimension of one became which of the other
"""
