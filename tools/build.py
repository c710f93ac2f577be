"""Builds op libraries and kernels ahead of their first use; `python -m cutegemm build` is the same.

    python tools/build.py                              everything, into the cache
    python tools/build.py --ops                        the op libraries only
    python tools/build.py --kernels 'mm_bf16_*'        some kernels only (with --ops, the op libraries too)
    python tools/build.py --out cutegemm/lib           and copy it there, for a wheel or for another machine
    python tools/build.py --list                       print the names and build nothing

What is in the cache already is not built again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cutegemm import library, variants


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cutegemm build",
        description="Build op libraries and kernels ahead of their first use.",
    )
    parser.add_argument("--ops", action="store_true", help="build the op libraries")
    parser.add_argument("--kernels", metavar="PATTERN", nargs="+", help="build the kernels that match: 'mm_bf16_*'")
    parser.add_argument("--ci", action="store_true", help="build the op libraries and one kernel of each family")
    parser.add_argument("--jobs", type=int, metavar="N", help="compilers at once, 2 GB each (default: one a core)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="copy the files there, as <name>.so")
    parser.add_argument("--list", action="store_true", help="print the names only")
    args = parser.parse_args(argv)

    kernels = args.kernels
    if args.ci:
        args.ops, kernels = True, [*(kernels or ()), *variants.FAMILIES.values()]
    everything = not args.ops and not kernels
    try:
        names = library.select(None if args.ops or everything else (), None if everything else kernels or ())
        if args.list:
            print("\n".join(names))
            return 0
        if args.out:
            files = library.export(names, args.out, args.jobs)
        else:
            files = list(library.build(names, args.jobs).values())
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for file in files:
        print(f"{file.stat().st_size:>9,} B  {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
