"""Where products with weights of four, eight and sixteen bits cross, from measured results: a picture and a table.

    python tools/figure.py        benchmarks/h200/w4a16.png, and what stands between README.md's marks
    python tools/figure.py DIR    of other results: DIR/w4a16.png, and the table is printed

It needs matplotlib (pip install ".[bench]") and no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

import torch

from cutegemm import roofline
from cutegemm.tools import bench

MARKS = "<!-- crossovers:begin -->", "<!-- crossovers:end -->"
PICTURE = "w4a16.png"
KN = ((4096, 28672), (14336, 4096))  # Llama-3-8B's gate_up and down
MOST = 8192  # tokens
ALIKE = 0.02  # about what two measurements of one kernel differ by

Curve = dict[int, float]  # us a call by m


@dataclass(frozen=True)
class Format:
    """title: of its line. family: whose results have its times. peer: whose time, or ours."""

    title: str
    family: str
    peer: str
    color: str
    floor: Callable[[int, int, int], float]  # us, of m, n and k

    def curve(self, rows: Sequence[bench.Row], k: int, n: int) -> Curve:
        found = [row for row in bench.models(rows) if (row["k"], row["n"]) == (k, n)]
        if not self.peer:
            return {row["m"]: row["us"] for row in found}
        return {row["m"]: row["peers"][self.peer] for row in found if self.peer in row["peers"]}


def _bf16(m: int, n: int, k: int) -> float:
    return roofline.floor_us(roofline.gemm_bytes(m, n, k), roofline.gemm_flops(m, n, k))


def _fp8(m: int, n: int, k: int) -> float:
    nbytes = roofline.gemm_bytes(m, n, k, torch.float8_e4m3fn, scales=m + n)
    return roofline.floor_us(nbytes, roofline.gemm_flops(m, n, k), torch.float8_e4m3fn)


def _w4a16(m: int, n: int, k: int) -> float:
    nbytes = roofline.gemm_bytes(m, n, k, weight=n * k // 2 + 2 * n * -(-k // 128))
    return roofline.floor_us(nbytes, roofline.gemm_flops(m, n, k))


FORMATS = {
    "W4A16": Format("W4A16: w4a16_mm, groups of 128", "gemm_w4a16", "", "tab:green", _w4a16),
    "BF16": Format("BF16: torch.mm", "gemm_w4a16", "torch_mm", "tab:blue", _bf16),
    "FP8": Format("FP8: scaled_mm, per token and channel", "gemm_fp8", "", "tab:orange", _fp8),
}
W4A16 = FORMATS["W4A16"]
OTHERS = ("BF16", "FP8")  # what W4A16 is compared with


def _between(x: float, x0: float, y0: float, x1: float, y1: float) -> float:
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def us_at(curve: Curve, m: float) -> float:
    """A curve's value between its points, where it is straight if both axes are logarithmic."""
    for left, right in pairwise(sorted(curve)):
        if left <= m <= right:
            return exp(_between(log(m), log(left), log(curve[left]), log(right), log(curve[right])))
    return curve[round(m)]


def crossovers(one: Curve, other: Curve) -> list[float]:
    """Each m where one stops being the faster of both or starts to be, interpolated as us_at does.

    Of two that are within ALIKE of each other neither is the faster.
    """
    if not one or not other:
        return []
    first, last = max(min(one), min(other)), min(max(one), max(other))
    ms = [m for m in sorted({*one, *other}) if first <= m <= last]
    behind = [(log(m), log(us_at(one, m) / us_at(other, m))) for m in ms]
    apart = [i for i, (_, ratio) in enumerate(behind) if abs(ratio) > log(1 + ALIKE)]
    found = []
    for i, j in pairwise(apart):
        changes = [(left, right) for left, right in pairwise(behind[i : j + 1]) if (left[1] < 0) != (right[1] < 0)]
        if (behind[i][1] < 0) != (behind[j][1] < 0):
            (x0, a), (x1, b) = changes[0]
            found.append(exp(_between(0, a, x0, b, x1)))
    return found


def floors_meet(other: str, n: int, k: int) -> int | None:
    """The least m up to MOST at which W4A16's floor is no longer below the other's."""
    floor = FORMATS[other].floor
    return next((m for m in range(1, MOST + 1) if W4A16.floor(m, n, k) >= floor(m, n, k)), None)


def load(results: Path) -> dict[str, dict[str, Any]]:
    """By family, the results that there are."""
    paths = {each.family: results / f"{each.family}.json" for each in FORMATS.values()}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def curves(found: Mapping[str, Any], k: int, n: int) -> dict[str, Curve]:
    """By format, those that were measured with this weight."""
    made = {
        name: each.curve(found[each.family]["rows"], k, n) for name, each in FORMATS.items() if each.family in found
    }
    return {name: curve for name, curve in made.items() if curve}


