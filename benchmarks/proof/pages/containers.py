"""torch.nn's own containers, layers and reparametrisations."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.scene import DEPTH, VOCABULARY, WIDTH, Block, Net


def causal(length):
    return nn.Transformer.generate_square_subsequent_mask(length)


class Encoder(nn.Module):
    def __init__(self, **told):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, **told)
        self.encoder = nn.TransformerEncoder(layer, DEPTH, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.head(self.encoder(x, mask=causal(x.shape[1]), is_causal=True))


@habit(EQUAL, hard=True)
def transformer_encoder():
    """nn.TransformerEncoder, which copies a layer."""
    return Encoder()


@habit(EQUAL, hard=True)
def transformer_encoder_norm_first():
    """Pre-norm, gelu."""
    return Encoder(norm_first=True, activation="gelu")


class PaddedEncoder(Encoder):
    def forward(self, input_ids):
        return self.head(self.encoder(self.embed(input_ids), src_key_padding_mask=input_ids % 7 == 0))


@habit(EQUAL, hard=True)
def transformer_encoder_with_padding():
    """A mask of padding, made of the batch."""
    return PaddedEncoder()


class DroppingEncoder(Encoder):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, DEPTH)


@habit(EQUAL, hard=True, draws=True)
def transformer_encoder_with_dropout():
    """With dropout, and nested tensors as they are by default."""
    return DroppingEncoder()


class Decoder(nn.Module):
    """A decoder over a memory that is an embedding of the tokens in reverse."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True), DEPTH
        )

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.head(self.decoder(x, x.flip(1), tgt_mask=causal(x.shape[1])))


@habit(EQUAL, hard=True)
def transformer_decoder():
    """nn.TransformerDecoder."""
    return Decoder()


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.head(self.transformer(x.flip(1), x, tgt_mask=causal(x.shape[1])))


@habit(EQUAL, hard=True)
def transformer():
    """nn.Transformer: encoder and decoder."""
    return Both()


class Recurrent(nn.Module):
    def __init__(self, kind, **told):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, batch_first=True, **told) for _ in range(DEPTH))

    def forward(self, input_ids):
        x, state = self.embed(input_ids), None
        for layer in self.layers:
            y, state = layer(x, state)
            x = x + y
        return self.head(x)


@habit(EQUAL)
def lstm():
    """Four LSTMs, each begins with the last one's state."""
    return Recurrent(nn.LSTM)


@habit(EQUAL)
def gru():
    """Four GRUs, each begins with the last one's state."""
    return Recurrent(nn.GRU)


@habit(EQUAL)
def rnn():
    """Four RNNs."""
    return Recurrent(nn.RNN)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.lower = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.upper = nn.LSTM(WIDTH, WIDTH // 2, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, input_ids):
        return self.head(self.upper(self.lower(self.embed(input_ids))[0])[0])


@habit(EQUAL)
def lstms_of_several_layers():
    """nn.LSTM of two layers, and one of both directions."""
    return Deep()


def reparametrised(with_, **told):
    net = Net()
    for block in net.blocks:
        with_(block.mix, **told)
    return net


@habit(EQUAL, hard=True)
def weight_norm():
    """torch.nn.utils.parametrizations.weight_norm."""
    return reparametrised(parametrizations.weight_norm)


@habit(EQUAL, hard=True)
def weight_norm_of_columns():
    """The same along the other dimension."""
    return reparametrised(parametrizations.weight_norm, dim=1)


@habit(EQUAL, hard=True)
def old_weight_norm():
    """torch.nn.utils.weight_norm, by a hook."""
    return reparametrised(nn.utils.weight_norm)


@habit(EQUAL, hard=True)
def orthogonal():
    """parametrizations.orthogonal."""
    return reparametrised(parametrizations.orthogonal)


@habit(EQUAL, hard=True)
def orthogonal_by_cayley():
    """The same by Cayley's map."""
    return reparametrised(parametrizations.orthogonal, orthogonal_map="cayley")


@habit(EQUAL)
def spectral_norm():
    """parametrizations.spectral_norm: a power iteration in buffers."""
    return reparametrised(parametrizations.spectral_norm)


@habit(EQUAL)
def old_spectral_norm():
    """torch.nn.utils.spectral_norm, by a hook."""
    return reparametrised(nn.utils.spectral_norm)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T

    def right_inverse(self, weight):
        return weight.triu()


@habit(EQUAL, hard=True)
def parametrisation_of_ones_own():
    """register_parametrization with a right inverse."""
    return reparametrised(lambda mix: parametrize.register_parametrization(mix, "weight", Symmetric()))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        out, weights = self.attend(y, y, y, attn_mask=causal(x.shape[1]), is_causal=True)
        return x + out, weights


class KeepsAttention(Net):
    """Adds up the attention of all layers, and reads it at the end."""

    def forward(self, input_ids):
        x, all_weights = self.embed(input_ids), []
        for block in self.blocks:
            x, weights = block(x)
            all_weights.append(weights)
        return self.head(x + 0.1 * torch.stack(all_weights).mean(0) @ x)


@habit(EQUAL)
def attention_of_all_layers():
    """nn.MultiheadAttention, whose weights are collected."""
    return KeepsAttention(Attention)


@habit(EQUAL)
def plain_sequential():
    """nn.Sequential of everything."""
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH),
        *(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)),
        nn.Linear(WIDTH, VOCABULARY),
    )


