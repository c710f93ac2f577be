"""Turns the declarations of cutegemm/variants.py into the source of kernel files.

    python tools/emit.py                 write every kernel's source to build/generated/
    python tools/emit.py NAME            print one
    python tools/emit.py --list          print the names
    python tools/emit.py --check         fail if the emitted source differs from tests/golden/
    python tools/emit.py --update-golden rewrite tests/golden/

CUTLASS's own Python packages do what they are good at: `cutlass_library` emits the collectives of a GEMM, and
`cutlass_cppgen` traces an epilogue function into a graph. The graph's text is ours, since its nodes are
(csrc/epilogue.cuh), and so is the launcher that a file ends with.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from pathlib import Path

from cutegemm.epilogues import EPILOGUES, OPERANDS
from cutegemm.variants import FAMILIES, KERNELS, STEPS, AnyShape, Blockwise, Decode, Kernel, MixedInput, Sm80, Tile

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"

CPP_TYPES = {
    "bf16": "cutlass::bfloat16_t",
    "fp16": "cutlass::half_t",
    "fp32": "float",
    "e4m3": "cutlass::float_e4m3_t",
    "e5m2": "cutlass::float_e5m2_t",
    "int8": "int8_t",
    "int32": "int32_t",
}
# CUTLASS has wgmma of every width that is a multiple of 8, but unless it is told to use the others it builds them from
# these: 144 of nine times 16, each of which reads the whole of the other operand again.
WGMMA_WIDTHS = (8, 16, 32, 64, 96, 128, 192, 256)
BITS = {"bf16": 16, "fp16": 16, "fp32": 32, "e4m3": 8, "e5m2": 8, "int8": 8, "int32": 32}
LIBRARY_TYPES = {"fp16": "f16", "fp32": "f32", "int8": "s8", "int32": "s32"}  # where cutlass_library has other names


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Importing cutlass_cppgen writes a compiled_cache.db into the working directory."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def type_of(operand: str) -> str:
    """In C++: an integer where its value when absent is one."""
    return {float: "float", int: "int32_t"}[type(OPERANDS[operand].absent)]


def absent(operand: str) -> str:
    """Its value when absent, as a C++ literal of its type."""
    value = OPERANDS[operand].absent
    return f"{value}f" if isinstance(value, float) else str(value)


class Epilogue:
    """An epilogue function, traced once: as an EVT type, as its arguments, and as a plain expression."""

    def __init__(self, name: str, accumulator: str) -> None:
        with _elsewhere():
            from cutlass_cppgen.backend.evt.ir.tensor import Tensor
            from cutlass_cppgen.epilogue import trace
        from cutlass_library import DataType, LayoutType

        def example(*shape: int) -> Tensor:
            return Tensor(element=DataType.f32, shape=shape, layout_tag=LayoutType.RowMajor)

        # The tracer tells a row from a column by the shape alone, so the sides must differ.
        m, n = 128, 96
        function = EPILOGUES[name]
        self.accumulator = CPP_TYPES[accumulator]
        self.operands = function.__code__.co_varnames[1 : function.__code__.co_argcount]
        examples = {"accum": example(m, n), "D": example(m, n)}
        for operand in self.operands:
            examples[operand] = {"m": example(m, 1), "n": example(n), "mn": example(m, n)}[OPERANDS[operand].along]
        self.graph = trace(function, examples, cc=90).dag_ir
        (self.root,) = self.graph.get_all_inputs("D")

    def _inputs(self, node: str) -> list[str]:
        return list(self.graph.get_all_inputs(node))

    def _type(self, node: str) -> str:
        """What C++, and torch, makes of a node's inputs."""
        if node == "accum":
            return self.accumulator
        if node in OPERANDS:
            return type_of(node)
        return "float" if "float" in map(self._type, self._inputs(node)) else "int32_t"

    def evt(self, swap: bool, d: str, node: str | None = None) -> str:
        """The type. The root's result has d's type, everything inside its own."""
        from cutlass_cppgen.backend.library import op_tag

        if node is None:
            return self.evt(swap, d, self.root).replace("float,", f"{d},", 1)
        if node == "accum":
            return "cutlass::epilogue::fusion::Sm90AccFetch"
        if node in OPERANDS:
            along = "N" if (OPERANDS[node].along == "n") != swap else "M"
            element = "" if type_of(node) == "float" else f", {type_of(node)}"
            return f"cutegemm::VectorBroadcast<cutegemm::Along::{along}, TileShape{element}>"
        tag = op_tag(self.graph.get_node_meta(node).fn)
        children = "".join(f",\n{self.evt(swap, d, child)}" for child in self._inputs(node)).replace("\n", "\n  ")
        of = self._type(node)
        compute = f"{tag}, {of}, {of}, cutlass::FloatRoundStyle::round_to_nearest"
        return f"cutlass::epilogue::fusion::Sm90EVT<\n  cutlass::epilogue::fusion::Sm90Compute<{compute}>{children}>"

    def arguments(self, node: str | None = None) -> str:
        """The nested initializer of the EVT's arguments: a node's inputs, then its own (none)."""
        node = node or self.root
        if node == "accum":
            return "{}"
        if node in OPERANDS:
            return f"{{call.{node}, {absent(node)}}}"
        return "{" + ", ".join([self.arguments(child) for child in self._inputs(node)] + ["{}"]) + "}"

    def expression(self, node: str | None = None) -> str:
        """The same in C++, for one element."""
        from cutlass_cppgen.backend.library import FunctionalOp as Op

        symbols = {Op.Plus: "+", Op.Minus: "-", Op.Multiplies: "*", Op.Divides: "/"}
        node = node or self.root
        if node == "accum":
            return "accum"
        if node in OPERANDS:
            return f"{_SIDES[OPERANDS[node].along].lower()}.{node}"
        left, right = self._inputs(node)
        return f"({self.expression(left)} {symbols[self.graph.get_node_meta(node).fn]} {self.expression(right)})"


