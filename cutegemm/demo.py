"""SmolLM2-135M in float32, BF16, FP8 and its own four bits: what it answers, how fast, how far from float32."""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .llama import Llama, Tokenizer, fetch_smollm2, generate, has_four_bits, load_gguf
from .nn import Linear, quantize_

PRECISIONS = ("fp32", "bf16", "fp8", "w4")
PROMPT = "What is the capital of France, and what is it known for?"


@dataclass(frozen=True)
class Run:
    """One precision. top1 and kl are those of `compare` with float32."""

    precision: str
    answer: str
    tokens_per_second: float
    megabytes: float
    top1: float
    kl: float


@dataclass(frozen=True)
class DemoResult:
    prompt: str
    device: str
    positions: int
    runs: tuple[Run, ...]

    def print(self, console: Console) -> None:
        for run in self.runs:
            console.print(f"[bold]{run.precision}[/bold]: ", end="")
            console.print(run.answer, markup=False, highlight=False)
        table = Table(box=box.SIMPLE)
        table.add_column("precision")
        for name in ("weights MB", "tokens/s", "top-1 %", "KL"):
            table.add_column(name, justify="right")
        for run in self.runs:
            numbers = f"{run.megabytes:.0f}", f"{run.tokens_per_second:.1f}"
            closeness = ("", "") if run.precision == "fp32" else (f"{run.top1:.1%}"[:-1], f"{run.kl:.5f}")
            table.add_row(run.precision, *numbers, *closeness)
        console.print(table)
        console.print(
            f"SmolLM2-135M-Instruct on {self.device}. Top-1 agreement and mean KL divergence compare logits "
            f"with those of float32 at {self.positions} positions of English text.",
            highlight=False,
        )
        if self.device == "cpu":
            console.print(
                "On a CPU, all but float32 run the kernels' float32 references, which convert every weight at "
                "each call: their speed here says nothing about the kernels.",
                highlight=False,
            )


def compare(reference_logits: Tensor, logits: Tensor) -> tuple[float, float]:
    """(top1, kl) of logits (..., vocab): the share of equal argmax, and the mean KL(reference || logits)."""
    p, q = reference_logits.float().log_softmax(-1), logits.float().log_softmax(-1)
    top1 = (reference_logits.argmax(-1) == logits.argmax(-1)).float().mean()
    return top1.item(), (p.exp() * (p - q)).sum(-1).mean().item()


def at(precision: str, model: Llama, path: Path) -> Llama:
    """The float32 model of a file at one of `PRECISIONS`: a copy, or for "w4" what the file has, as it is."""
    if precision == "fp32":
        return model
    if precision not in PRECISIONS:
        raise ValueError(f"demo: precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if precision == "w4":
        if not has_four_bits(path):
            raise ValueError(
                f"demo: precision is 'w4', and {path} has no layer in four bits; it must have Q4_0 or Q4_1"
            )
        model = load_gguf(path, torch.bfloat16, model.embedding.weight.device, keep_four_bits=True)
    else:
        model = copy.deepcopy(model).to(torch.bfloat16)
    # BF16 steps are 1/8 and 1/4 where the largest logits are; that would double the distance to float32.
    model.set_submodule("head", Linear.from_linear(model.head, out_dtype=torch.float32))
    quantize_(model, "bf16" if precision == "w4" else precision)
    return model


def _megabytes(model: Llama) -> float:
    return sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()}) / 1e6


