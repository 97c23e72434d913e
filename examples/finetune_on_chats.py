"""Fine-tune a model with LoRA on conversations, talk to it, export the adapter: python finetune_on_chats.py [MODEL]

MODEL is a Hugging Face folder or a GGUF file of a chat model (extra `adapt`). Without one, a tiny Llama stands in: it
is first trained for a moment on English, so that there is something to adapt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gossamer

SIZES = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": True}
TEMPLATE = (  # what the model reads; a chat model brings its own
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
ANSWERS = {
    "What is a gradient?": "The direction in which the loss grows.",
    "What is a token?": "A piece of text with a number.",
    "What is a batch?": "The sequences of one step.",
    "What is a seed?": "The start of all random numbers.",
    "What is a checkpoint?": "All that a run needs to go on.",
    "What is a replica?": "A copy of the model.",
}


def stand_in() -> tuple[str, str]:
    """Train a tiny Llama on text and write it as a Hugging Face folder; return model and tokenizer."""
    done = gossamer.train(
        {"hf": "llama", "config": LLAMA},
        "stdlib",
        {
            "data": {"sequence": 64},
            "train": {"steps": 60, "batch": 16, "optimizer": {"adamw": {"lr": 3e-3}}, "evaluate_every": 0},
            "run": {"display": "quiet", "name": "base"},
        },
    )
    gossamer.export(done["directory"], "base")
    return "base", "byte"


def main() -> None:
    if len(sys.argv) > 1:
        model, tokenizer = sys.argv[1], f"hf:{sys.argv[1]}"
        source = {"chat": {"files": "chats.jsonl"}}  # with the model's own template
    else:
        model, tokenizer = stand_in()
        Path("chat.jinja").write_text(TEMPLATE)
        source = {"chat": {"files": "chats.jsonl", "template": "chat.jinja"}}
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in ANSWERS.items()]
    Path("chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))

    result = gossamer.train(
        {"gguf" if model.endswith(".gguf") else "hf": model, "adapter": {"lora": {"rank": 32, "alpha": 64}}},
        source,
        {
            "data": {"tokenizer": tokenizer, "sequence": 256, "validation": 0},
            "train": {"steps": 400, "batch": 2, "optimizer": {"adamw": {"lr": 4e-3}}, "evaluate_every": 0},
            "run": {"display": "quiet", "name": "adapted"},
        },
    )
    print(f"loss on the answers: {result.losses[0]:.3f} -> {result.losses[-1]:.3f}")

    chat = gossamer.chat(result["directory"], temperature=0.0, max_new_tokens=60)
    for question in ANSWERS:
        chat.reset()
        print(f"> {question}\n{chat.ask(question)}")
    print(gossamer.export(result["directory"], "my-adapter", to="peft")["load"])  # or to="hf": merged


if __name__ == "__main__":
    main()