_SIDES = {"m": "Row", "n": "Column", "mn": "Element"}


@cache
def epilogue(name: str, accumulator: str) -> Epilogue:
    return Epilogue(name, accumulator)


def formula(name: str, accumulator: str) -> str:
    """The epilogue for kernels that are not CUTLASS's: operands of a row, a column and an element, and the formula."""
    traced, sides = epilogue(name, accumulator), []
    for along, side in _SIDES.items():
        names = [operand for operand in traced.operands if OPERANDS[operand].along == along]
        members = "".join(f"    {each} {', '.join(of_type)};\n" for each, of_type in groupby(names, type_of))
        at = ", ".join(along)
        loads = ", ".join(f"cutegemm::load(call.{each}, {at}, {absent(each)})" for each in names)
        place = ", ".join(f"int {each}" if names else "int" for each in along)
        call = "const cutegemm_call& call" if names else "const cutegemm_call&"
        sides.append(f"""\
  struct {side} {{
{members}  }};
  static __device__ __forceinline__ {side} {side.lower()}({call}, {place}) {{
    return {{{loads}}};
  }}
""")
    present = " || ".join(f"call.{operand}.data" for operand in traced.operands)
    arguments = ", ".join(
        f"const {side}&" + (f" {side.lower()}" if f"{side.lower()}." in traced.expression() else "")
        for side in _SIDES.values()
    )
    return f"""\
// epilogues/{name}.py
struct Formula {{
{"".join(sides)}\
  static __device__ __forceinline__ bool has_operands(const cutegemm_call& call) {{
    return {present};
  }}
  static __device__ __forceinline__ float apply({traced.accumulator} accum, {arguments}) {{
    return {traced.expression()};
  }}
}};
"""


