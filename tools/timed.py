"""What the benchmarks of ops that memory bounds share: rows.py and heads.py have the ops."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from cutegemm import roofline

Row = dict[str, Any]
Calls = list[Callable[[], object]]
Times = Callable[[dict[str, Calls], int], dict[str, float]]

TOKENS = (1, 16, 64, 512, 8192)
PEERS = ("compile", "vllm")
# Of dequantized values: e4m3 has a step of 2**-3, whose rounding is some 2.6e-2 in norm.
MAX_ERROR = 4e-2


class TimedOp(Protocol):
    """One op in one mode."""

    @property
    def op(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def width(self) -> int:
        """How many values of a token it is about."""

    @property
    def bars(self) -> Mapping[int, float]:
        """µs a call, at most, by number of tokens."""

    def nbytes(self, tokens: int) -> int:
        """What is read and written, at least."""

    def calls(self, tokens: int, peers: Collection[str], device: str = "cuda") -> tuple[dict[str, Calls], float]:
        """For each candidate ("" is ours) one call for each input set, and our error."""


def title(row: Mapping[str, Any]) -> str:
    return f"{row['op']} {row['mode']}".strip()


def line(row: Row) -> str:
    peers = " ".join(f"{name} {us:.2f}" for name, us in row["peers"].items())
    return (
        f"{title(row):<45} {row['shape']['tokens']:>5} x {row['shape']['width']:<6} {row['us']:9.2f} us "
        f"{row['floor_us'] / row['us']:4.0%} of floor  {peers}"
    )


def run(
    ops: Sequence[TimedOp],
    times: Times,
    tokens: Sequence[int] = TOKENS,
    without: Collection[str] = (),
    rounds: int = 20,
    check_only: bool = False,
) -> tuple[list[Row], list[str]]:
    """The rows of results, and a sentence for each that was refused. All are timed twice: `again` is later."""
    rows: dict[tuple[int, int], Row] = {}
    refused: list[str] = []
    for turn in range(1 if check_only else 2):
        for (which, timed), t in itertools.product(enumerate(ops), tokens):
            row: Row = {"op": timed.op, "mode": timed.mode, "shape": {"tokens": t, "width": timed.width}}
            try:
                candidates, fault = timed.calls(t, [name for name in PEERS if name not in without])
                if not fault <= MAX_ERROR:
                    raise RuntimeError(f"relative error is {fault:.3g}; it must be at most {MAX_ERROR:g}")
                measured = {} if check_only else times(candidates, rounds)
            except Exception as caught:
                refused.append(f"{title(row)}, {timed.width}, tokens={t}: {next(iter(str(caught).splitlines()), '')}")
                print(f"  REFUSED {refused[-1]}", flush=True)
                continue
            if check_only:
                print(f"{title(row)}, {timed.width}, tokens={t}: err {fault:.1e}", flush=True)
                continue
            found: Row = {"us": round(measured.pop(""), 2)}
            found["peers"] = {name: round(value, 2) for name, value in measured.items()}
            if turn == 0:
                nbytes = timed.nbytes(t)
                row |= {"floor_us": round(roofline.floor_us(nbytes), 2), "bytes": nbytes, "err": float(f"{fault:.2e}")}
                rows[which, t] = row | found
            elif (which, t) not in rows:
                continue
            else:
                rows[which, t]["again"] = found
            print(line(rows[which, t] | found), flush=True)
            torch.cuda.empty_cache()
    return list(rows.values()), refused


def both_passes(rows: Sequence[Row]) -> list[Row]:
    return [*rows, *(row | row["again"] for row in rows if "again" in row)]


def judge(family: str, ops: Sequence[TimedOp], rows: Sequence[Row]) -> list[str]:
    """A line for each bar: the times, and no peer faster anywhere, in both passes."""
    lines = []
    rows = both_passes(rows)
    most = {(o.op, o.mode, o.width, tokens): us for o in ops for tokens, us in o.bars.items()}
    for row in rows:
        tokens = row["shape"]["tokens"]
        bar = most.get((row["op"], row["mode"], row["shape"]["width"], tokens))
        if bar is not None:
            word = "pass" if row["us"] <= bar else "MISS"
            lines.append(f"{word}  {family}: {title(row)}: {row['us']:.2f} us at {tokens} tokens, <= {bar:g}")
    slower = [row for row in rows if row["peers"] and row["us"] > min(row["peers"].values())]
    for row in slower:
        best = min(row["peers"], key=row["peers"].__getitem__)
        lines.append(f"MISS  {family}: slower than {best}, {row['peers'][best]:.2f} us: {line(row)}")
    if not slower and any(row["peers"] for row in rows):
        lines.append(f"pass  {family}: no peer is faster at any number of tokens")
    return lines


def markdown(heading: str, meta: Mapping[str, Any], rows: Sequence[Row], note: str = "") -> str:
    """README.md's table: times by op and number of tokens T, with the ratio of the best peer's to ours."""
    tokens = sorted({row["shape"]["tokens"] for row in rows})
    ops = dict.fromkeys((row["op"], row["mode"], row["shape"]["width"]) for row in rows)
    at = {(row["op"], row["mode"], row["shape"]["width"], row["shape"]["tokens"]): row for row in rows}

    def cell(row: Row | None) -> str:
        if row is None:
            return "-"
        best = min(row["peers"].values(), default=math.nan)
        return f"{row['us']:.1f}" + (f" ({best / row['us']:.2f})" if row["peers"] else "")

    lines = [["op", *(f"T = {t}" for t in tokens)], ["---", *("--:" for _ in tokens)]]
    for op, mode, width in ops:
        name, *more = op.split(", ")
        what = " ".join([*more, mode]).strip()
        lines.append(
            [f"`{name}`" + (f", {what}" if what else "") + f", {width}"]
            + [cell(at.get((op, mode, width, t))) for t in tokens]
        )
    versions = "".join(f", {name} {version}" for name, version in meta["peers"].items())
    where = f"{meta['gpu']}, driver {meta['driver']}, torch {meta['torch']}{versions}"
    return "\n".join(
        [
            f"**{heading}.** µs a call; in parentheses the better of vLLM's time and torch.compile's over ours.",
            "",
            *(f"| {' | '.join(cells)} |" for cells in lines),
            "",
            *([note, ""] if note else []),
            f"Measured on one {where}; {meta['date']}, commit {meta['commit']}.",
        ]
    )
