"""Ranks on islands: the part of a bucket that each of them exchanges for its island."""
