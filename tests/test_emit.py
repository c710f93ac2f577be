"""The emitted sources: the same every time, and in agreement with the epilogue functions and the declarations."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cutegemm import library
from cutegemm.epilogues import EPILOGUES, OPERANDS
from cutegemm.tools import emit
from cutegemm.variants import (
    FAMILIES,
    GEMMS,
    KERNELS,
    AnyShape,
    Blockwise,
    Decode,
    Kernel,
    MixedInput,
    Sm80,
    Tile,
)

WHOLE = [name for name, kernel in KERNELS.items() if isinstance(kernel.tile, Tile) and not kernel.tile.split]


def digest() -> str:
    return hashlib.sha256("".join(emit.source(name) for name in emit.names()).encode()).hexdigest()


# Determinism and the golden files


def test_emission_is_deterministic() -> None:
    first = digest()
    emit.epilogue.cache_clear()
    assert digest() == first


def test_emission_is_the_same_in_every_process_and_leaves_nothing_behind(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_emit; print(test_emit.digest())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(emit.ROOT)}
    run = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == digest(), run.stderr
    assert not list(tmp_path.iterdir())


def test_emission_stays_where_it_is() -> None:
    before, here = set(Path.cwd().iterdir()), Path.cwd()
    emit.epilogue.cache_clear()
    emit.source(FAMILIES["universal"])
    assert Path.cwd() == here
    assert set(here.iterdir()) == before


def test_emission_is_that_of_the_golden_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emit, "GOLDEN", Path(__file__).parent / "golden")  # also where the package is installed
    assert emit.check() == []
    assert {path.stem for path in emit.GOLDEN.glob("*.cu")} == set(FAMILIES.values())


def test_check_finds_what_is_changed_missing_and_left_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emit, "GOLDEN", tmp_path)
    assert emit.main(["--update-golden"]) == 0
    assert emit.main(["--check"]) == 0
    changed, missing = (tmp_path / f"{name}.cu" for name in list(FAMILIES.values())[:2])
    changed.write_text(changed.read_text().replace("float", "double", 1))
    missing.unlink()
    (tmp_path / "of_another_time.cu").write_text("")
    capsys.readouterr()
    assert emit.main(["--check"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{changed.name} is not what is emitted now",
        f"{missing.name} is missing from tests/golden",
        "of_another_time.cu is no longer emitted",
        "If the change is meant, run `python tools/emit.py --update-golden` and review the difference.",
    ]
    assert emit.main(["--update-golden"]) == 0
    assert emit.check() == []


def test_files_that_are_the_same_are_not_written_again(tmp_path: Path) -> None:
    stale = tmp_path / "stale.cu"
    stale.write_text("")
    assert emit.main(["--out", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.iterdir()} == set(KERNELS)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert emit.main(["--out", str(tmp_path)]) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times


def test_command_line_prints_one_kernel_and_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    name = FAMILIES["decode"]
    assert emit.main([name]) == 0
    assert capsys.readouterr().out == emit.source(name)
    assert emit.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == list(KERNELS) == emit.names()


def test_unknown_kernel() -> None:
    sentence = "emit: 'mm_int3' is not a declared kernel; `python tools/emit.py --list` prints them"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        emit.source("mm_int3")


def test_an_epilogue_of_blockwise_kernels_gives_the_sum_where_it_has_no_operands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(emit.EPILOGUES, "residual", lambda accum, bias, residual: accum + bias + residual + 1.0)
    name = FAMILIES["blockwise"]
    sentence = f"emit: {name}: without operands the epilogue residual must give the sum itself"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        emit.source(name)


# What a file holds


HEADERS = {
    Tile: "gemm_universal.cuh",
    Decode: "decode.cuh",
    Blockwise: "gemm_blockwise.cuh",
    MixedInput: "gemm_mixed.cuh",
    Sm80: "gemm_sm80.cuh",
    AnyShape: "gemm_any.cuh",
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_file_is_whole(name: str) -> None:
    text, tile = emit.source(name), KERNELS[name].tile
    assert text.endswith("\n") and "\t" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert text.count("{") == text.count("}") and text.count("<") == text.count(">")
    (header,) = re.findall(r'#include "(.*)"', text)
    assert (library.csrc() / header).exists()
    assert header == HEADERS[type(tile)]
    if isinstance(tile, (Tile, Blockwise)):  # or else CuTe builds an MMA of 144 columns from nine of 16
        assert ("CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED" in text) == (tile.n not in emit.WGMMA_WIDTHS)
    assert re.findall(r'CUTEGEMM_KERNEL_FILE\("(.*?)"', text) == [name]
    assert f"// epilogues/{KERNELS[name].gemm.epilogue}.py\n" in text


CPP = {"bf16": "bfloat16_t", "fp16": "half_t", "e4m3": "float_e4m3_t", "e5m2": "float_e5m2_t", "int8": "int8_t"}


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if isinstance(kernel.tile, Tile)])
def test_collectives_are_those_of_the_declaration(name: str) -> None:
    text, gemm, tile = emit.source(name), KERNELS[name].gemm, KERNELS[name].tile
    assert isinstance(tile, Tile)
    mainloop = text[text.index("CollectiveMainloop") :] if "CollectiveMainloop" in text else text
    operands = re.findall(
        r"\b(bfloat16_t|half_t|float_e4m3_t|float_e5m2_t|int8_t), (cutlass::layout::\w+), (\d+)", mainloop
    )
    row, column = "cutlass::layout::RowMajor", "cutlass::layout::ColumnMajor"
    a = (CPP[gemm.a], row if gemm.layout[0] == "t" else column)
    b = (CPP[gemm.b], column if gemm.layout[1] == "n" else row)
    if tile.swap:  # d^T = b^T @ a^T, and a transposed row-major matrix is a column-major one
        other = {row: column, column: row}
        a, b = (b[0], other[b[1]]), (a[0], other[a[1]])
    found = [operand[:2] for operand in operands[-2:]]
    assert found == [a, b]
    assert {int(operand[2]) for operand in operands[-2:]} == {128 // emit.BITS[gemm.a]}
    accumulator = "int32_t" if gemm.a == "int8" else "float"
    assert re.search(rf"\d+,\n    {accumulator},\n", mainloop)
    shape = f"cute::Shape<cute::_{tile.m}, cute::_{tile.n}, cute::_{tile.k}>"
    cluster = f"cute::Shape<cute::_{tile.cluster[0]},cute::_{tile.cluster[1]},cute::_1>"
    assert text.count(shape.replace(" ", "")) + text.count(shape) >= 2
    assert cluster in text.replace(", ", ",")
    kind = {"warpspecialized": "", "pingpong": "Pingpong", "cooperative": "Cooperative"}[tile.schedule]
    schedule = f"KernelTmaWarpSpecialized{kind}" + "FP8FastAccum" * gemm.fast_accum
    assert re.search(rf"{schedule}\b", text)
    assert f"kSwap = {str(tile.swap).lower()};" in text
    assert f"cutegemm::Universal{'Split' if tile.split else ''}<Variant>" in text


# Epilogues: one function, three texts


def operands_of(epilogue: str) -> tuple[str, ...]:
    function = EPILOGUES[epilogue]
    return function.__code__.co_varnames[1 : function.__code__.co_argcount]


ACCUMULATORS = {gemm.epilogue: gemm.accumulator for gemm in GEMMS}


def literal(operand: str) -> str:
    value = OPERANDS[operand].absent
    return f"{value}f" if isinstance(value, float) else str(value)


def values_of(epilogue: str) -> dict[str, float]:
    return {name: 1.5 + 0.25 * i for i, name in enumerate(operands_of(epilogue))}


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_formula_is_the_function(epilogue: str) -> None:
    values, text = values_of(epilogue), emit.formula(epilogue, ACCUMULATORS[epilogue])
    (expression,) = re.findall(r"return (\(.*\));", text)
    sides = {side: SimpleNamespace() for side in ("row", "column", "element")}
    for name, value in values.items():
        along = OPERANDS[name].along
        side = {"m": "row", "n": "column", "mn": "element"}[along]
        setattr(sides[side], name, value)
        place = ", ".join(f"int {each}" for each in along)
        (body,) = re.findall(rf" {side}\(const cutegemm_call& call, {place}\) \{{(.*?)\}}\n", text, re.DOTALL)
        assert f"cutegemm::load(call.{name}, {', '.join(along)}, {literal(name)})" in body
    found = eval(expression, {"accum": 3.0, **sides})
    assert found == EPILOGUES[epilogue](3.0, **values)


def test_formulas() -> None:
    assert "return (accum + column.bias);" in emit.formula("linear", "fp32")
    assert "return ((row.scale_a * (column.scale_b * accum)) + column.bias);" in emit.formula("scaled", "fp32")
    text = emit.formula("asymmetric", "int32")
    difference = "(accum - (row.zero_point_a * column.sum_b))"
    assert f"return ((row.scale_a * (column.scale_b * {difference})) + column.bias);" in text
    assert "float apply(int32_t accum, " in text
    assert (
        "    float scale_a;\n    int32_t zero_point_a;\n" in text
        and "    float scale_b, bias;\n    int32_t sum_b;\n" in text
    )


def parse(text: str) -> Any:
    """Nested name<...> or {...} as lists: [name, child, ...]."""
    tokens = re.findall(r"[\w:.]+|[<>{},]", text)

    def node() -> Any:
        name = tokens.pop(0) if tokens[0] not in "{" else ""
        if not tokens or tokens[0] not in "<{":
            return name
        found, closing = [name], {"<": ">", "{": "}"}[tokens.pop(0)]
        while tokens[0] != closing:
            found.append(node())
            if tokens[0] == ",":
                tokens.pop(0)
        tokens.pop(0)
        return found

    return node()


def evaluate(tree: Any, arguments: Any, values: dict[str, float], along: dict[str, str]) -> float:
    """What an EVT computes, given the initializer of its arguments: each node's children, then its own."""
    kind = (tree if isinstance(tree, str) else tree[0]).rpartition("::")[2]
    if kind == "Sm90AccFetch":
        assert arguments == [""]
        return values["accum"]
    if kind == "VectorBroadcast":
        name = arguments[1].removeprefix("call.")
        along[name] = tree[1].rpartition("::")[2]
        assert arguments[2] == literal(name)
        assert tree[3:] == ([] if literal(name).endswith("f") else ["int32_t"])
        return values[name]
    assert kind == "Sm90EVT"
    (_, compute, *children), (_, *inputs, own) = tree, arguments
    assert own == [""] and len(inputs) == len(children) == 2
    left, right = (evaluate(*each, values, along) for each in zip(children, inputs, strict=True))
    results = {"plus": left + right, "minus": left - right, "multiplies": left * right}
    return results[compute[1].rpartition("::")[2]]


