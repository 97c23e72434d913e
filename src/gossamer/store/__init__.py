"""Tensors on disk: slices, checkpoints, and the files other programs read and write.

slices       which part of which global tensor a tensor is, and whose
checkpoint   writing beside the old one, verifying, committing by a rename, reading back under any layout
huggingface  a directory that transformers loads
gguf         what llama.cpp wrote: configuration, tokenizer, dequantised tensors
"""
