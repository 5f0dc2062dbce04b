"""Folders with small open_clip models, which have random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

WIDTH = 16
CLIP = {
    "embed_dim": WIDTH,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
}
# Similar to ViT-B-16-SigLIP2: a timm tower, a text tower without causal mask that pools the last
# token, a projection with bias, and a tokenizer in the folder.
SIGLIP = {
    "embed_dim": WIDTH,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {
        "image_size": 32,
        "timm_model_name": "test_vit2",
        "timm_model_pretrained": False,
        "timm_pool": "avg",
        "timm_proj": "linear",
    },
    "text_cfg": {
        "context_length": 12,
        "vocab_size": 64,
        "hf_tokenizer_name": "unused/repository",
        "tokenizer_kwargs": {"clean": "canonicalize"},
        "width": 16,
        "heads": 2,
        "layers": 2,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
        "act_kwargs": {"approximate": "tanh"},
    },
}
SIGLIP_IMAGES = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"}


def clip_folder(folder: Path, seed: int = 0) -> Path:
    """Write a CLIP-like model, whose tokenizer is part of open_clip."""
    return write_folder(folder, CLIP, {}, seed)


def siglip_folder(folder: Path, seed: int = 0) -> Path:
    """Write a SigLIP-like model with a tokenizer."""
    write_folder(folder, SIGLIP, SIGLIP_IMAGES, seed)
    write_tokenizer(folder)
    return folder


def write_folder(
    folder: Path, model: dict[str, Any], preprocessing: dict[str, Any], seed: int = 0
) -> Path:
    """Write the configuration and random weights."""
    import open_clip  # not at the top: it imports transformers, which takes seconds

    folder.mkdir(parents=True)
    config = {"model_cfg": model, "preprocess_cfg": preprocessing}
    (folder / "open_clip_config.json").write_text(json.dumps(config))

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        built = open_clip.create_model(f"local-dir:{folder}", load_weights=False)
        # All texts have the same embedding with the initial weights, which are small.
        for parameter in built.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    save_file(built.state_dict(), folder / "open_clip_model.safetensors")
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of letters with the padding and end tokens of SigLIP."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    letters = ["<pad>", "</s>", "<unk>"] + list(" abcdefghijklmnopqrstuvwxyz0123456789")
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
