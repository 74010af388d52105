"""The small real models of the demo and the tests, as folders that ``from_pretrained`` reads.

They are published as GGUF files inside Python packages. A GGUF file takes a quarter of a minute to load, so each is
converted once into the user's cache directory, by and for the installed version of transformers.
"""

from __future__ import annotations

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvkeep.demo.gguf_tokenizer import write_tokenizer
from kvkeep.errors import MissingDependencyError

CONVERTER_VERSION = 1
MODELS_VARIABLE = "KVKEEP_MODELS"


def models_directory() -> Path:
    """Returns the directory of converted models: ``$KVKEEP_MODELS``, else ``models`` in the user's cache directory."""
    chosen = os.environ.get(MODELS_VARIABLE)
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("kvkeep")) / "models"


def model_folder(name: str) -> Path:
    """Returns where the converted model ``name`` belongs, whether or not it is there. See :func:`is_converted`.

    A folder that one version of transformers saved is not safe to load in another, so the path carries the version.
    """
    return models_directory() / f"{name}-{CONVERTER_VERSION}-tf{version('transformers')}"


def tokenizer_folder(name: str) -> Path:
    """Returns where the tokenizer ``name`` belongs that came without a model, whether or not it is there."""
    return models_directory() / f"{name}-tokenizer"


def is_converted(folder: Path) -> bool:
    """Returns whether ``folder`` holds a whole converted model: folders appear complete or not at all."""
    return (folder / "config.json").is_file()


def convert(gguf_path: Path, folder: Path) -> Path:
    """Makes ``folder`` a float32 model with its tokenizer and chat template, and returns it.

    The folder appears at once, complete. Several processes may convert the same model: the first one stays. A folder
    that is already there is left as it is.

    Args:
        gguf_path: a GGUF file of SmolLM2 or Gemma 3.
        folder: the folder to create, usually :func:`model_folder`.

    Raises:
        InvalidRequestError: the file holds another kind of vocabulary.
        MissingDependencyError: the packages of the ``demo`` extra are not installed.
    """
    if is_converted(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / folder.name
        fresh.mkdir()
        try:
            write_tokenizer(gguf_path, fresh)
            _load(gguf_path).save_pretrained(fresh)
        except ImportError as error:
            raise MissingDependencyError(
                f"Converting a model needs {error.name}: pip install 'kvkeep[demo]'"
            ) from error
        _spell_rope_both_ways(fresh / "config.json")
        try:
            fresh.rename(folder)
        except OSError:
            if not is_converted(folder):  # otherwise another process was first
                raise
    return folder


def _load(gguf_path: Path) -> Any:
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": gguf_path.name, "dtype": torch.float32}
    if hasattr(transformers, "GgufConfig"):  # without it, 5.x keeps the weights packed and cannot save them
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return transformers.AutoModelForCausalLM.from_pretrained(gguf_path.parent, **options)


def _spell_rope_both_ways(config_path: Path) -> None:
    """Adds the rope fields that transformers 4 reads, which fall back to wrong defaults when they are absent."""
    config = json.loads(config_path.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters")
    if not rope or "rope_theta" in config:
        return
    by_layer = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    else:
        config.update({field: rope[layer]["rope_theta"] for layer, field in by_layer.items()})
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