@pytest.mark.parametrize("name", WHOLE)
def test_evt_is_the_function_with_its_sides_swapped_where_the_operands_are(name: str) -> None:
    kernel, text = KERNELS[name], emit.source(name)
    assert isinstance(kernel.tile, Tile)
    (tree,) = re.findall(r"using Epilogue = (.*?);", text, re.DOTALL)
    (arguments,) = re.findall(r"epilogue\(const cutegemm_call& call\) \{\n    return (.*);", text)
    values, along = {"accum": 3.0} | values_of(kernel.gemm.epilogue), {}  # type: ignore[var-annotated]
    found = evaluate(parse(tree), parse(arguments), values, along)
    assert found == EPILOGUES[kernel.gemm.epilogue](**values)
    sides = {"m": "N", "n": "M"} if kernel.tile.swap else {"m": "M", "n": "N"}
    assert along == {operand: sides[OPERANDS[operand].along] for operand in operands_of(kernel.gemm.epilogue)}
    # The result is rounded to d, what is inside stays float32, and int32 where all is that goes in.
    (_, *result), *inside = re.findall(r"Sm90Compute<cutlass::(\w+), ([\w:]+), ([\w:]+),", tree)
    assert result == [emit.CPP_TYPES[kernel.gemm.d], "float"]
    integers = ["minus", "multiplies"] if kernel.gemm.accumulator == "int32" else []
    assert [name for name, *types in inside if types == ["int32_t", "int32_t"]] == integers
    assert all(types == ["float", "float"] for _, *types in inside[: len(inside) - len(integers)])


