"""A small config of any model type. Knows how keys are called, and no model.

Every key of the type's own default config that says a size is replaced, by the first rule that fits its name. As what
fits together differs between types (heads times head size = width, or not), there are several recipes; the caller takes
the first whose model runs.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

LAYERS = 6
WIDTH = 64
VOCABULARY = 96
SKIPPED = {"dtype", "torch_dtype", "transformers_version", "architectures", "id2label", "label2id", "model_type"}
DEPTH = r"num_hidden_layers|n_layers?|num_layers|(encoder|decoder|text)_layers|depth|num_blocks"
DROPPED_LAYERS = r".*layer_?drop(out)?"  # a cut is of one way through a model
# key -> value; the first that matches the whole key
RULES: list[tuple[str, int]] = [
    (r".*vocab_?size(_per_layer_input)?|n_vocab|vocab_size.*|.*_vocab", VOCABULARY),
    (r".*compress_ratio", 2),
    (r"indexer_kv_heads", 1),
    (r"clip_.*", 8),
    (r"num_kv_shared_layers", 2),
    (r".*_budget", 8),
    (DEPTH, LAYERS),
    (r"num_nextn_predict_layers|num_mtp.*|mtp_num.*", 0),
    (r"first_k_dense_replace|num_dense_layers|n_dense_layers|mlp_only_layers_count", 1),
    (r".*(kv_heads|key_value_heads|num_query_groups|multi_query_group_num|num_global_key_value_heads)", 2),
    (r".*(experts_per_tok(en)?|top_?k|topk|num_selected_experts|experts_top_k)|top_k_experts|moe_k", 2),
    (r"n_group|topk_group|num_expert_group.*|mamba_n_groups|mamba_ngroups|n_groups|num_limited_groups", 1),
    (r"(n|num)_shared_experts?|moe_num_shared_experts", 1),
    (r"zero_expert_num", 2),
    (r".*(num|n)_(.*_)?experts|num_local_experts|.*num_experts", 4),
    (r"qk_rope_head_dim|qk_nope_head_dim", 8),
    (r"index_n_heads", 2),
    (r"kv_lora_rank|.*lora_rank|.*_rank|lora_r|d_aux", 16),
    (r"head_dim|.*_head_dim|attention_head_size|d_kv|kv_channels|.*head_dim_.*|d_head|.*headdim|v_head_dim", 16),
    (r".*d_state|.*state_size|ssm_state_size", 16),
    (r".*num_(attention_)?heads|n_heads?|num_heads|.*attention_heads|.*_heads|.*n_heads", 4),
    (r".*intermediate.*(size|dim)|.*ffn_dim|d_ff|n_inner|ffn_hidden_size|inner_dim|mlp_dim|.*d_inner", WIDTH),
    (
        r"emb_dim|embedding_size|embed_dim|n_embd|d_model|dim|width|.*hidden_(size|dim)|hidden_size_.*|.*_width|model_dim",
        WIDTH,
    ),
    (r".*hidden_size_.*|d_embed|attention_hidden_size|.*_dim_size|word_embed_proj_dim", WIDTH),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length|.*max_position.*", 128),
    (r"sliding_window|attention_window.*|local_attention|window_size|attention_chunk_size", 8),
    (r"chunk_size|mamba_chunk_size|.*_chunk_length|block_size", 8),
    (r"image_size", 32),
    (r"patch_size", 8),
]
WIDTHS = re.compile(
    r".*(hidden_size|d_model|n_embd|dim|intermediate_size|d_ff|ffn_dim|width|embedding_size|hidden_dim)"
)
HEADS = re.compile(r".*heads?|num_query_groups")
HEAD_SIZES = re.compile(r".*(head_dim|headdim|d_kv|kv_channels|d_head|head_size).*")
IMAGES = re.compile(r".*(image|patch|window)_size")
Shrinker = Callable[[str, int, Mapping[str, Any]], int]


@dataclass(frozen=True)
class Way:
    """How the keys of one config are made: one combination of the choices below."""

    rule: Shrinker
    derived: bool = False  # keep what the config computed of other keys
    filled: bool = False  # give sizes also to keys that the config leaves open
    layers: int = LAYERS  # 0: as many as there are


def recipes(config_class: type) -> Iterator[tuple[str, Any]]:
    """(name of the recipe, config), the likeliest first; an exception where a recipe cannot build one."""
    for depth, layers in (("", LAYERS), (", all layers", 0)):
        for filling in ("", ", open keys filled"):
            for deriving in ("", ", derived keys kept"):
                for name, rule in RECIPES.items():
                    way = Way(rule, derived=bool(deriving), filled=bool(filling), layers=layers)
                    yield f"{name}{depth}{filling}{deriving}", shrunk(config_class, way)


def shrunk(config_class: type, way: Way) -> Any:
    """A config of `config_class`, or the exception that building it raised."""
    try:
        return config_class(**_keys(config_class, config_class().to_dict(), way))
    except Exception as error:
        return error


def _keys(config_class: type, keys: Mapping[str, Any], way: Way) -> dict[str, Any]:
    parameters = inspect.signature(config_class).parameters
    layers = next((v for k, v in keys.items() if re.fullmatch(DEPTH, k) and isinstance(v, int)), LAYERS)
    parts = getattr(config_class, "sub_configs", {})
    found: dict[str, Any] = {}
    for key, value in keys.items():
        if key in SKIPPED:
            continue
        if key in parts and isinstance(value, dict):
            found[key] = _part(parts[key], value, way)
        elif key in parameters and (way.derived or value is None or parameters[key].default is not None):
            new = _value(key, value, keys, layers, way)
            if new != value:
                found[key] = new
    if "output_router_logits" in parameters:
        found["output_router_logits"] = True
    return found


def _part(config_class: Any, value: dict[str, Any], way: Way) -> Any:
    if not inspect.isclass(config_class) or config_class.__name__ == "AutoConfig":
        from transformers import CONFIG_MAPPING

        config_class = CONFIG_MAPPING[value["model_type"]]
    kind = {"model_type": value["model_type"]} if "model_type" in value else {}
    rope = {"rope_theta": 10000.0} if way.filled else {}  # some attention looks for it in its own part
    return {**kind, **rope, **_unlike(config_class, value, way), **_keys(config_class, value, way)}


def _unlike(config_class: Any, value: dict[str, Any], way: Way) -> dict[str, Any]:
    """What the outer config has given to its part, unlike the part's own default."""
    parameters, own = inspect.signature(config_class).parameters, config_class().to_dict()
    given = {k: v for k, v in value.items() if k in parameters and k not in SKIPPED and v != own.get(k)}
    return {k: v for k, v in given.items() if way.derived or parameters[k].default is not None}