@torch.inference_mode()
def demo(
    prompt: str = PROMPT,
    device: str = "auto",
    precisions: Sequence[str] | None = None,
    tokens: int = 24,
    model: str | Path | None = None,
    text: str | None = None,
) -> DemoResult:
    """Answer `prompt` greedily with up to `tokens` tokens, and compare logits on `text`, in each precision.

    device is "cpu", "cuda" or "auto": "cuda" if there is a GPU. precisions: of `PRECISIONS`; by default all that the
    file has, "w4" only with tensors of four bits. model is as in `fetch_smollm2`.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"demo: device is {device!r}, but torch finds no GPU here; it must be 'cpu'")
    progress = Console(stderr=True, highlight=False)  # lines, not a spinner: a kernel's build shows its own bar
    path = fetch_smollm2(model)
    progress.print(f"Reading {path}", soft_wrap=True)
    tokenizer = Tokenizer(path)
    full = load_gguf(path, device=device)
    question = tokenizer.encode(tokenizer.chat(prompt))
    sample = torch.tensor([tokenizer.encode(text or TEXT)], device=device)
    progress.print(f"Running {sample.shape[1]} tokens of text in float32")
    reference = full(sample)[0]
    if precisions is None:
        precisions = [name for name in PRECISIONS if name != "w4" or has_four_bits(path)]
    runs = []
    for precision in precisions:
        progress.print(f"Running {precision}")
        low = at(precision, full, path)
        logits = low(sample)[0]
        answer, times = [], []
        for token in generate(low, question, tokens, tokenizer.end):
            answer.append(token)
            times.append(time.perf_counter())
        steps = [after - before for before, after in itertools.pairwise(times)]
        runs.append(
            Run(
                precision,
                tokenizer.decode(answer),
                # The median, because the first step includes the capture of the CUDA graph.
                1 / statistics.median(steps) if steps else float("nan"),
                _megabytes(low),
                *compare(reference, logits),
            )
        )
    return DemoResult(prompt, device, sample.shape[1], tuple(runs))


# Written for this comparison.
TEXT = """\
A graphics processing unit (GPU) is a processor that was originally designed to draw images on a screen. \
Today it is also used for scientific computing and for machine learning, because it can perform a very \
large number of calculations at the same time. A modern GPU has thousands of small cores. Each core is \
slower than a core of a central processing unit (CPU), but all of them together are much faster when the \
same operation is applied to a large amount of data.

The cores of a GPU are grouped into streaming multiprocessors. Each streaming multiprocessor has its own \
registers, its own shared memory, and its own schedulers. A program that runs on the GPU is called a \
kernel. When a kernel is launched, it is executed by many threads in parallel. The threads are organized \
into blocks, and the blocks are organized into a grid. Threads in the same block can communicate with each \
other through shared memory, and they can wait for each other at a barrier.

The main memory of the GPU is large, but it is slow compared to the speed of the cores. It takes hundreds \
of clock cycles to read a value from main memory. In order to hide this latency, the GPU keeps many threads \
in flight at the same time. While one group of threads is waiting for data, another group of threads can \
use the cores. For this reason, the performance of a kernel depends on two things: how much data it has to \
read and write, and how many operations it has to perform. If a kernel performs only a few operations for \
each byte, it is limited by the memory bandwidth. If it performs many operations for each byte, it is \
limited by the speed of the cores.

A large language model is a neural network that is trained to predict the next word in a sentence. It \
consists of a number of layers, and each layer multiplies its input by several large matrices. These \
matrices are called the weights of the model. When the model generates text, it produces one token at a \
time. For each token, all of the weights have to be read from memory. This means that the speed of text \
generation is limited by the memory bandwidth of the GPU.

There are several ways to make a language model faster. One of them is quantization. In quantization, the \
weights of the model are stored with fewer bits. For example, a weight can be stored as an 8-bit number \
instead of a 16-bit number. This reduces the size of the model by a factor of two, and it also reduces the \
amount of data that has to be read from memory. The disadvantage of quantization is that the numbers are \
less precise. In order to keep the error small, each row of a matrix is divided by a scale factor, so that \
the largest number in the row is equal to the largest number that can be represented. The result of the \
multiplication is then multiplied by the same scale factor.

Another way to make a language model faster is to process several requests at the same time. This is called \
batching. When the requests are processed together, the weights have to be read only once, and the cost is \
shared between all of the requests. However, batching also increases the time that each user has to wait \
for a response.
"""
