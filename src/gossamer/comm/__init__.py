"""The communication layer: messages, channels, buckets, the communication thread, byte meters and link probes.

All traffic between ranks goes through this package: no other package calls a collective.
"""
