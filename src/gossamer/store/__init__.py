"""Tensors on disk: slices, checkpoints, and the files that other programs read and write.

slices       the position of a tensor in a global tensor, and the rank whose state it is
stateful     the interface of components that save and restore their own state, and of what they restore it from
checkpoint   sharded checkpoints: staged, verified, committed by a rename, resharded on load
huggingface  write a directory that transformers loads
gguf         read the header of a GGUF file
checked_log  an append-only file of JSON lines with checksums
"""
