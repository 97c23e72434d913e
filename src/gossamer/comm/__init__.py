"""The wire: messages, channels, buckets, the pump, byte meters, processes, and the network laboratory.

Everything that crosses from one rank to another goes through here: no other room calls a collective.
"""