@habit(EQUAL, hard=True)
def sequential_of_copies():
    """nn.Sequential of deep copies of one layer."""
    layer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *(copy.deepcopy(layer) for _ in range(4)), nn.Linear(WIDTH, VOCABULARY)
    )


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2), nn.GroupNorm(2, WIDTH), nn.SiLU())
            for _ in range(DEPTH)
        )

    def forward(self, input_ids):
        x = self.embed(input_ids).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x)[..., : x.shape[-1]]
        return self.head(x.transpose(1, 2))


@habit(EQUAL)
def convolutions():
    """Conv1d and group norm, over transposed activations."""
    return Convolutions()


class Bag(nn.Module):
    """Parameters in ParameterList and ParameterDict."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.2 for _ in range(2))
        self.biases = nn.ParameterDict({"a": torch.zeros(WIDTH), "b": nn.Parameter(torch.ones(WIDTH))})

    def forward(self, x):
        return x + torch.tanh(x @ self.weights[0] + self.biases["a"]) @ self.weights[1] * self.biases["b"]


@habit(EQUAL)
def lists_of_parameters():
    """nn.ParameterList and nn.ParameterDict in blocks."""
    return Net(Bag)


class Quantized(Block):
    """A vector-quantized bottleneck with a straight-through estimate and a codebook that follows (VQ-VAE)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("book", torch.randn(8, WIDTH))
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x):
        y = super().forward(x)
        flat = y.flatten(0, 1)
        near = torch.cdist(flat.detach(), self.book.clone()).argmin(-1)
        if self.training:
            hot = F.one_hot(near, 8).float()
            self.seen.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.book.lerp_((hot.T @ flat.detach() + self.book) / (hot.sum(0)[:, None] + 1), 0.1)
        return y + 0.3 * (self.book[near].view_as(y) - y).detach()


@habit(EQUAL)
def codebooks():
    """Buffers that are updated and read in every forward."""
    return Net(Quantized)


class Half(Net):
    """Blocks in bfloat16 autocast, the rest in float32."""

    def forward(self, input_ids):
        x = self.embed(input_ids)
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = block(x)
        return self.head(x.float())


@habit(EQUAL)
def autocast_around_blocks():
    """torch.autocast in the model's own forward."""
    return Half()


class Embedded(nn.Module):
    """EmbeddingBag with sparse lookups turned off, positions as a parameter, a pooled token."""

    def __init__(self):
        super().__init__()
        self.bag, self.net = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean"), Net()
        self.positions = nn.Parameter(torch.randn(1, 64, WIDTH) * 0.02)

    def forward(self, input_ids):
        x = self.net.embed(input_ids) + self.positions[:, : input_ids.shape[1]] + self.bag(input_ids)[:, None]
        for block in self.net.blocks:
            x = block(x)
        return self.net.head(x)


@habit(EQUAL)
def positions_and_a_bag():
    """A parameter of the model's own, and nn.EmbeddingBag."""
    return Embedded()


class Adaptive(nn.Module):
    """nn.AdaptiveLogSoftmaxWithLoss at the end."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.net.head = nn.Identity()
        self.out = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, VOCABULARY, cutoffs=[8, 16])

    def forward(self, input_ids, labels):
        x, goal = self.net(input_ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        found = self.out(x, goal.clamp(min=0))
        return -(found.output * (goal >= 0)).sum() / (goal >= 0).sum()


@habit(OR_REFUSED, hard=True)
def adaptive_softmax():
    """Its loss selects rows by the labels."""
    return Adaptive()