def _value(key: str, value: Any, keys: Mapping[str, Any], layers: int, way: Way) -> Any:
    if not value and type(value) in (NoneType, dict) and way.filled:
        return _filled(key, value, keys, way)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float) and re.fullmatch(DROPPED_LAYERS, key):
        return 0.0
    if key.endswith("token_id") and isinstance(value, int):
        return value if value < VOCABULARY else 1
    if isinstance(value, int):
        return value if way.layers == 0 and re.fullmatch(DEPTH, key) else way.rule(key, value, keys)
    if isinstance(value, list | tuple) and value and way.layers:
        return type(value)(_listed(key, list(value), layers))
    if isinstance(value, dict) and value and way.layers and all(str(k).isdigit() for k in value):
        return {k: v for k, v in value.items() if int(k) < way.layers}
    return value


def _filled(key: str, value: Any, keys: Mapping[str, Any], way: Way) -> Any:
    """What a model asks for although its config leaves it open."""
    if key.endswith("token_id"):
        return 1
    if key == "layer_types":
        return ["full_attention"] * LAYERS
    if key == "rope_parameters":
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        return dict.fromkeys(dict.fromkeys(keys.get("layer_types") or ()), rope) or rope
    if any(re.fullmatch(pattern, key) for pattern, _ in RULES):
        return way.rule(key, 2**20, keys)
    return value


def _listed(key: str, value: list[Any], layers: int) -> list[Any]:
    if len(value) == layers and layers > LAYERS:
        kinds = list(dict.fromkeys(map(str, value)))
        first = [next(v for v in value if str(v) == kind) for kind in kinds[:LAYERS]]
        return (first + value[: LAYERS - len(first)])[:LAYERS] if len(kinds) > 1 else value[:LAYERS]
    if all(type(v) is int for v in value) and re.search(r"(ids|indices|idx|layers|positions)$", key):
        return sorted({v * LAYERS // layers for v in value if v < layers})
    return value


def _named(key: str, value: int, keys: Mapping[str, Any]) -> int:
    for pattern, size in RULES:
        if re.fullmatch(pattern, key):
            return min(value, size) if value > 0 else value
    return value


def _in_ratio(key: str, value: int, keys: Mapping[str, Any]) -> int:
    """Numbers of heads keep their ratios."""
    if HEADS.fullmatch(key) and value > 0:
        most = max(v for k, v in keys.items() if HEADS.fullmatch(k) and isinstance(v, int))
        return max(1, 4 * value // most)
    return _named(key, value, keys)


def _factor(keys: Mapping[str, Any]) -> int:
    widths = [v for k in ("hidden_size", "d_model", "n_embd", "dim", "emb_dim") if isinstance(v := keys.get(k), int)]
    return max(1, (widths[0] if widths else WIDTH) // WIDTH)


def _scaled_heads(key: str, value: int, keys: Mapping[str, Any]) -> int:
    """Widths and numbers of heads divided by one factor; the size of a head stays."""
    if HEAD_SIZES.fullmatch(key):
        return value
    if HEADS.fullmatch(key) or WIDTHS.fullmatch(key):
        return max(1, value // _factor(keys))
    return _named(key, value, keys)


def _scaled_sizes(key: str, value: int, keys: Mapping[str, Any]) -> int:
    """Widths and sizes of heads divided by one factor; the number of heads stays."""
    if HEADS.fullmatch(key):
        return value
    if HEAD_SIZES.fullmatch(key) or WIDTHS.fullmatch(key):
        return max(2, value // _factor(keys) // 4 * 4)
    return _named(key, value, keys)


def _kept(key: str, value: int, keys: Mapping[str, Any]) -> int:
    """Widths, heads and images as they are."""
    if any(kind.fullmatch(key) for kind in (HEADS, HEAD_SIZES, WIDTHS, IMAGES)):
        return value
    return _named(key, value, keys)


RECIPES: dict[str, Shrinker] = {
    "named": _named,
    "heads in ratio": _in_ratio,
    "scaled heads": _scaled_heads,
    "scaled sizes": _scaled_sizes,
    "widths kept": _kept,
}