def collectives(kernel: Kernel, d: str, functor: str) -> str:
    """What cutlass_library emits for the kernel, under the kernel's own name."""
    from cutlass_library import gemm_operation as go
    from cutlass_library import library as lib

    gemm, tile = kernel.gemm, kernel.tile
    assert isinstance(tile, Tile)
    types = {name: getattr(lib.DataType, LIBRARY_TYPES.get(name, name)) for name in CPP_TYPES}
    row, column = lib.LayoutType.RowMajor, lib.LayoutType.ColumnMajor

    a = (gemm.a, row if gemm.layout[0] == "t" else column)
    b = (gemm.b, column if gemm.layout[1] == "n" else row)
    d_layout = row
    if tile.swap:
        transposed = {row: column, column: row}
        a, b = (b[0], transposed[b[1]]), (a[0], transposed[a[1]])
        d_layout = column

    def tensor(dtype: str, layout: lib.LayoutType) -> lib.TensorDescription:
        return lib.TensorDescription(types[dtype], layout, 128 // BITS[dtype])

    instruction = lib.MathInstruction(
        [64, tile.n, 256 // BITS[gemm.a]],
        types[a[0]],
        types[b[0]],
        types[gemm.accumulator],
        lib.OpcodeClass.TensorOp,
        lib.MathOperation.multiply_add,
    )
    description = lib.TileDescription([tile.m, tile.n, tile.k], 0, [4, 1, 1], instruction, 90, 90, [*tile.cluster, 1])
    kind = "" if tile.schedule == "warpspecialized" else tile.schedule.capitalize()
    schedule = "TmaWarpSpecialized" + kind + ("FP8FastAccum" if gemm.fast_accum else "")
    epilogue_schedule = "TmaWarpSpecialized" + ("Cooperative" if tile.schedule == "cooperative" else "")

    class Operation(go.GemmOperation):
        # CUTLASS's own name leaves the epilogue out and is 140 characters long.
        def procedural_name(self) -> str:
            return kernel.name

    operation = Operation(
        lib.GemmKind.Universal3x,
        90,
        description,
        tensor(*a),
        tensor(*b),
        lib.TensorDescription(lib.DataType.void, d_layout, 128 // BITS[d]),
        lib.DataType.f32,
        lib.EpilogueFunctor.LinearCombination,
        lib.SwizzlingFunctor.Identity1,
        tensor(d, d_layout),
        getattr(lib.KernelScheduleType, schedule),
        getattr(lib.EpilogueScheduleType, epilogue_schedule),
        lib.TileSchedulerType.Persistent,
    )

    class Functor:
        def emit_declaration(self) -> str:
            return functor

    emitter = go.EmitGemmUniversal3xInstance()
    # emit() reads the functor from the emitter, not from the operation, when the operation's is not one of its enum.
    operation.epilogue_functor = Functor()
    emitter.epilogue_functor = operation.epilogue_functor
    text = emitter.emit(operation)
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def _shapes(width: int) -> str:
    """Makes CuTe declare MMAs of every width, which it does on demand only: it would take narrower ones."""
    return "" if width in WGMMA_WIDTHS else "#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED\n"


def universal(kernel: Kernel) -> str:
    gemm, tile = kernel.gemm, kernel.tile
    assert isinstance(tile, Tile)
    d = gemm.d or gemm.accumulator
    traced = epilogue(gemm.epilogue, gemm.accumulator)
    shape = f"using TileShape = cute::Shape<cute::_{tile.m}, cute::_{tile.n}, cute::_{tile.k}>;\n"
    if tile.split:
        # The parts of k meet in the second launch, so only that one has the epilogue.
        fusion, of = "cutlass::epilogue::fusion", traced.accumulator
        functor = (
            f"{fusion}::Sm90EVT<{fusion}::Sm90Compute<cutlass::epilogue::thread::Identity, {of}, {of}, "
            f"cutlass::FloatRoundStyle::round_to_nearest>, {fusion}::Sm90AccFetch>"
        )
        extra = formula(gemm.epilogue, gemm.accumulator)
        members, launcher = "  using Formula = ::Formula;\n", "UniversalSplit"
    else:
        functor = traced.evt(tile.swap, CPP_TYPES[d])
        extra = f"// epilogues/{gemm.epilogue}.py\nusing Epilogue = {functor};\n"
        functor = "Epilogue"
        members = f"""\
  static Epilogue::Arguments epilogue(const cutegemm_call& call) {{
    return {traced.arguments()};
  }}
"""
        launcher = "Universal"
    return f"""\
{_shapes(tile.n)}#include "gemm_universal.cuh"

{shape}{extra}
{collectives(kernel, d, functor)}
struct Variant {{
  using Kernel = {kernel.name};
  static constexpr bool kSwap = {_true(tile.swap)};
{members}}};

CUTEGEMM_KERNEL_FILE("{kernel.name}", cutegemm::{launcher}<Variant>)
"""


def decode(kernel: Kernel) -> str:
    assert isinstance(kernel.tile, Decode)
    gemm, tile = kernel.gemm, kernel.tile
    types = ", ".join(CPP_TYPES[dtype] for dtype in (gemm.a, gemm.b))
    numbers = f"{tile.tokens}, {tile.rows}, {_true(gemm.scales)}"
    return f"""\
#include "decode.cuh"

{formula(gemm.epilogue, gemm.accumulator)}
CUTEGEMM_KERNEL_FILE("{kernel.name}", cutegemm::Decode<{types}, {numbers}, Formula>)
"""


def blockwise(kernel: Kernel) -> str:
    gemm, tile = kernel.gemm, kernel.tile
    assert isinstance(tile, Blockwise)
    absents = [OPERANDS[operand].absent for operand in epilogue(gemm.epilogue, gemm.accumulator).operands]
    if EPILOGUES[gemm.epilogue](3.5, *absents) != 3.5:  # the kernel leaves it out where there are none
        raise ValueError(f"emit: {kernel.name}: without operands the epilogue {gemm.epilogue} must give the sum itself")
    numbers = {"M": tile.m, "RowsB": tile.n, "ClusterM": tile.cluster[0], "ClusterN": tile.cluster[1]}
    forms = {"Columns": tile.columns, "Gated": tile.gated, "Splits": tile.splits, "Quantizes": tile.quantizes}
    return f"""\
{_shapes(tile.n)}#include "gemm_blockwise.cuh"

{formula(gemm.epilogue, gemm.accumulator)}
struct {kernel.name} {{
  using Formula = ::Formula;
  static constexpr int {", ".join(f"k{name} = {number}" for name, number in numbers.items())};
  static constexpr bool {", ".join(f"k{name} = {_true(form)}" for name, form in forms.items())};
}};

CUTEGEMM_KERNEL_FILE("{kernel.name}", cutegemm::Blockwise<{kernel.name}>)
"""


CUDA_TYPES = {"bf16": "__nv_bfloat16", "fp16": "__half", "fp8": "__nv_fp8_storage_t", "int8": "int8_t"}


def _of_weight(kernel: Kernel, tile: MixedInput | Sm80, header: str, element: str, forms: str = "") -> str:
    """Of a kernel whose a has 16 bits and whose weight has fewer."""
    gemm = kernel.gemm
    return f"""\
#include "{header}"

{formula(gemm.epilogue, gemm.accumulator)}
struct {kernel.name} {{
  using Element = {element};
  using Weight = cutegemm::{gemm.b.capitalize()};
  using Formula = ::Formula;
  static constexpr int kRows = {tile.rows}, kTokens = {tile.tokens}, kStep = {STEPS.get(gemm.scales, 128)};
  static constexpr bool kMinimum = {_true(gemm.minimum)}{forms};
}};

CUTEGEMM_KERNEL_FILE("{kernel.name}", cutegemm::{type(tile).__name__}<{kernel.name}>)
"""


def mixed_input(kernel: Kernel) -> str:
    tile = kernel.tile
    assert isinstance(tile, MixedInput)
    forms = f", kGated = {_true(tile.gated)}, kRounded = {_true(tile.rounded)}"
    return _shapes(tile.tokens) + _of_weight(kernel, tile, "gemm_mixed.cuh", CPP_TYPES[kernel.gemm.a], forms)


def sm80(kernel: Kernel) -> str:
    tile = kernel.tile
    assert isinstance(tile, Sm80)
    return _of_weight(kernel, tile, "gemm_sm80.cuh", CUDA_TYPES[kernel.gemm.a], f", kRounded = {_true(tile.rounded)}")


def _true(condition: object) -> str:
    return "true" if condition else "false"


def any_shape(kernel: Kernel) -> str:
    gemm = kernel.gemm
    return f"""\
#include "gemm_any.cuh"

{formula(gemm.epilogue, gemm.accumulator)}
CUTEGEMM_KERNEL_FILE("{kernel.name}", cutegemm::any::AnyShape<{CUDA_TYPES[gemm.a]}, {_true(gemm.scales)}, Formula>)
"""


def source(name: str) -> str:
    """The source of the kernel file called `name`: deterministic, and complete but for csrc/ and CUTLASS."""
    kernel = KERNELS.get(name)
    if kernel is None:
        raise ValueError(f"emit: {name!r} is not a declared kernel; `python tools/emit.py --list` prints them")
    emitters = {
        Tile: universal,
        Decode: decode,
        Blockwise: blockwise,
        MixedInput: mixed_input,
        Sm80: sm80,
        AnyShape: any_shape,
    }
    return f"// Emitted by tools/emit.py from cutegemm/variants.py.\n{emitters[type(kernel.tile)](kernel)}"


def names() -> list[str]:
    return list(KERNELS)


def check() -> list[str]:
    """What differs from tests/golden/, as sentences."""
    wrong = []
    expected = {f"{name}.cu" for name in FAMILIES.values()}
    for name in FAMILIES.values():
        path = GOLDEN / f"{name}.cu"
        if not path.exists():
            wrong.append(f"{path.name} is missing from tests/golden")
        elif path.read_text() != source(name):
            wrong.append(f"{path.name} is not what is emitted now")
    wrong += [f"{path.name} is no longer emitted" for path in GOLDEN.glob("*.cu") if path.name not in expected]
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Emit the source of the declared kernels.")
    parser.add_argument("name", nargs="?", help="print the source of this kernel")
    parser.add_argument("--list", action="store_true", help="print the names of all kernels")
    parser.add_argument("--check", action="store_true", help="compare with tests/golden")
    parser.add_argument("--update-golden", action="store_true", help="rewrite tests/golden")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "generated", help="where to write all of them")
    args = parser.parse_args(argv)
    if args.name:
        print(source(args.name), end="")
    elif args.list:
        print("\n".join(names()))
    elif args.check:
        wrong = check()
        print("\n".join(wrong) or f"{len(FAMILIES)} emitted kernels are as in tests/golden")
        if wrong:
            print("If the change is meant, run `python tools/emit.py --update-golden` and review the difference.")
        return bool(wrong)
    else:
        target = GOLDEN if args.update_golden else args.out
        target.mkdir(parents=True, exist_ok=True)
        wanted = list(FAMILIES.values()) if args.update_golden else names()
        for path in target.glob("*.cu"):
            if path.stem not in wanted:
                path.unlink()
        for name in wanted:
            path, text = target / f"{name}.cu", source(name)
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        print(f"{len(wanted)} kernels in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