def times(found: Mapping[str, Any], k: int, n: int) -> list[str]:
    """Lines of a table: by format µs a call, and its floor, at each m that all of them have."""
    of = curves(found, k, n)
    if "W4A16" not in of:
        return []
    ms = sorted(set.intersection(*(set(curve) for curve in of.values())))
    lines = [
        f"| {k} × {n}, µs (floor) | {' | '.join(f'M = {m}' for m in ms)} |",
        f"| --- |{' --: |' * len(ms)}",
    ]
    for name, curve in of.items():
        cells = (f"{bench.microseconds(curve[m])} ({bench.microseconds(FORMATS[name].floor(m, n, k))})" for m in ms)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def table(found: Mapping[str, Any]) -> str:
    """README.md's text."""
    lines = []
    for k, n in KN:
        of = curves(found, k, n)
        for name in OTHERS:
            if "W4A16" in of and name in of:
                cross = ", ".join(f"{m:.0f}" for m in crossovers(of["W4A16"], of[name])) or "nowhere"
                floors = floors_meet(name, n, k)
                lines.append(f"| {k} × {n} | {name} | {cross} | {floors or 'nowhere'} |")
    if not lines:
        return "Nothing is measured yet."
    sources = (
        f"[{name}.json](benchmarks/h200/{name}.json) of commit {found[name]['meta']['commit']}" for name in found
    )
    return "\n".join(
        [
            f"![Time of a product by its number of tokens](benchmarks/h200/{PICTURE})",
            "",
            *(line for k, n in KN for line in times(found, k, n)),
            "| k × n | W4A16 and | cross at M = | floors meet at M = |",
            "| --- | --- | --: | --: |",
            *lines,
            "",
            f"Two that are within {ALIKE:.0%} of each other do not cross. Lines are straight between measured points, "
            "and floors, which are dashed, are those of reading the bytes in one launch, or of the FLOPs at the best "
            f"rate seen. From {' and, of another run, '.join(sources)}.",
        ]
    )


def draw(found: Mapping[str, Any], path: Path) -> None:
    """The picture: time against M with both axes logarithmic, a part for each weight."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(12, 5), layout="constrained")
    ms = sorted({round(MOST ** (i / 100)) for i in range(101)})
    weights = {(k, n): of for k, n in KN if (of := curves(found, k, n))}
    for axes, ((k, n), of) in zip(figure.subplots(1, len(weights), squeeze=False)[0], weights.items(), strict=True):
        for name, curve in of.items():
            each = FORMATS[name]
            points = sorted(curve)
            axes.plot(points, [curve[m] for m in points], "o-", markersize=4, color=each.color, label=each.title)
            axes.plot(ms, [each.floor(m, n, k) for m in ms], "--", linewidth=1, color=each.color)
        for name in OTHERS:
            for m in crossovers(of.get("W4A16", {}), of.get(name, {})):
                us = us_at(of["W4A16"], m)
                axes.plot([m], [us], "kx", markersize=9)
                axes.annotate(f"{name}, M = {m:.0f}", (m, us), (8, -12), textcoords="offset points")
        axes.set(xscale="log", yscale="log", xlabel="M, tokens", ylabel="µs", title=f"k × n = {k} × {n}")
        axes.xaxis.set_major_locator(LogLocator(4))
        axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5)))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:.0f}")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left")
    figure.suptitle("Time of a product (dashed: its floor)")
    figure.savefig(path, dpi=100, metadata={"Software": None})


def with_table(readme: str, results: Path) -> str:
    return bench.between(MARKS, readme, table(load(results)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tools/figure.py", description="Draw where weights of 4, 8 and 16 bits cross."
    )
    ours = bench.ROOT / "benchmarks" / "h200"
    parser.add_argument("results", nargs="?", type=Path, metavar="DIR", default=ours, help=f"(default: {ours})")
    results = parser.parse_args(argv).results
    found = load(results)
    if not any("W4A16" in curves(found, k, n) for k, n in KN):
        shapes = " or ".join(f"{k} × {n}" for k, n in KN)
        parser.error(
            f"{results} has no {W4A16.family}.json with a weight of k × n = {shapes}; tools/bench.py writes it"
        )
    draw(found, results / PICTURE)
    if results == ours:
        readme = bench.ROOT / "README.md"
        bench.write(readme, with_table(readme.read_text(), results))
    else:
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
