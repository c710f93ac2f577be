"""Measures which kernel is best for which problem, into the table that cutegemm/plan.py reads.

    python tools/tune.py                                    every family and shape: cutegemm/tuned/<gpu>.json
    python tools/tune.py gemm_bf16 --nk 6144x4096 --m 1,16  some problems; their rows replace those of before

Every kernel that may run is checked, then timed beside the others: a few rounds of all of them, more rounds
of the best six, which may be a kernel's best three. A kernel that refuses a problem is left out, and one that is
wrong is reported. A row says which commit it is of; `meta` is of the last run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from cutegemm import plan, testing
from cutegemm.tools import bench
from cutegemm.variants import DECLARED

Row = dict[str, Any]

M = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
KEPT = 6
# Those whose kernels a plan for this GPU takes.
FAMILIES = {name: family for name, family in bench.FAMILIES.items() if family.hopper}


def glance(calls: Sequence[Callable[[], object]]) -> float:
    """Time of a call in us, launched eagerly, the best of five tries: of a small kernel no more than a limit."""
    tries = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls[:2]:
            call()
        end.record()
        end.synchronize()
        tries.append(start.elapsed_time(end) * 1e3 / 2)
    return min(tries)


def survey(shape: bench.Shape, m: int, choices: Iterable[plan.Choice], faults: Counter[str]) -> list[dict[str, Any]]:
    """The best choices as the table has them, the fastest first. faults counts what is wrong or refused."""
    named = {str(choice): choice for choice in choices}
    calls, seen = {}, {}
    for name in named:
        candidate = bench.forced(shape.family, name)
        try:
            bench.refuse_wrong(shape, candidate, m)
            calls[name] = shape.calls(candidate, m)
            seen[name] = glance(calls[name])
        except bench.WrongResult as fault:
            print(f"  WRONG at m={m} n={shape.n} k={shape.k}: {fault}", flush=True)
            faults[f"WRONG {name}"] += 1
        except Exception as fault:
            faults[bench.first_line(fault)] += 1

    # What is far behind would take most of the time. The host needs some 50 us, and at times 100, to launch a kernel by
    # name.
    limit = 1.5 * min(seen.values(), default=0.0) + 150
    calls = {name: calls[name] for name, us in seen.items() if us <= limit}
    first = testing.time_interleaved(calls, rounds=3, replay_ms=0.3)
    finalists: list[str] = []
    for name in sorted(first, key=first.__getitem__):
        if sum(named[name].kernel == named[other].kernel for other in finalists) < KEPT // 2:
            finalists.append(name)
    finalists = finalists[:KEPT]
    final = testing.time_interleaved({name: calls[name] for name in finalists}, rounds=11, replay_ms=1.5)
    best = []
    for name in sorted(final, key=final.__getitem__):
        options = {option: value for option, value in asdict(named[name].options).items() if value}
        best.append({"kernel": named[name].kernel, **options, "us": round(final[name], 2)})
    return best


def declared(rows: Iterable[Row]) -> list[Row]:
    """Rows without the kernels that are no longer declared."""
    kept = [{**row, "best": [best for best in row["best"] if best["kernel"] in DECLARED]} for row in rows]
    return [row for row in kept if row["best"]]


def merge(known: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Known rows, with new ones in place of those of the same problem; in the order of what tells problems apart."""
    rows = {(*plan.tuned_by(row), row["m"]): row for row in (*known, *new)}
    return [rows[key] for key in sorted(rows)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tools/tune.py", description="Measure which kernel is best for which problem."
    )
    add = parser.add_argument
    names = ", ".join(FAMILIES)
    add("families", nargs="*", metavar="FAMILY", help=f"of {names} (default: all)")
    add("--m", type=bench.numbers, default=M, metavar="M,...", help="numbers of tokens")
    add("--nk", type=bench.nk_pairs, metavar="NxK,...", help="shapes of the weight, (n, k) (default: the family's)")
    add("--out", type=Path, metavar="FILE", help="the table (default: cutegemm/tuned/<gpu>.json)")
    add("--commit", metavar="NAME", help="what is measured, where the tree has no git folder")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.families if name not in FAMILIES]:
        parser.error(f"{unknown[0]} is not a family; they are {names}")
    if not torch.cuda.is_available():
        parser.error("there is no GPU: torch.cuda.is_available() is false")

    meta = bench.metadata(args.commit)
    table = bench.ROOT / "cutegemm" / "tuned" / f"{meta['gpu'].replace(' ', '_')}.json"
    out = args.out or table
    # A new file starts from the table that is there.
    source = out if out.exists() else table
    rows = declared(json.loads(source.read_text())["rows"]) if source.exists() else []

    faults: Counter[str] = Counter()
    start = time.monotonic()
    for name in args.families or FAMILIES:
        family = FAMILIES[name]
        for k, n in args.nk or family.kn:
            shape, problem = bench.Shape(family, n, k, args.m), bench.problem(family, n, k)
            found = []
            for m in args.m:
                best = survey(shape, m, plan.candidates(problem, m), faults)
                if best:
                    what = {field: getattr(problem, field) for field in plan.TUNED_BY}
                    found.append({**what, "m": m, "best": best, "commit": meta["commit"]})
                else:
                    faults[f"WRONG no kernel for {name} m={m} n={n} k={k}"] += 1
                print(f"{time.monotonic() - start:5.0f} s  {name} m={m} n={n} k={k}: {best[:1]}", flush=True)
            rows = merge(rows, found)
            bench.write(out, bench.dump(meta, rows))
            del shape
    wrong = [fault for fault in faults if fault.startswith("WRONG")]
    for fault in wrong or [fault for fault, _ in faults.most_common(20)]:
        print(f"{faults[fault]} times: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
