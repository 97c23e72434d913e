"""Models of transformers as their classes make them, tiny."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

from proof.habit import EQUAL, OR_REFUSED, habit
from proof.scene import ROWS, VOCABULARY, Padded, Rows

USUAL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}


def made(kind, **config):
    """kind: such as "Llama"; a causal model, but where `head` says otherwise."""
    head = config.pop("head", "ForCausalLM")
    known = getattr(transformers, f"{kind}Config")
    return getattr(transformers, f"{kind}{head}")(known(**config))


@habit(EQUAL)
def llama():
    """Llama."""
    return made("Llama", **USUAL)


@habit(EQUAL, data=Padded)
def llama_with_padding():
    """Llama with an attention mask."""
    return made("Llama", **USUAL)


@habit(EQUAL)
def gpt2_tied():
    """GPT-2, whose head is its embedding."""
    return made(
        "GPT2",
        head="LMHeadModel",
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=4,
        n_head=2,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


@habit(EQUAL)
def qwen3():
    """Qwen3, tied."""
    return made("Qwen3", **USUAL, head_dim=8, tie_word_embeddings=True)


@habit(EQUAL)
def gemma3():
    """Gemma 3 (text): local and global layers by turns."""
    config = transformers.Gemma3TextConfig(**USUAL, head_dim=8, sliding_window=4)
    return transformers.Gemma3ForCausalLM(config)


@habit(EQUAL)
def mixtral():
    """Mixtral with its loss for balance."""
    return made("Mixtral", **USUAL, num_local_experts=4, output_router_logits=True)


@habit(EQUAL)
def qwen3_moe():
    """Qwen3 with experts."""
    return made("Qwen3Moe", **USUAL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


@habit(EQUAL)
def mamba():
    """Mamba."""
    return made("Mamba", vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=4)


@habit(EQUAL)
def rwkv():
    """RWKV."""
    return made(
        "Rwkv", vocab_size=VOCABULARY, hidden_size=16, attention_hidden_size=16, num_hidden_layers=4, context_length=64
    )


@habit(EQUAL)
def t5():
    """T5, the labels as the decoder's input."""
    return made(
        "T5",
        head="ForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )


@habit(EQUAL)
def bart():
    """BART."""
    return made("Bart", head="ForConditionalGeneration", **SEQ2SEQ)


@habit(EQUAL, draws=True)
def bart_with_dropout():
    """BART with dropout, and layers that may be left out set to none."""
    return made("Bart", head="ForConditionalGeneration", **{**SEQ2SEQ, "dropout": 0.1})


@habit(EQUAL)
def opt():
    """OPT."""
    return made(
        "OPT",
        vocab_size=VOCABULARY,
        hidden_size=16,
        ffn_dim=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        max_position_embeddings=64,
        word_embed_proj_dim=16,
        dropout=0.0,
    )


@habit(EQUAL)
def bert():
    """BERT for masked words."""
    return made(
        "Bert", head="ForMaskedLM", **_without(USUAL), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


@habit(EQUAL)
def roberta():
    """RoBERTa for masked words, with positions of the padding."""
    return made(
        "Roberta", head="ForMaskedLM", **_without(USUAL), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


@habit(EQUAL)
def albert():
    """ALBERT: one layer many times."""
    return made(
        "Albert",
        head="ForMaskedLM",
        **_without(USUAL),
        embedding_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


@habit(EQUAL)
def electra():
    """ELECTRA's generator."""
    return made(
        "Electra",
        head="ForMaskedLM",
        **_without(USUAL),
        embedding_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


@habit(EQUAL)
def deberta():
    """DeBERTa v2."""
    return made(
        "DebertaV2",
        head="ForMaskedLM",
        **_without(USUAL),
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _without(told):
    return {name: value for name, value in told.items() if name != "num_key_value_heads"}


class Sounds(Rows):
    """Waves, and the words in them."""

    def __init__(self):
        super().__init__()
        self.waves = torch.randn(ROWS, 400, generator=torch.Generator().manual_seed(6))
        self.words = torch.randint(1, 12, (ROWS, 4), generator=torch.Generator().manual_seed(7))

    def __getitem__(self, index) -> dict[str, Tensor]:
        return {"input_values": self.waves[index], "labels": self.words[index]}


SPEECH = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
    "layerdrop": 0.0,
    "apply_spec_augment": False,
    "mask_time_prob": 0.0,
    "pad_token_id": 0,
    "ctc_loss_reduction": "mean",
    "ctc_zero_infinity": True,
}


@habit(EQUAL, hard=True, data=Sounds)
def wav2vec2():
    """wav2vec 2 with CTC: weight_norm in its position convolution."""
    return made("Wav2Vec2", head="ForCTC", **SPEECH)


@habit(EQUAL, hard=True, data=Sounds)
def hubert():
    """HuBERT with CTC."""
    return made("Hubert", head="ForCTC", **SPEECH)


@habit(EQUAL, hard=True, data=Sounds)
def wavlm():
    """WavLM with CTC."""
    return made("WavLM", head="ForCTC", **SPEECH)


@habit(EQUAL, hard=True, data=Sounds)
def wav2vec2_normed_first():
    """The larger one's order of norms, and layer norm in its convolutions."""
    return made("Wav2Vec2", head="ForCTC", **{**SPEECH, "do_stable_layer_norm": True, "feat_extract_norm": "layer"})


class Images(Rows):
    def __init__(self):
        super().__init__()
        self.images = torch.randn(ROWS, 3, 16, 16, generator=torch.Generator().manual_seed(6))

    def __getitem__(self, index) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.ids[index, 0] % 5}


VISION = {
    "image_size": 16,
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 5,
}


@habit(OR_REFUSED, hard=True, data=Images, train={"loss": "classification"})
def beit_with_relative_positions():
    """BEiT: an index table behind an lru_cache, shared by its layers."""
    return made("Beit", head="ForImageClassification", **VISION, use_relative_position_bias=True, drop_path_rate=0.0)


@habit(EQUAL, data=Images, train={"loss": "classification"})
def vit():
    """ViT."""
    return made("ViT", head="ForImageClassification", **VISION)