@pytest.mark.parametrize("name", [name for name in FAMILIES.values() if name.startswith(("w4", "w8"))])
def test_a_kernel_of_a_weight_has_the_members_of_its_declaration(name: str) -> None:
    text, gemm, tile = emit.source(name), KERNELS[name].gemm, KERNELS[name].tile
    assert isinstance(tile, (MixedInput, Sm80))
    step = int(re.sub(r"\D", "", gemm.scales) or 128)
    types = emit.CUDA_TYPES if isinstance(tile, Sm80) else emit.CPP_TYPES
    tag = {"int4": "Int4", "e4m3": "E4m3", "int8": "Int8"}[gemm.b]
    assert (
        f"  using Element = {types[gemm.a]};\n  using Weight = cutegemm::{tag};\n  using Formula = ::Formula;\n" in text
    )
    assert f"  static constexpr int kRows = {tile.rows}, kTokens = {tile.tokens}, kStep = {step};\n" in text
    forms = {"Minimum": "minimum" in gemm.scales}
    if isinstance(tile, MixedInput):
        forms["Gated"] = tile.gated
    forms["Rounded"] = tile.rounded
    assert ", ".join(f"k{form} = {str(of).lower()}" for form, of in forms.items()) + ";" in text
    assert f"cutegemm::{type(tile).__name__}<{name}>" in text


def test_swap_exchanges_the_operands_alone() -> None:
    def lines(kernel: Kernel) -> set[str]:
        return {line.replace(kernel.name, "NAME") for line in emit.universal(kernel).splitlines()}

    for name in ("mm_bf16_bf16_bf16_64x64x128_2x1_pingpong_swap", FAMILIES["universal_split"]):
        with_swap = KERNELS[name]
        assert isinstance(with_swap.tile, Tile)
        without = Kernel(with_swap.gemm, replace(with_swap.tile, swap=False))
        only = {line.strip() for line in lines(with_swap) - lines(without)}
        assert any("kSwap = true" in line for line in only)
        assert all(re.search("kSwap|layout::|VectorBroadcast", line) for line in only), only
