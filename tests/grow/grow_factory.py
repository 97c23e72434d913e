"""Factories that a configuration names in the tests of this folder."""

from __future__ import annotations

from torch import nn

from grow.grow_models import Plain, bert


def plain(width: int = 24, layers: int = 2, heads: int = 4, hidden: int = 36) -> nn.Module:
    return Plain(width, layers, heads, hidden)


def encoder(width: int = 24, heads: int = 4) -> nn.Module:
    return bert(hidden_size=width, num_attention_heads=heads)
