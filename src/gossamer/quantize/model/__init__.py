"""A whole model: its layers found, calibrated and quantized one after the other."""
