"""Seeded test models: small random Llamas with a byte tokenizer, enough to compare tokens and to time transfers.

`tiny`: 2 layers, 1 KB of KV a token, answers at once. `small`: 8 layers, 26 M parameters, 32 KB of KV a token, so
that a prompt of 1,500 tokens takes seconds to compute and leaves 49 MB to move.
"""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

ModelName = Literal["tiny", "small"]

VOCABULARY = 512
SEED = 1234
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Shape(NamedTuple):
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int


SHAPES: dict[str, Shape] = {
    "tiny": Shape(2, 128, 256, 4, 2, 32),
    "small": Shape(8, 512, 1408, 8, 8, 64),
}


def make_model(name: ModelName, directory: Path) -> Path:
    """Write the model into `directory`, unless it is there. Needs torch, safetensors and tokenizers (vLLM has them)."""
    done = directory / "complete"
    if done.exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[name]
    (directory / "config.json").write_text(json.dumps(_config(shape), indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    _write_weights(shape, directory / "model.safetensors")
    _write_tokenizer(directory)
    done.touch()
    return directory


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _write_weights(shape: Shape, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)

    def normal(rows: int, columns: int, spread: float = 0.08) -> Any:
        return torch.randn(rows, columns, generator=generator) * spread

    hidden, keys = shape.hidden, shape.kv_heads * shape.head_size
    queries = shape.heads * shape.head_size
    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, hidden, 1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(VOCABULARY, hidden, 0.3),
    }
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        weights |= {
            prefix + "self_attn.q_proj.weight": normal(queries, hidden, 0.2),
            prefix + "self_attn.k_proj.weight": normal(keys, hidden, 0.2),
            prefix + "self_attn.v_proj.weight": normal(keys, hidden, 0.2),
            prefix + "self_attn.o_proj.weight": normal(hidden, queries, 0.2),
            prefix + "mlp.gate_proj.weight": normal(shape.intermediate, hidden),
            prefix + "mlp.up_proj.weight": normal(shape.intermediate, hidden),
            prefix + "mlp.down_proj.weight": normal(hidden, shape.intermediate),
            prefix + "input_layernorm.weight": torch.ones(hidden),
            prefix + "post_attention_layernorm.weight": torch.ones(hidden),
        }
    save_file(weights, str(path), metadata={"format": "pt"})


def _write_tokenizer(directory: Path) -> None:
    """One token per byte, three specials, and fillers up to the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<unk>", "<s>", "</s>"]
    symbols = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    symbols += [f"<x{number}>" for number in range(len(symbols), VOCABULARY)]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=specials[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "model_max_length": 8192,
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
